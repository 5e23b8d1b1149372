"""The interface of a model to the engine, whatever computes it."""

from abc import ABC, abstractmethod

from torch import Tensor

from ztk.inference.adapters import Adapters
from ztk.inference.cache import Cache, Span
from ztk.inference.describe import Description
from ztk.inference.placement import Placement
from ztk.inference.products import Product
from ztk.inference.ranks import Ranks
from ztk.kernels.shared.cached_attention import BLOCK


class Model(ABC):
    """Computes steps of several sequences over a cache. ranks: share the model; `description` then has this rank's heads."""

    description: Description
    placement: Placement
    ranks: Ranks | None
    adapters: Adapters | None = None

    @abstractmethod
    def products(self) -> list[Product]:
        """All products in memory, the head last."""

    @abstractmethod
    def own_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int]) -> Tensor:
        """One step: tokens int64 [M] -> logits fp32 [len(rows), V] of those rows. A collective call of the ranks that share the model."""

    @abstractmethod
    def own_broken(self, tokens: list[int], *, span: Span, cache: Cache) -> int | None:
        """The first layer whose output is not finite, for rows of one sequence alone, or None. A collective call of the ranks that share
        the model."""

    def scratch(self, positions: int, *, slots: int = 1) -> Cache:
        """A cache for sequences of so many tokens."""
        of, place, count = self.description, self.placement, -(-positions // BLOCK)
        found = Cache(of, slots=slots, blocks=slots * count, width=count, device=place.device, dtype=place.dtype)
        for slot, table in enumerate(found.tables):
            table.extend(range(slot * count, (slot + 1) * count))
        return found
