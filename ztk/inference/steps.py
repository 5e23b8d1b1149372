"""Where the rows of a step are: computed once, used by every layer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK, Scratch, Tiles, attend, lone_tile_of, tile_of
from ztk.inference.cache import Cache

QUERIES = 2 * BLOCK  # queries of a sequence whose scores exist at one time
_SCORES = 4 * QUERIES  # places times blocks of keys: of short sequences more are computed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """`length` rows from `row` on belong to the sequence in `slot`, at positions from `start` on."""

    slot: int
    start: int
    length: int
    row: int


class Step:
    """The places of a step's M rows. positions: int64 [M]. group: query heads per key head. head_dim: elements of a head. scratch: memory for
    attention."""

    def __init__(self, spans: list[Span], *, group: int, head_dim: int, scratch: Scratch | None = None) -> None:
        at = [(span.slot, place) for span in spans for place in range(span.start, span.start + span.length)]
        self.positions = torch.tensor([place for _, place in at])
        self._at, self._places = at, {}
        self._scratch = scratch or Scratch()
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        lone = lone_tile_of(group, head_dim=head_dim)
        size = max(1, QUERIES // lone)
        single = [span for span in spans if span.length == 1]
        self.groups = [_single(single[first : first + size], tile=lone) for first in range(0, len(single), size)]
        self.groups += _many([span for span in spans if span.length > 1], tile=tile_of(group))

    def rotary(self, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of one of the model's rotary tables, (cosine, sine) [M, rotary_dims / 2] each."""
        found = self._rotary.get(id(table))
        if found is None:
            found = self._rotary[id(table)] = (table[0][self.positions], table[1][self.positions])
        return found

    def write(self, key: Tensor, *, value: Tensor, cache: Cache, layer: int) -> None:
        """Keys and values [M, K, D] of all rows into the cache."""
        for slabs, rows in ((cache.keys, key), (cache.values, value)):
            self.write_into(slabs[layer], part=rows)

    def write_into(self, slab: Tensor, *, part: Tensor) -> None:
        """Keys or values [M, K, D] of all rows into a layer's slab [slots, blocks, K, BLOCK, D], which is contiguous."""
        _, blocks, K, _, D = slab.shape
        slab.view(-1, D).index_copy_(0, self._lines(blocks, kv_heads=K), part.reshape(-1, D))

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
    """Sequences with one row each. tile: places of each one's product, all of which have its row."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Places of one sequence, from `first` on, whose tiles are computed at once. stop: where the sequence's rows end."""

    span: Span
    first: int
    tiles: int
    stop: int

    def blocks(self, *, tile: int) -> int:
        return _blocks(min(self.first + self.tiles * tile, self.stop))


def _many(spans: list[Span], *, tile: int) -> list[Tiles]:
    """Sequences with several rows each, up to `QUERIES` places of one at a time, and of several as many as `_SCORES` has room for."""
    size, found = max(tile, QUERIES // tile * tile), []
    together: list[_Piece] = []
    for span in spans:
        stop = span.start + span.length
        for first in range(span.start // tile * tile, stop, size):
            tiles = -(-(min(first + size, stop) - first) // tile)
            piece = _Piece(span=span, first=first, tiles=tiles, stop=stop)
            most = max(one.blocks(tile=tile) for one in (*together, piece))
            if together and sum(one.tiles for one in (*together, piece)) * tile * most > _SCORES:
                found.append(_joined(together, tile=tile))
                together = []
            together.append(piece)
    return [*found, _joined(together, tile=tile)] if together else found


def _joined(pieces: list[_Piece], *, tile: int) -> Tiles:
    """The tiles of all pieces, one piece after the other."""
    firsts, rows, slots, blocks, targets, sources = [], [], [], [], [], []
    for piece in pieces:
        span, row = piece.span, piece.span.row - piece.span.start
        for first in range(piece.first, piece.first + piece.tiles * tile, tile):
            places = range(first, first + tile)
            counted = [at for at in places if span.start <= at < piece.stop]
            firsts.append(first)
            slots.append(span.slot)
            blocks.append(_blocks(min(first + tile, piece.stop)))
            targets += [row + at for at in counted]
            sources += [len(rows) * tile + at - first for at in counted]
            rows.append([row + min(max(at, span.start), piece.stop - 1) for at in places])
    return Tiles(
        tile=tile,
        rows=torch.tensor(rows),
        slots=tuple(slots),
        blocks=tuple(blocks),
        firsts=torch.tensor(firsts),
        lines=None,
        targets=torch.tensor(targets),
        sources=torch.tensor(sources),
    )


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK)
