"""How a model is split into pipeline stages and in which order they run."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ztk.core.policies.key import When, key, key_faults
from ztk.core.policies.ranges import COUNT, SIZE_OR_ZERO, member, pattern_faults, refuse

PARTITION_METHODS = "uniform, parameters, products or type:PATTERN"

# `1f1b` is no name that a class body can have. The help of topology.schedule describes the members.
ScheduleName = StrEnum(
    "ScheduleName",
    ["gpipe", "1f1b", "interleaved", "zero_bubble"],  # pyrefly: ignore[bad-class-definition]
)

_PIPELINE = When(
    "topology=pp2 and others with topology.pipeline above 1", lambda config, machine: config.topology.pipeline > 1
)


@dataclass(frozen=True, kw_only=True)
class PipelinePolicy:
    """How a model is split into stages and in which order they run.

    max_local_gradients: ZeRO stages 2 and 3. With more elements than this a rank reduces its gradients after every micro-batch: less memory,
        more bytes on the wire.
    dynamic_shapes: activations may change their shapes although the micro-batches do not.

    Raises ValueError for values that cannot work.
    """

    schedule: ScheduleName = key(
        "order of a pipeline's micro-batches: gpipe: all forwards, then all backwards; 1f1b: in turn, so fewer are alive; "
        "interleaved: 1f1b over several stages per rank; zero_bubble: 1f1b whose gradients of weights fill the bubble",
        default=ScheduleName("1f1b"),
        acts=_PIPELINE,
    )
    virtual_stages: int = key(
        "stages per rank of the interleaved schedule, 2 or more there",
        default=1,  # Megatron has no number of its own either: more stages send more, and the layers must be enough for them
        range=COUNT,
        acts=When(
            "topology.schedule=interleaved and topology.pipeline above 1",
            lambda config, machine: config.topology.pipeline > 1 and config.topology.schedule == "interleaved",
            section="topology",
            section_test=lambda values: values.schedule == "interleaved",
        ),
    )
    partition: str = key(
        "how layers are balanced over stages: uniform (number of layers), parameters, products (elements of matrices, without embeddings) or "
        "type:PATTERN (layers of these classes)",
        default="parameters",
        acts=_PIPELINE,
    )
    max_local_gradients: int = key(
        "up to this many elements, gradients are summed over micro-batches before they are reduced",
        default=500_000_000,
        range=SIZE_OR_ZERO,
        acts=When(
            "zero=stage2 or stage3 and topology.pipeline above 1",
            lambda config, machine: config.topology.pipeline > 1 and (config.zero.stage or 0) >= 2,
        ),
    )
    dynamic_shapes: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", member(self.schedule, of=ScheduleName, key="topology.schedule"))
        refuse(key_faults(self, section="topology"))
        refuse(partition_faults(self.partition))

    def check(self, *, num_ranks: int, num_micro_batches: int) -> None:
        """Raises ValueError, naming the fix, if the schedule cannot run with so many ranks and micro-batches."""
        check_schedule(
            self.schedule,
            num_ranks=num_ranks,
            num_micro_batches=num_micro_batches,
            virtual_stages=self.virtual_stages,
        )


def check_schedule(name: ScheduleName, *, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> None:
    """Raises ValueError, naming the fix, if the schedule cannot be made."""
    if num_ranks < 1 or num_micro_batches < 1 or virtual_stages < 1:
        raise ValueError(
            f"a pipeline of {num_ranks} ranks x {virtual_stages} virtual stages over {num_micro_batches} micro-batches: "
            "each must be at least 1"
        )
    if name is not ScheduleName.interleaved and virtual_stages > 1:
        raise ValueError(
            f"topology.virtual_stages={virtual_stages}: topology.schedule={name} runs one stage per rank; use "
            "topology.schedule=interleaved or topology.virtual_stages=1"
        )
    if name is ScheduleName.interleaved:
        refuse(
            interleaved_faults(num_ranks=num_ranks, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
        )


def interleaved_faults(*, num_ranks: int, num_micro_batches: int | None, virtual_stages: int | None) -> Iterator[str]:
    """Requirements of the interleaved schedule. None if a value is not given."""
    if num_micro_batches and num_micro_batches % num_ranks:
        yield (
            f"topology.schedule=interleaved runs micro-batches in rounds of one per stage: train.accumulation_steps={num_micro_batches} "
            f"must be a multiple of topology.pipeline={num_ranks}; use train.accumulation_steps="
            f"{-(-num_micro_batches // num_ranks) * num_ranks}"
        )
    if virtual_stages == 1:
        yield (
            "topology.virtual_stages=1: topology.schedule=interleaved needs several stages per rank; use topology.virtual_stages=2 or more, "
            "or topology.schedule=1f1b"
        )


def partition_faults(partition: str | None) -> Iterator[str]:
    """Checks that `topology.partition` is one of PARTITION_METHODS and its pattern a regular expression."""
    if partition is None or partition in ("uniform", "parameters", "products"):
        return
    if partition.startswith("type:"):
        yield from pattern_faults(partition.removeprefix("type:"), key="topology.partition")
    else:
        yield f"topology.partition={partition}: must be {PARTITION_METHODS}"
