"""A cache for one sequence, of the kind that a placement has."""

from ztk.inference.block_cache import BlockCache
from ztk.inference.cache_attention import BLOCK
from ztk.inference.describe import Description
from ztk.inference.placement import Placement
from ztk.inference.slab_cache import SlabCache


def scratch(description: Description, *, placement: Placement, positions: int) -> SlabCache | BlockCache:
    """Has room for `positions` tokens."""
    if not placement.has_blocks:
        slabs = SlabCache(description, slots=1)
        slabs.reserve(positions)
        return slabs
    count = -(-positions // BLOCK)
    place = {"device": placement.device, "dtype": placement.dtype}
    blocks = BlockCache(description, slots=1, blocks=count, width=count, **place)
    blocks.tables[0] = list(range(count))
    return blocks
