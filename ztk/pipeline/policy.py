"""What a user chooses about a pipeline."""

from dataclasses import dataclass

from ztk.pipeline.partition import METHODS
from ztk.pipeline.schedule import ScheduleName, check


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePolicy:
    """How a model is cut into stages and in which order they run.

    schedule: gpipe, 1f1b, interleaved or zero_bubble. virtual_stages: stages per rank, for interleaved.
    partition: uniform, parameters, type:PATTERN (a regular expression for class names) or profile (measured seconds per layer).
    max_local_gradients: ZeRO stages 2 and 3: up to this many elements, a rank's gradients are summed over the micro-batches before they are
        reduced, once; with more, every micro-batch's are reduced, which keeps a shard alone at the price of more traffic.
    dynamic_shapes: activations may change their shapes although the micro-batches do not.
    """

    schedule: ScheduleName = ScheduleName.one_f_one_b
    virtual_stages: int = 1
    partition: str = "parameters"
    max_local_gradients: int = 500_000_000
    dynamic_shapes: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", ScheduleName(self.schedule))
        if self.partition not in ("uniform", "parameters", "profile") and not self.partition.startswith("type:"):
            raise ValueError(f"topology.partition={self.partition}: must be {METHODS}")
        if self.max_local_gradients < 0:
            raise ValueError(f"topology.max_local_gradients={self.max_local_gradients}: must be 0 or more elements")

    def check(self, *, num_ranks: int, num_micro_batches: int) -> None:
        """Raises ValueError, with the mend, if the schedule cannot run on so many ranks with so many micro-batches."""
        check(
            self.schedule,
            num_ranks=num_ranks,
            num_micro_batches=num_micro_batches,
            virtual_stages=self.virtual_stages,
        )
