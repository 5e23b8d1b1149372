"""Places and attention of a step's rows: computed once, used by every layer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ztk.inference.cache_attention import BLOCK, Scratch, Tiles, attend, lone_tile_of, rows_agree, tile_of
from ztk.inference.describe import Description
from ztk.inference.rows import rms_norm, rope, turns

QUERIES = 2 * BLOCK  # queries of sequences with one row each whose scores over all their keys exist at one time
_LARGE = BLOCK // 2  # places of a sequence that share products, however many keys they have
_SCORES = 8 * BLOCK  # places times blocks of keys: short sequences are batched up to it


class Span(NamedTuple):
    """Rows `row` to `row + length` are tokens of the sequence in `slot` at positions from `start` on. adapter: its number; 0 is the base."""

    slot: int
    start: int
    length: int
    row: int
    adapter: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Attention of layer `layer`. window: number of keys that a query attends to, including itself, or None for all before it. softcap:
    scores become c tanh(score / c). slopes [H]: ALiBi's. table: rotary, (cosine, sine) [positions, R / 2] each. eps: of norms over each
    head."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    table: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


class Step(Protocol):
    """The rows of a step, over any cache."""

    @property
    def positions(self) -> Tensor:
        """int64 [M], on the device that computes."""
        ...

    def attend(self, rows: Tensor, *, by: Attention, norms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Normalises and rotates queries and keys, writes keys and values into the cache, and attends over each row's past.

        rows: queries, keys and values [M, (H + 2 K) D]; norms: weights [D] over each head of queries and of keys. Returns [M, H D].
        """
        ...


