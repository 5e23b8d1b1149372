"""Keys of `topology`: how ranks divide the model."""

from typing import ClassVar

from ztk.core.policies.key import Changes, key, section
from ztk.core.policies.pipeline import PipelinePolicy
from ztk.core.policies.ranges import COUNT
from ztk.core.policies.tensor import TensorPolicy


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


def heads_of_ranks(heads: int, *, kv_heads: int, ranks: int) -> list[int]:
    """The numbers of query heads that a tensor-parallel rank may have. Key heads are divided with their query heads; the first ranks may get
    one more."""
    base, larger = divmod(kv_heads, ranks)
    return [(base + more) * (heads // kv_heads) for more in ((1, 0) if larger else (0,))]


@section
class TopologyConfig(PipelinePolicy, TensorPolicy, Degrees):
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
