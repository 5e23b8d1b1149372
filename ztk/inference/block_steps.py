"""Where the rows of a step are in a cache of blocks: computed once on the host, used by every layer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.device_tables import DeviceTables, sent
from ztk.inference.steps import Attention, Span
from ztk.kernels import cache_rows, make_tiles, paged_attention


class Blocks(Protocol):
    """The part of `BlockCache` that a step uses."""

    device: torch.device
    dtype: torch.dtype

    def keys(self, layer: int) -> Tensor:
        """[blocks, kv heads, 64, head dim] of one layer."""
        ...

    def values(self, layer: int) -> Tensor:
        """[blocks, kv heads, 64, head dim] of the layer."""
        ...

    def scales_of(self, layer: int) -> Tensor | None:
        """fp32 [2, kv heads] of a quantised cache, for keys and values; None without."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStep:
    """A step's M rows: positions int64 [M]; places int64 [M], block times 64 plus position in it, -1 for padding; tables int32 [slots,
    blocks of the longest]; tiles int32 [Q, 5], see `ztk.kernels.paged_attention`. split: every sequence has one row, so segments are
    computed in parallel."""

    cache: Blocks
    positions: Tensor
    places: Tensor
    tables: Tensor
    tiles: Tensor
    split: bool

    def attend(self, rows: Tensor, *, by: Attention, norms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """As of `Step`, by two kernels."""
        cache, (cos, sin), own = self.cache, by.table or (None, None), norms or (None, None)
        keys, values, scales = cache.keys(by.layer), cache.values(by.layer), cache.scales_of(by.layer)
        places = (self.positions, self.places)
        query = cache_rows(rows, *own, cos, sin, *places, keys, values, scales, eps=by.eps)
        how = {"scale": by.scale, "window": by.window or 0, "softcap": by.softcap or 0.0, "split": self.split}
        return paged_attention(query, keys, values, self.tables, self.tiles, by.slopes, scales, **how).flatten(1)


def block_step(
    spans: list[Span], *, cache: Blocks, tables: list[list[int]], on_device: DeviceTables, group: int
) -> BlockStep:
    """group: query heads per key head. `tables`, of all slots, have blocks for all positions of the spans; on_device: their copies."""
    positions, places = [], []
    for span in spans:
        table = tables[span.slot]
        for position in range(span.start, span.start + span.length):
            positions.append(position)
            places.append(table[position // BLOCK] * BLOCK + position % BLOCK)
    slots = [span.slot for span in spans]
    on_device.update(slots)
    tiles = make_tiles([(span.slot, span.start, span.length, span.row) for span in spans], group=group)
    return BlockStep(
        cache=cache,
        positions=sent(positions, dtype=torch.int64, device=cache.device),
        places=sent(places, dtype=torch.int64, device=cache.device),
        tables=on_device.tensor[:, : max(len(tables[slot]) for slot in slots)],
        tiles=sent(tiles, dtype=torch.int32, device=cache.device),
        split=all(span.length == 1 for span in spans),
    )
