"""What every model over a cache of slabs has: its cache, a step's logits, and where they stop being finite."""

from abc import ABC, abstractmethod

from torch import Tensor

from ztk.inference.cache import Cache
from ztk.inference.describe import Description
from ztk.inference.products import Product
from ztk.inference.steps import Span


class OverSlabs(ABC):
    """A model whose keys and values are in one slab per sequence. description: of this rank's heads."""

    description: Description

    @abstractmethod
    def own_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int]) -> Tensor:
        """As `step_logits`, where every rank that shares the model makes the call: tokens int64 [M]."""

    @abstractmethod
    def products(self) -> list[Product]:
        """All linear layers that are in memory, the head among them."""

    @abstractmethod
    def own_broken(self, tokens: list[int], *, span: Span, cache: Cache) -> int | None:
        """The first layer whose output is not finite, of rows of one sequence alone; None: all are. Every rank that shares the model makes the
        call."""

    def step_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int]) -> Tensor:
        """One step: tokens int64 [M] -> logits fp32 [len(rows), V] of those rows."""
        return self.own_logits(tokens, spans=spans, cache=cache, rows=rows)

    def first_broken(self, tokens: list[int], *, cache: Cache, slot: int, rows: int) -> int | None:
        """The first layer whose output is not finite, of a sequence that is computed alone; None: all are. slot: its own, which it has to give
        up, so that no memory is needed for it. rows: of a step at most."""
        cache.clear(slot)
        found = []
        for start in range(0, len(tokens), rows):
            part = tokens[start : start + rows]
            span = Span(slot=slot, start=start, length=len(part), row=0)
            found.append(self.own_broken(part, span=span, cache=cache))
        return min((number for number in found if number is not None), default=None)

    def new_cache(self, *, slots: int) -> Cache:
        """For so many sequences."""
        return Cache(self.description, slots=slots)

    def scratch(self, positions: int) -> Cache:
        """A cache for one sequence of so many tokens."""
        cache = Cache(self.description, slots=1)
        cache.reserve(positions)
        return cache
