"""Where the rows of a step are: computed once, used by every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK, Tiles, tile_of
from ztk.inference.cache import Cache

QUERIES = 2 * BLOCK  # queries whose scores exist at one time


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """`length` rows from `row` on belong to the sequence in `slot`, at positions from `start` on."""

    slot: int
    start: int
    length: int
    row: int


class Step:
    """The places of a step's M rows. positions, slots: int64 [M]. group: query heads per key head."""

    def __init__(self, spans: list[Span], *, group: int) -> None:
        self.positions = torch.cat([torch.arange(span.start, span.start + span.length) for span in spans])
        self.slots = torch.repeat_interleave(
            torch.tensor([span.slot for span in spans]), torch.tensor([span.length for span in spans])
        )
        self._block = torch.div(self.positions, BLOCK, rounding_mode="floor")
        self._within = torch.remainder(self.positions, BLOCK)
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        tile = tile_of(group)
        single = [span for span in spans if span.length == 1]
        self.groups = [_single(single[at : at + QUERIES], tile=tile) for at in range(0, len(single), QUERIES)]
        for span in spans:
            if span.length > 1:
                self.groups += _many(span, tile=tile)

    def rotary(self, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of one of the model's rotary tables, (cosine, sine) [M, rotary_dims / 2] each."""
        found = self._rotary.get(id(table))
        if found is None:
            found = self._rotary[id(table)] = (table[0][self.positions], table[1][self.positions])
        return found

    def write(self, key: Tensor, *, value: Tensor, cache: Cache, layer: int) -> None:
        """Keys and values [M, K, D] of all rows into the cache."""
        for slabs, rows in ((cache.keys, key), (cache.values, value)):
            slabs[layer][self.slots, self._block, :, self._within] = rows


def _single(spans: list[Span], *, tile: int) -> Tiles:
    """Sequences with one row each."""
    starts = torch.tensor([span.start for span in spans])
    rows = torch.tensor([span.row for span in spans])
    lines = torch.remainder(starts, tile)
    return Tiles(
        tile=tile,
        rows=rows.unsqueeze(1).expand(-1, tile),
        slots=[span.slot for span in spans],
        blocks=[_blocks(span.start + 1) for span in spans],
        firsts=starts - lines,
        lines=lines,
        targets=rows,
        sources=torch.arange(len(spans)),
    )


def _many(span: Span, *, tile: int) -> list[Tiles]:
    """One sequence's rows, `QUERIES` places at a time."""
    stop, found = span.start + span.length, []
    size = max(tile, QUERIES // tile * tile)
    for first in range(span.start // tile * tile, stop, size):
        firsts = torch.arange(first, min(first + size, stop), tile)
        at = (firsts.unsqueeze(1) + torch.arange(tile)).flatten()
        sources = torch.where((at >= span.start) & (at < stop))[0]
        found.append(
            Tiles(
                tile=tile,
                rows=(at.clamp(span.start, stop - 1) - span.start + span.row).view(-1, tile),
                slots=[span.slot] * len(firsts),
                blocks=[_blocks(min(int(place) + tile, stop)) for place in firsts],
                firsts=firsts,
                lines=None,
                targets=at[sources] - span.start + span.row,
                sources=sources,
            )
        )
    return found


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK)
