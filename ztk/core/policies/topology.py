"""Keys of `topology`: how ranks divide the model."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from ztk.core.policies.key import Changes, When, key
from ztk.core.policies.ranges import COUNT, SIZE_OR_ZERO

# The words of a tensor plan: see `ztk.parallel.tensor.Style`.
TENSOR_STYLES = ("column", "row", "vocabulary", "head", "column_gathered", "row_split", "partial")


class ScheduleName(StrEnum):
    """The schedules by name."""

    gpipe = "gpipe"  # all forwards, then all backwards
    one_f_one_b = "1f1b"  # a forward and a backward in turn, so that fewer micro-batches are in flight
    interleaved = "interleaved"  # 1f1b over several stages per rank: a smaller bubble for more transfers
    zero_bubble = "zero_bubble"  # 1f1b whose weight gradients fill the bubble


# Members are named as on the command line, and `1f1b` is no name that a class body can have.
# pyrefly: ignore[invalid-argument]  # the members follow another enum
PipelineSchedule = StrEnum("PipelineSchedule", [(name.value, name.value) for name in ScheduleName])


class Degrees:
    """Arithmetic of the degrees of parallelism, for classes that have them as attributes."""

    __slots__ = ()
    pipeline: int
    tensor: int
    sequence: int
    context: int
    expert: int

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share a sequence: they have different parts of it and the same part of the model."""
        return self.context * self.sequence

    @property
    def model_ranks(self) -> int:
        """Ranks that one batch needs."""
        return self.pipeline * self.tensor * self.sequence_ranks

    @property
    def min_ranks(self) -> int:
        """The smallest world with these degrees."""
        replicas = 1
        while not self.divide(replicas * self.model_ranks):
            replicas += 1
        return replicas * self.model_ranks

    def divide(self, ranks: int) -> bool:
        """Whether this number of ranks can be cut into the degrees. Experts are spread over data-parallel ranks."""
        replicas, rest = divmod(ranks, self.model_ranks)
        return replicas > 0 and not rest and (replicas * self.sequence_ranks) % self.expert == 0


def tensor_rule(pattern: str, *, text: object) -> tuple[str, int]:
    """Returns style and grain of a tensor plan's entry, such as "column" or "column:64". Raises ValueError for other entries."""
    style, has_grain, grain = str(text).partition(":")
    if style not in TENSOR_STYLES or (has_grain and not (grain.isdecimal() and int(grain))):
        raise ValueError(
            f"tensor plan {pattern}={text}: must be one of {', '.join(TENSOR_STYLES)}, or with :N, N from 1 on"
        )
    return style, int(grain or 1)


def heads_of_ranks(heads: int, *, kv_heads: int, ranks: int) -> list[int]:
    """The numbers of query heads that a tensor-parallel rank may have. Key heads are divided with their query heads; the first ranks may get
    one more."""
    base, larger = divmod(kv_heads, ranks)
    return [(base + more) * (heads // kv_heads) for more in ((1, 0) if larger else (0,))]


_PIPELINE = When(
    "topology=pp2 and others with topology.pipeline above 1", lambda config, machine: config.topology.pipeline > 1
)


@dataclass(kw_only=True)
class TopologyConfig(Degrees):
    """How the ranks divide the model: degrees of pipeline, tensor, sequence, context, expert and data parallelism."""

    changes: ClassVar = Changes.experiment

    pipeline: int = key("pipeline-parallel degree: the layers are split into this many stages", default=1, range=COUNT)
    tensor: int = key("tensor-parallel degree: each layer is split over this many ranks", default=1, range=COUNT)
    expert: int = key(
        "expert-parallel degree: experts are spread over this many of the data-parallel ranks", default=1, range=COUNT
    )
    sequence: int = key(
        "sequence-parallel degree (Ulysses): each sequence is split over this many ranks", default=1, range=COUNT
    )
    context: int = key(
        "context-parallel degree (ring attention): each sequence is split over this many ranks, before topology.sequence splits it",
        default=1,
        range=COUNT,
    )
    data: int | None = key("data-parallel degree: batches at a time; null: as many as the ranks allow", range=COUNT)
    sequence_parallel: bool | None = key(
        "norms and residuals work on a part of the sequence per tensor-parallel rank (Megatron's sequence parallelism)",
        default=False,
        acts=When(
            "topology=tp2 and others with topology.tensor above 1", lambda config, machine: config.topology.tensor > 1
        ),
        was="topology.sequence_norms",
    )
    plan: dict[str, Any] | None = key(
        "tensor plan of an own or a transformers model: patterns of module names (* for a part of a name) to "
        f"{', '.join(TENSOR_STYLES)}, with :N for multiples of N outputs or inputs, such as a head's size; null: the model's attribute "
        "tensor_plan, its tp_plan, or a plan that follows from its modules",
        optional=True,
        acts=When(
            "topology=tp2 and others with topology.tensor above 1", lambda config, machine: config.topology.tensor > 1
        ),
    )
    schedule: PipelineSchedule | None = key(
        "order of a pipeline's micro-batches: gpipe: all forwards, then all backwards; 1f1b: in turn, so fewer are alive; "
        "interleaved: 1f1b over several stages per rank; zero_bubble: 1f1b whose gradients of weights fill the bubble",
        default=PipelineSchedule("1f1b"),
        acts=_PIPELINE,
    )
    virtual_stages: int | None = key(
        "stages per rank of the interleaved schedule",
        default=2,
        range=COUNT,
        acts=When(
            "topology.schedule=interleaved and topology.pipeline above 1",
            lambda config, machine: config.topology.pipeline > 1 and config.topology.schedule == "interleaved",
        ),
    )
    partition: str | None = key(
        "how layers are balanced over stages: uniform (number of layers), parameters, products (elements of matrices, without embeddings), "
        "type:PATTERN (layers of these classes) or profile (measured time)",
        default="parameters",
        acts=_PIPELINE,
    )
    max_local_gradients: int | None = key(
        "up to this many elements, gradients are summed over micro-batches before they are reduced",
        default=500_000_000,
        range=SIZE_OR_ZERO,
        acts=When(
            "zero=stage2 or stage3 and topology.pipeline above 1",
            lambda config, machine: config.topology.pipeline > 1 and (config.zero.stage or 0) >= 2,
        ),
    )
