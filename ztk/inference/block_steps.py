"""Where the rows of a step are in a cache of blocks: computed once on the host, used by every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache
from ztk.inference.steps import Span
from ztk.kernels import make_tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStep:
    """A step's M rows: positions int64 [M]; places int64 [M], block times 64 plus position in it, -1: padding; tables int32 [slots, width];
    tiles int32 [Q, 5], see `ztk.kernels.paged_attention`. split: every sequence has one row, so segments are computed side by side."""

    positions: Tensor
    places: Tensor
    tables: Tensor
    tiles: Tensor
    split: bool

    @staticmethod
    def of(spans: list[Span], *, cache: BlockCache, group: int) -> "BlockStep":
        """group: query heads per key head. The cache's tables have blocks for all positions of the spans."""
        positions, places = [], []
        for span in spans:
            table = cache.tables[span.slot]
            for position in range(span.start, span.start + span.length):
                positions.append(position)
                places.append(table[position // BLOCK] * BLOCK + position % BLOCK)
        tables = padded_tables(cache, slots=[span.slot for span in spans])
        tiles = make_tiles([(row, span.start, span.length, span.row) for row, span in enumerate(spans)], group=group)
        return BlockStep(
            positions=torch.tensor(positions).to(cache.device),
            places=torch.tensor(places).to(cache.device),
            tables=torch.tensor(tables, dtype=torch.int32).to(cache.device),
            tiles=torch.tensor(tiles, dtype=torch.int32).to(cache.device),
            split=all(span.length == 1 for span in spans),
        )


def padded_tables(cache: BlockCache, *, slots: list[int]) -> list[list[int]]:
    """The tables of `slots`, all as long as the longest."""
    found = [cache.tables[slot] for slot in slots]
    width = max(map(len, found))
    return [table + [0] * (width - len(table)) for table in found]
