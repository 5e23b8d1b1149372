"""Streams over torch datasets with any items, in the global order of `ztk.data.stream`."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from ztk.core.runtime.seed import generator_states, kept_generators, seed_generators, set_generators
from ztk.data.permutation import Permutation
from ztk.data.stream import Share, Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemBatch:
    """One micro-batch of one rank, on CPU. items: the collated items. weight: factor of its mean loss, the same as in `Batch`."""

    items: Any
    weight: float = 1.0


class ItemStream(Stream):
    """The items of a `torch.utils.data.Dataset`, endless and reshuffled every epoch, or of an `IterableDataset` in its own order.

    Items are collated by the dataset's method `collate`, if it has one, else by torch's `default_collate`. Every rank reads an
    IterableDataset in full and keeps its own items; a resumed run skips the items before its position.

    [Note: Draws of items] While an item is read, the global generators of torch, Python and numpy are seeded by `seed`, the epoch and the
    item; for an IterableDataset by the pass, once. Draws of a dataset thus depend on neither the rank, nor a resume, nor what a model draws
    in between. The program's own states of the generators are back afterwards.
    """

    def __init__(self, dataset: Any, *, share: Share, seed: int) -> None:
        """Raises ValueError for a dataset without items."""
        super().__init__(share, seq_len=0)
        self._dataset, self._seed = dataset, seed
        self._collate: Callable[[list[Any]], Any] = getattr(dataset, "collate", default_collate)
        self._is_iterable = isinstance(dataset, IterableDataset)
        self._count = 0 if self._is_iterable else len(dataset)
        if not self._is_iterable and not self._count:
            raise ValueError(f"data: {type(dataset).__name__} has no items")
        self._epoch = -1
        self._order: Permutation | None = None
        self._iterator: Iterator[Any] = iter(())
        self._next = 0  # position of the iterator's next item
        self._passes = 0  # over an IterableDataset, since position 0
        self._states: dict[str, Tensor] = {}  # of the generators after the iterator's last item

    def next_batch(self) -> Any:
        with kept_generators():
            return super().next_batch()

    def _batch(self, sequences: list[Any], *, step: int) -> ItemBatch:
        seed_generators(self._seed, "collate", self._position, self.share.sequences(step).start)
        return ItemBatch(items=self._collate(sequences), weight=self.share.weight(step))

    def sequence(self, position: int) -> Any:
        """Returns the item at a global position."""
        if self._is_iterable:
            return self._advance(position)
        epoch, index = divmod(position, self._count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation(self._count, seed=(self._seed, "data", epoch))
        assert self._order is not None
        seed_generators(self._seed, "item", epoch, self._order[index])
        return self._dataset[self._order[index]]

    def identity(self) -> dict[str, object]:
        return {"seed": self._seed, "num_items": self._count}

    def _advance(self, position: int) -> Any:
        """Reads up to a position. Each item is read once, because positions of a rank ascend, except for micro-batches without an
        item.
        """
        if position < self._next - 1:
            self._iterator, self._next, self._passes = iter(()), 0, 0
        if position == self._next - 1:
            return self._last
        set_generators(self._states)
        while self._next <= position:
            item = next(self._iterator, _END)
            if item is _END:
                seed_generators(self._seed, "pass", self._passes)
                self._passes += 1
                self._iterator = iter(self._dataset)
                item = next(self._iterator, _END)
                if item is _END:
                    raise ValueError(f"data: {type(self._dataset).__name__} has no items")
            self._last, self._next = item, self._next + 1
        self._states = generator_states()
        return self._last


_END = object()


def held_out_items(dataset: Any, *, share: Share, num_items: int, seed: int) -> list[ItemBatch]:
    """Returns this rank's micro-batches of the first `num_items` items, or of all if there are fewer. Always the same ones.

    Weights are the same as in `held_out_batches`. Only the ranks and the micro-batch size of `share` are used. seed: seeds the dataset's draws.
    """
    items: Iterable[Any] = (
        dataset if isinstance(dataset, IterableDataset) else map(dataset.__getitem__, range(len(dataset)))
    )
    with kept_generators():
        seed_generators(seed, "held out")
        found = list(itertools.islice(items, num_items))
        if not found:
            return []
        own = Share.of_total(len(found), micro_batch=share.micro_batch, rank=share.rank, world_size=share.world_size)
        collate, batches = getattr(dataset, "collate", default_collate), []
        for step in range(own.accumulation_steps):
            seed_generators(seed, "held out", own.sequences(step).start)
            picked = own.items(step, read=lambda number: found[min(number, len(found) - 1)])
            batches.append(ItemBatch(items=collate(picked), weight=own.weight(step)))
    return batches
