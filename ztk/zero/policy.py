"""The user's choices about ZeRO."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPolicy:
    """Which states are sharded over the data-parallel ranks, and how many parameters are gathered ahead and kept. Sizes are in elements.

    stage: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters (Rajbhandari et al. 2020,
        https://arxiv.org/abs/1910.02054).
    bucket_size: a unit with more elements is cut into several flat buffers (a parameter is never cut).
    prefetch_bucket_size: stage 3: so many elements are gathered ahead of their use.
    max_live_parameters: stage 3: prefetching stops when this many elements are gathered.
    max_reuse_distance: stage 3: a unit stays gathered if it is used again within this many elements.
    param_persistence_threshold: stage 3: parameters with at most this many elements are never sharded.

    hpz_partition_size: stage 3: so many ranks of one node share a second copy of the parameters, and the backward gathers from it.
        Must equal the topology's `intra_node`.

    The next two change numbers, see `ztk.zero.exchange`:
    quantized_weights: stage 3: weights are sent as int8; ranks compute with what they receive, and master weights stay exact.
    quantized_gradients: stages 2 and 3: gradients are sent as int4.

    Raises ValueError for values that cannot work, and for options that the stage does not have.
    """

    stage: int = 0
    bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 0
    param_persistence_threshold: int = 0
    quantized_weights: bool = False
    quantized_gradients: bool = False
    hpz_partition_size: int = 1

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero.stage={self.stage}: must be 0, 1, 2 or 3; use zero=stage0 ... zero=stage3")
        if self.bucket_size < 1:
            raise ValueError(f"zero.bucket_size={self.bucket_size}: must be at least 1 element")
        sizes = "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "param_persistence_threshold"
        for name in sizes:
            if getattr(self, name) < 0:
                raise ValueError(f"zero.{name}={getattr(self, name)}: must be 0 or more elements")
        if self.quantized_weights and self.stage < 3:
            raise ValueError(
                f"zero.quantized_weights=true: weights are sent at stage 3 only, not at {self.stage}; use zero=stage3"
            )
        if self.quantized_gradients and self.stage < 2:
            raise ValueError(
                f"zero.quantized_gradients=true: needs stage 2 or 3, not {self.stage}; use zero=stage2 or zero=stage3"
            )
        if self.hpz_partition_size < 1 or (self.hpz_partition_size > 1 and self.stage < 3):
            raise ValueError(
                f"zero.hpz_partition_size={self.hpz_partition_size} with stage {self.stage}: must be 1, or more with zero=stage3"
            )

    @property
    def shards_optimizer(self) -> bool:
        """Stages 1 to 3."""
        return self.stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """Stages 2 and 3."""
        return self.stage >= 2

    @property
    def shards_parameters(self) -> bool:
        """Stage 3."""
        return self.stage >= 3
