"""Sharding of states and parameters (ZeRO)."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from ztk.core.policies.key import Changes, When, key, key_faults, section
from ztk.core.policies.ranges import COUNT, SIZE, SIZE_OR_ZERO, Range, refuse

MAX_LIVE_PARAMETERS = 1_000_000_000  # elements, DeepSpeed's default of max_live_parameters


class ZeroEngine(StrEnum):
    """The implementation of sharding and reduction."""

    ztk = "ztk"  # ztk's own ZeRO, stages 0 to 3
    ddp = "ddp"  # torch.nn.parallel.DistributedDataParallel, to compare with
    fsdp2 = "fsdp2"  # torch.distributed.fsdp.fully_shard, to compare with


ZTK = When("zero=stage0 to stage3", lambda config, machine: config.zero.engine == "ztk")
STAGE3 = When("zero=stage3", lambda config, machine: config.zero.stage == 3)


class ZeroChoices(Protocol):
    """The fields that rules between policies read; None if not given."""

    stage: int | None
    hpz_partition_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPolicy:
    """Which states are sharded over the data-parallel ranks (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), how far ahead
    parameters are gathered, and how many stay gathered. Sizes are in elements.

    bucket_size: a parameter is never split.
    prefetch_bucket_size: a fixed number gathers all of a small model.
    overlap_gather: operations that access a parameter through torch wait, too. Off by default; `run.py` turns it on for its own tasks. A
        C++ extension that bypasses torch and reads a parameter between steps would not wait.

    ZeRO++ (Wang et al. 2023, https://arxiv.org/abs/2306.10209). The quantized collectives change numbers, `hpz_partition_size` does not:
    quantized_weights: master weights stay exact.
    quantized_nontrainable_weights: the same for frozen parameters only, such as the weights below adapters.
    hpz_partition_size: must equal the topology's `intra_node`.

    Raises ValueError for a number outside of its range and for an option that the stage does not have.
    """

    changes: ClassVar = Changes.experiment

    stage: int = key(
        "sharded states: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too",
        default=0,
        range=Range(low=0, high=3),
        acts=ZTK,
    )
    bucket_size: int = key(
        "elements of one flat buffer; a larger unit is split", default=500_000_000, range=SIZE, acts=ZTK
    )
    prefetch_bucket_size: int | None = key(
        "elements of parameters gathered ahead of their use, one bucket at least; 0: none; null: a sixteenth of the model, at most "
        "50,000,000, and none if a bucket is larger than an eighth of the model",
        range=SIZE_OR_ZERO,
        acts=STAGE3,
        optional=True,
    )
    max_live_parameters: int | None = key(
        "nothing is gathered ahead while this many elements are gathered, and no more stay for their next use; null: half of the model, or "
        "the elements in use and prefetched if that is more, at most 1,000,000,000; rollouts and pipeline batches then keep that many",
        range=SIZE_OR_ZERO,
        acts=STAGE3,
        optional=True,
    )
    max_reuse_distance: int = key(
        "a unit stays gathered if it is used again within this many elements",
        default=0,
        range=SIZE_OR_ZERO,
        acts=STAGE3,
    )
    overlap_gather: bool = key(
        "the next forward begins while updated parameters are gathered, and waits per bucket at its first use",
        default=False,
        acts=When("zero=stage1 or zero=stage2", lambda config, machine: config.zero.stage in (1, 2)),
        optional=True,
    )
    param_persistence_threshold: int = key(
        "parameters with at most this many elements are never sharded", default=0, range=SIZE_OR_ZERO, acts=STAGE3
    )
    quantized_weights: bool = key(
        "all-gather parameters as int8: half the bytes, and all ranks compute with the rounded values (ZeRO++ qwZ)",
        default=False,
        acts=STAGE3,
        changes=Changes.numbers,
    )
    quantized_gradients: bool = key(
        "reduce gradients as int4: a quarter of the bytes (ZeRO++ qgZ)",
        default=False,
        acts=When(
            "zero=stage2 or zero=stage3",
            lambda config, machine: config.zero.engine == "ztk" and (config.zero.stage or 0) >= 2,
        ),
        changes=Changes.numbers,
    )
    hpz_partition_size: int = key(
        "this many neighbouring ranks (a node's GPUs) keep a second copy of the parameters, from which the backward gathers "
        "(ZeRO++ hpZ); 1: off",
        default=1,
        range=COUNT,
        acts=STAGE3,
    )
    quantized_nontrainable_weights: bool = False

    def __post_init__(self) -> None:
        refuse(self._faults())

    @property
    def max_kept_parameters(self) -> int:
        """Elements that stay gathered over many passes: in a rollout, or in a pipeline batch."""
        return MAX_LIVE_PARAMETERS if self.max_live_parameters is None else self.max_live_parameters

    def _faults(self) -> Iterator[str]:
        yield from key_faults(self, section="zero")
        for name in ("quantized_weights", "quantized_nontrainable_weights"):
            if getattr(self, name) and self.stage < 3:
                yield f"zero.{name}=true: stage {self.stage} does not gather parameters for use; use zero=stage3"
        if self.quantized_gradients and self.stage < 2:
            yield f"zero.quantized_gradients=true: stage {self.stage} does not shard gradients; use zero=stage2 or zero=stage3"
        if self.overlap_gather and self.stage not in (1, 2):
            yield f"zero.overlap_gather=true: stage {self.stage} gathers no updated parameters; use zero=stage1 or zero=stage2"
        if self.hpz_partition_size > 1 and self.stage < 3:
            yield (
                f"zero.hpz_partition_size={self.hpz_partition_size}: stage {self.stage} does not shard parameters; use "
                "zero=stage3, or leave hpz_partition_size out"
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


@section
class ZeroConfig(ZeroPolicy):
    """Which of optimizer states, gradients and parameters are sharded, and by which implementation."""

    engine: ZeroEngine = key(
        "the implementation: ztk's own ZeRO; torch's DistributedDataParallel (ddp) or fully_shard (fsdp2), to compare with",
        default=MISSING,
    )
