"""Where the rows of a step are: computed once, used by every layer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK, Scratch, Tiles, attend, tile_of
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
    """The places of a step's M rows. positions: int64 [M]. group: query heads per key head. scratch: memory for attention."""

    def __init__(self, spans: list[Span], *, group: int, scratch: Scratch | None = None) -> None:
        at = [(span.slot, place) for span in spans for place in range(span.start, span.start + span.length)]
        self.positions = torch.tensor([place for _, place in at])
        self._at, self._places = at, {}
        self._scratch = scratch or Scratch()
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        tile = tile_of(group)
        size = max(1, QUERIES // tile)
        single = [span for span in spans if span.length == 1]
        self.groups = [_single(single[first : first + size], tile=tile) for first in range(0, len(single), size)]
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
            slab = slabs[layer]
            _, blocks, K, _, D = slab.shape
            slab.view(-1, D).index_copy_(0, self._lines(blocks, kv_heads=K), rows.reshape(-1, D))

    def attend(self, query: Tensor, *, keys: Tensor, values: Tensor, scale: float, **options: Any) -> Tensor:
        """`ztk.inference.attention.attend` for all rows: query [M, H, D] -> fp32 [M, H, D]. options: its others."""
        options |= {"keys": keys, "values": values, "scale": scale, "scratch": self._scratch}
        if len(self.groups) == 1 and self.groups[0].sources is None:
            return attend(query, tiles=self.groups[0], **options)
        out = torch.empty(query.shape)
        for tiles in self.groups:
            out[tiles.targets] = attend(query, tiles=tiles, **options)
        return out

    def _lines(self, blocks: int, *, kv_heads: int) -> Tensor:
        """int64 [M K]: which row of a slab [slots, blocks, K, BLOCK, D] each head of each row is."""
        found = self._places.get((blocks, kv_heads))
        if found is None:
            first = [(slot * blocks + place // BLOCK) * kv_heads * BLOCK + place % BLOCK for slot, place in self._at]
            found = (torch.tensor(first).unsqueeze(1) + torch.arange(0, kv_heads * BLOCK, BLOCK)).view(-1)
            self._places[blocks, kv_heads] = found
        return found


def _single(spans: list[Span], *, tile: int) -> Tiles:
    """Sequences with one row each."""
    starts, rows = torch.tensor([span.start for span in spans]), [span.row for span in spans]
    lines = torch.remainder(starts, tile)
    shared = {
        "tile": tile,
        "slots": tuple(span.slot for span in spans),
        "blocks": tuple(_blocks(span.start + 1) for span in spans),
        "firsts": starts - lines,
        "lines": lines,
    }
    if rows == list(range(rows[0], rows[0] + len(rows))):
        consecutive = slice(rows[0], rows[0] + len(rows))
        return Tiles(rows=consecutive, targets=consecutive, sources=None, **shared)
    at = torch.tensor(rows)
    return Tiles(rows=at.unsqueeze(1).expand(-1, tile), targets=at, sources=torch.arange(len(spans)), **shared)


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
                slots=(span.slot,) * len(firsts),
                blocks=tuple(_blocks(min(place + tile, stop)) for place in firsts.tolist()),
                firsts=firsts,
                lines=None,
                targets=at[sources] - span.start + span.row,
                sources=sources,
            )
        )
    return found


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK)