class RowStep(ABC):
    """A `Step` by torch's operations on the CPU. Subclasses place keys and values."""

    positions: Tensor

    def __init__(self) -> None:
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def write(self, key: Tensor, *, value: Tensor, layer: int) -> None:
        """Keys and values [M, K, D] of all rows into the cache."""

    @abstractmethod
    def read(self, query: Tensor, *, by: Attention) -> Tensor:
        """Attention of query [M, H, D], whose keys are written: fp32 [M, H, D]."""

    def attend(self, rows: Tensor, *, by: Attention, norms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        heads, both = by.heads, by.heads + by.kv_heads
        x = rows.view(rows.shape[0], -1, by.head_dim)
        turned, value = x[:, :both], x[:, both:]
        if norms is not None:
            parts = zip((turned[:, :heads], turned[:, heads:]), norms, strict=True)
            turned = torch.cat([rms_norm(part, weight=weight, eps=by.eps) for part, weight in parts], dim=1)
        if by.table is not None:
            cos, sin = self._turns(by.table)
            turned = rope(turned, cos=cos, sin=sin)
        self.write(turned[:, heads:], value=value, layer=by.layer)
        return self.read(turned[:, :heads], by=by).flatten(1)

    def _turns(self, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`turns` of the rows by one of the model's rotary tables."""
        found = self._rotary.get(id(table))
        if found is None:
            found = self._rotary[id(table)] = turns(table, positions=self.positions)
        return found


class SlabStep(RowStep):
    """Over slabs: keys and values of each layer [slots, blocks, K, BLOCK, D]."""

    def __init__(self, places: "Places", *, keys: list[Tensor], values: list[Tensor]) -> None:
        super().__init__()
        self.places, self._keys, self._values = places, keys, values
        self.positions = places.positions

    def write(self, key: Tensor, *, value: Tensor, layer: int) -> None:
        self.places.write(self._keys[layer], part=key)
        self.places.write(self._values[layer], part=value)

    def read(self, query: Tensor, *, by: Attention) -> Tensor:
        keys, values = self._keys[by.layer], self._values[by.layer]
        return self.places.attend(
            query, keys=keys, values=values, scale=by.scale, window=by.window, softcap=by.softcap, slopes=by.slopes
        )


class Places:
    """Places of a step's M rows in slabs. positions: int64 [M]. group: query heads per key head, of which there are `kv_heads`. head_dim:
    elements of a head. scratch: memory for attention."""

    def __init__(
        self, spans: list[Span], *, group: int, kv_heads: int, head_dim: int, scratch: Scratch | None = None
    ) -> None:
        at = [(span.slot, place) for span in spans for place in range(span.start, span.start + span.length)]
        self.positions = torch.tensor([place for _, place in at])
        self._at, self._places = at, {}
        self._scratch = scratch or Scratch()
        lone = lone_tile_of(group, head_dim=head_dim, kv_heads=kv_heads)
        single = [span for span in spans if span.length == 1]
        any_place = lone < tile_of(group) or lone == 1
        self.groups = [
            _single(own, tile=lone, any_place=any_place) for own in _neighbours(single, most=max(1, QUERIES // lone))
        ]
        self.groups += _many(
            [span for span in spans if span.length > 1],
            tile=tile_of(group),
            joins=rows_agree(group, head_dim=head_dim, threads=torch.get_num_threads()),
        )

    def write(self, slab: Tensor, *, part: Tensor) -> None:
        """Keys or values [M, K, D] of all rows into a layer's slab [slots, blocks, K, BLOCK, D], which is contiguous."""
        _, blocks, K, _, D = slab.shape
        slab.view(-1, D).index_copy_(0, self._lines(blocks, kv_heads=K), part.reshape(-1, D))

    def attend(self, query: Tensor, *, keys: Tensor, values: Tensor, scale: float, **options: Any) -> Tensor:
        """`ztk.inference.cache_attention.attend` for all rows: query [M, H, D] -> fp32 [M, H, D]. options: its others."""
        options |= {"keys": keys, "values": values, "scale": scale, "scratch": self._scratch}
        if len(self.groups) == 1 and self.groups[0].sources is None:
            return attend(query, tiles=self.groups[0], **options)
        out = torch.empty(query.shape)
        for tiles in self.groups:
            out[tiles.targets] = attend(query, tiles=tiles, **options)
        return out

    def _lines(self, blocks: int, *, kv_heads: int) -> Tensor:
        """int64 [M K]: the row of a slab [slots, blocks, K, BLOCK, D] for each head of each row."""
        found = self._places.get((blocks, kv_heads))
        if found is None:
            first = [(slot * blocks + place // BLOCK) * kv_heads * BLOCK + place % BLOCK for slot, place in self._at]
            found = (torch.tensor(first).unsqueeze(1) + torch.arange(0, kv_heads * BLOCK, BLOCK)).view(-1)
            self._places[blocks, kv_heads] = found
        return found


def attention_bytes(of: Description, *, sequences: int) -> tuple[int, int]:
    """Bytes of `Scratch` after steps of up to `sequences` sequences: per token of the longest one, and for batches of short ones.

    These are queries, scores, and results of each block, of as many places as one call of `attend` has.
    """
    group, D = of.heads // of.kv_heads, of.head_dim
    single = min(sequences * lone_tile_of(group, head_dim=D, kv_heads=of.kv_heads), QUERIES)
    joins = rows_agree(group, head_dim=D, threads=torch.get_num_threads())
    copied = max(single, _LARGE if joins else BLOCK)  # joined tiles have queries and results of one block
    copies = max(D, BLOCK) + D
    token = 4 * of.heads * (copied * copies + max(single, BLOCK) * BLOCK) // BLOCK
    return token, 4 * of.heads * _SCORES * (copies + BLOCK)


def _neighbours(spans: list[Span], *, most: int) -> list[list[Span]]:
    """Spans ordered by slot, in groups that span at most `most` slots."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.slot):
        if not found or span.slot - found[-1][0].slot >= most:
            found.append([])
        found[-1].append(span)
    return found


def _single(spans: list[Span], *, tile: int, any_place: bool) -> Tiles:
    """Sequences with one row each, in the order of their slots. tile: places of each one's product, all of which have its row. any_place: all
    have its bits, too."""
    blocks = [_blocks(span.start + 1) for span in spans]
    first, stop = spans[0].slot, spans[-1].slot + 1
    # Also computes blocks that no sequence needs, but no more than there are needed ones.
    if any_place and (stop - first) * max(blocks) <= 2 * sum(blocks) and max(blocks) < len(spans):
        return _side_by_side(spans, tile=tile, blocks=max(blocks))
    rows = [span.row for span in spans]
    lines = [0 if any_place else span.start % tile for span in spans]
    return _tiles(
        rows,
        targets=rows,
        sources=list(range(len(rows))),
        tile=tile,
        slots=tuple(span.slot for span in spans),
        blocks=tuple(blocks),
        firsts=torch.tensor([span.start - line for span, line in zip(spans, lines, strict=True)]),
        lines=torch.tensor(lines),
        any_place=any_place,
    )


def _side_by_side(spans: list[Span], *, tile: int, blocks: int) -> Tiles:
    """One row of each sequence; slots between them get unused copies of the first row."""
    first, rows = spans[0].slot, [span.row for span in spans]
    count = spans[-1].slot + 1 - first
    starts, every, sources = [0] * count, [rows[0]] * count, [span.slot - first for span in spans]
    for span, source in zip(spans, sources, strict=True):
        starts[source], every[source] = span.start, span.row
    return _tiles(
        every,
        targets=rows,
        sources=sources,
        tile=tile,
        slots=tuple(range(first, first + count)),
        blocks=(blocks,) * count,
        firsts=torch.tensor(starts),
        lines=torch.zeros(count, dtype=torch.int64),
        side_by_side=True,
        any_place=True,
    )


def _tiles(rows: list, *, targets: list[int], sources: list[int], tile: int, **shared: Any) -> Tiles:
    """`Tiles`, with slices where every place counts and the targets follow each other."""
    each = tile if shared["lines"] is None else 1
    if len(sources) == len(rows) * each and targets == list(range(targets[0], targets[0] + len(targets))):
        consecutive = slice(targets[0], targets[0] + len(targets))
        return Tiles(tile=tile, rows=consecutive, targets=consecutive, sources=None, **shared)
    at = {"rows": torch.tensor(rows), "targets": torch.tensor(targets), "sources": torch.tensor(sources)}
    return Tiles(tile=tile, **at, **shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Places of one sequence, from `first` on, whose tiles are computed together. stop: end of the sequence's rows."""

    span: Span
    first: int
    tiles: int
    stop: int

    def blocks(self, *, tile: int) -> int:
        return _blocks(min(self.first + self.tiles * tile, self.stop))


def _many(spans: list[Span], *, tile: int, joins: bool) -> list[Tiles]:
    """Sequences with several rows each, at most `BLOCK` places of one at a time, which read as many blocks of keys. Batches sequences until
    `_SCORES` is full.

    joins: whether the tiles of a sequence may share products with a block of keys; they do if that makes fewer products, or large ones.
    """
    found: list[Tiles] = []
    together: list[_Piece] = []
    for span in spans:
        stop = span.start + span.length
        for border in range(span.start // BLOCK * BLOCK, stop, BLOCK):
            first = max(border, span.start // tile * tile)
            tiles = -(-(min(border + BLOCK, stop) - first) // tile)
            piece = _Piece(span=span, first=first, tiles=tiles, stop=stop)
            if joins and piece.tiles > min(piece.blocks(tile=tile), _LARGE // tile):
                found.append(_joined([piece], tile=tile, one_sequence=True))
                continue
            most = max(one.blocks(tile=tile) for one in (*together, piece))
            if together and sum(one.tiles for one in (*together, piece)) * tile * most > _SCORES:
                found.append(_joined(together, tile=tile))
                together = []
            together.append(piece)
    return [*found, _joined(together, tile=tile)] if together else found


def _joined(pieces: list[_Piece], *, tile: int, one_sequence: bool = False) -> Tiles:
    """The tiles of all pieces, one piece after the other. one_sequence: there is one piece."""
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
    return _tiles(
        rows,
        targets=targets,
        sources=sources,
        tile=tile,
        slots=tuple(slots),
        blocks=tuple(blocks),
        firsts=torch.tensor(firsts),
        lines=None,
        one_sequence=one_sequence,
    )


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK)
