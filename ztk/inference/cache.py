"""Keys and values of the sequences that are computed: a slab per sequence."""

import torch

from ztk.inference.attention import BLOCK, Scratch
from ztk.inference.describe import Description

GROWTH = 4  # blocks by which all slabs grow


def rounded(positions: int) -> int:
    """Positions of a slab with room for so many."""
    return -(-positions // (GROWTH * BLOCK)) * GROWTH * BLOCK


class Cache:
    """keys[layer] and values[layer]: fp32 [slots, blocks, K, 64, D]; the blocks that a query sees are one piece of memory.

    scratch: memory for attention over it.

    On a CPU a slab per sequence is read in one piece; gathering pages of 16 tokens costs 15 to 18 times as much.
    """

    def __init__(self, description: Description, *, slots: int) -> None:
        self.scratch = Scratch()
        shape = (slots, 0, description.kv_heads, BLOCK, description.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(description.layers)]
        self.values = [torch.zeros(shape) for _ in range(description.layers)]

    @property
    def positions(self) -> int:
        """Positions that every slab has memory for."""
        return self.keys[0].shape[1] * BLOCK

    @property
    def slots(self) -> int:
        """Sequences that there is a slab for."""
        return self.keys[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in (*self.keys, *self.values))

    def reserve(self, positions: int) -> None:
        """Grows all slabs to at least `positions`."""
        if positions > self.positions:
            self.arrange(slots=self.slots, positions=positions)

    def arrange(self, *, slots: int, positions: int) -> None:
        """So many slots from now on, of `positions` rounded up; what lies in both layouts stays. One layer's slab at a time is there twice."""
        wanted = (slots, rounded(positions) // BLOCK)
        if wanted == self.keys[0].shape[:2]:
            return
        self.scratch.release()
        for slabs in (self.keys, self.values):
            for number, slab in enumerate(slabs):
                kept = slice(min(slots, slab.shape[0])), slice(min(wanted[1], slab.shape[1]))
                # Not by cat: glibc does not reuse the gap that a temporary of zeros leaves, which doubled the resident memory.
                laid_out = slab.new_zeros(*wanted, *slab.shape[2:])
                laid_out[kept] = slab[kept]
                slabs[number] = laid_out

    def copy(self, source: int, *, target: int, positions: int) -> None:
        """The first `positions` of one slot become another's."""
        full, rest = divmod(positions, BLOCK)
        for slab in (*self.keys, *self.values):
            slab[target, :full] = slab[source, :full]
            if rest:
                slab[target, full, :, :rest] = slab[source, full, :, :rest]

    def clear(self, slot: int) -> None:
        """Zeros a slot: what a broken sequence left would make NaN of a masked zero."""
        for slab in (*self.keys, *self.values):
            slab[slot] = 0
