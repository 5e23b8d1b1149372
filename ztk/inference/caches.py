"""A cache as a placement has it."""

import torch

from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache
from ztk.inference.describe import Description
from ztk.inference.placement import Placement
from ztk.inference.slab_cache import SlabCache


def scratch(
    description: Description, *, placement: Placement, positions: int, dtype: torch.dtype | None = None
) -> SlabCache | BlockCache:
    """For one sequence of so many tokens; dtype: of blocks, None: that of the placement."""
    if not placement.has_blocks:
        slabs = SlabCache(description, slots=1)
        slabs.reserve(positions)
        return slabs
    count = -(-positions // BLOCK)
    kind = placement.dtype if dtype is None else dtype
    blocks = BlockCache(description, slots=1, blocks=count, device=placement.device, dtype=kind)
    blocks.tables[0] = list(range(count))
    return blocks
