"""Keys and values of the sequences that are computed: a slab per sequence."""

import torch

from ztk.inference.attention import BLOCK, Scratch
from ztk.inference.describe import Description

GROWTH = 4  # blocks by which all slabs grow


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
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in (*self.keys, *self.values))

    def reserve(self, positions: int) -> None:
        """Grows all slabs to at least `positions`."""
        extra = -(-positions // (GROWTH * BLOCK)) * GROWTH - self.keys[0].shape[1]
        if extra <= 0:
            return
        self.scratch.forget()
        for slabs in (self.keys, self.values):
            for number, slab in enumerate(slabs):
                slots, blocks, *block = slab.shape
                # Not by cat: glibc does not reuse the gap that a temporary of zeros leaves, which doubled the resident memory.
                grown = slab.new_zeros(slots, blocks + extra, *block)
                grown[:, :blocks] = slab
                slabs[number] = grown

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
