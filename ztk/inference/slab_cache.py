"""Keys and values of the sequences that are computed: a slab per sequence."""

from math import prod
from mmap import mmap

import torch
from torch import Tensor

from ztk.inference.cache import Cache
from ztk.inference.cache_attention import BLOCK, Scratch
from ztk.inference.describe import Description
from ztk.inference.steps import Places, SlabStep, Span

GROWTH = 4  # blocks by which all slabs grow


def rounded(positions: int) -> int:
    """Positions of a slab with room for `positions`."""
    return -(-positions // (GROWTH * BLOCK)) * GROWTH * BLOCK


def lazy_zeros(shape: tuple[int, ...]) -> Tensor:
    """fp32 zeros of any shape, whose pages take memory when they are written. A slab has room for the longest answer, by default the rest
    of the context, and most answers are short."""
    if not (count := prod(shape)):
        return torch.zeros(shape)
    return torch.frombuffer(mmap(-1, 4 * count), dtype=torch.float32).view(shape)


class SlabCache(Cache):
    """keys[layer] and values[layer]: fp32 [slots, blocks, K, 64, D]; the visible blocks of a query are contiguous.

    scratch: memory for attention over it.

    On a CPU a slab per sequence is read in one piece; gathering pages of 16 tokens costs 15 to 18 times as much.
    """

    def __init__(self, description: Description, *, slots: int) -> None:
        super().__init__()
        self._of, self.scratch = description, Scratch()
        self._written: set[int] = set()  # slots with any keys; pages of the others hold zeros that take no memory
        shape = (slots, 0, description.kv_heads, BLOCK, description.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(description.layers)]
        self.values = [torch.zeros(shape) for _ in range(description.layers)]

    @property
    def positions(self) -> int:
        """Positions per slab."""
        return self.keys[0].shape[1] * BLOCK

    @property
    def slots(self) -> int:
        """Number of slabs."""
        return self.keys[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in (*self.keys, *self.values))

    def step(self, spans: list[Span]) -> SlabStep:
        of = self._of
        self._written.update(span.slot for span in spans)
        group = of.heads // of.kv_heads
        places = Places(spans, group=group, kv_heads=of.kv_heads, head_dim=of.head_dim, scratch=self.scratch)
        return SlabStep(places, keys=self.keys, values=self.values)

    def recompute(self, slot: int, *, tokens: list[int]) -> list[int]:
        self.clear(slot)
        return tokens

    def close(self) -> None:
        pass

    def reserve(self, positions: int) -> None:
        """Grows all slabs to at least `positions`."""
        if positions > self.positions:
            self.arrange(slots=self.slots, positions=positions)

    def arrange(self, *, slots: int, positions: int) -> None:
        """Sets the number of slots, each of `positions` rounded up. Keys and values in both layouts stay. One layer's slab at a time exists
        twice."""
        self._note("arrange", slots=slots, positions=positions)
        wanted = (slots, rounded(positions) // BLOCK)
        if wanted == self.keys[0].shape[:2]:
            return
        self.scratch.release()
        self._written = {slot for slot in self._written if slot < slots}
        for slabs in (self.keys, self.values):
            for number, slab in enumerate(slabs):
                laid_out, blocks = lazy_zeros((*wanted, *slab.shape[2:])), min(wanted[1], slab.shape[1])
                for slot in self._written:
                    laid_out[slot, :blocks] = slab[slot, :blocks]
                slabs[number] = laid_out

    def copy(self, source: int, *, target: int, positions: int) -> None:
        """Copies the first `positions` of one slot to another."""
        self._note("copy", source, target=target, positions=positions)
        self._written.add(target)
        full, rest = divmod(positions, BLOCK)
        for slab in (*self.keys, *self.values):
            slab[target, :full] = slab[source, :full]
            if rest:
                slab[target, full, :, :rest] = slab[source, full, :, :rest]

    def clear(self, slot: int) -> None:
        """Zeros a slot, because values of a broken sequence would turn a masked zero into NaN."""
        self._note("clear", slot)
        for slab in (*self.keys, *self.values):
            slab[slot] = 0
