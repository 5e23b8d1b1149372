"""Shapes of attention's products that give a row the same bits as in a tile on this processor, found by trial.

On an EPYC with AVX512 (MKL) products of 4, 8, 16 and more rows agree, and products of 1 to 3 rows do not. The first 16, 32 or 48 of 64 keys
have the same bits as among all, and so do results of weights that end with zeros. Torch sums 16 and 32 weights like 64 weights that end
with zeros, but not 48.
"""

import functools
from dataclasses import dataclass

import torch

from ztk.inference.attention import BLOCK, tile_of

_BATCHES = (1, 4, 33, 130)  # of products that are tried
_ROWS = (4, 8, 16, 32, 64, 128, 256)
_KEYS = (16, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualShapes:
    """rows: numbers of query rows in a product, each with the bits of a tile's, rising. keys: how many of a block's first keys may be all that
    is multiplied, rising."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]

    def rows_for(self, count: int) -> int | None:
        """The smallest number of rows with room for `count`, or None if there are too many."""
        return next((rows for rows in self.rows if rows >= count), None)


def equal_shapes(group: int, *, head_dim: int) -> EqualShapes:
    """For `group` query heads per key head of `head_dim` elements; without any rows where none agrees."""
    return _equal_shapes(group, head_dim, torch.get_num_threads())


@functools.cache
@torch.inference_mode()
def _equal_shapes(group: int, head_dim: int, threads: int) -> EqualShapes:
    """threads: torch's, by which a library may divide a product."""
    tile, rows = group * tile_of(group), []
    for count in _ROWS:
        if not _agrees(count, tile=tile, head_dim=head_dim, keys=BLOCK):
            break
        rows.append(count)
    least = next((count for count in rows if count >= group), 0)  # of an answer's own blocks
    keys = [count for count in _KEYS if least and _agrees(least, tile=tile, head_dim=head_dim, keys=count)]
    return EqualShapes(rows=tuple(rows), keys=(*keys, BLOCK))


def _agrees(rows: int, *, tile: int, head_dim: int, keys: int) -> bool:
    """Whether products and sums with this number of rows and the first `keys` have a tile's bits at every place, for any other rows."""
    generator = torch.Generator().manual_seed(0)
    for batch in _BATCHES:
        query, key, value = (
            torch.randn(batch, *shape, generator=generator)
            for shape in ((tile, head_dim), (BLOCK, head_dim), (BLOCK, head_dim))
        )
        weights, at = torch.rand(batch, tile, BLOCK, generator=generator), torch.arange(rows).roll(1) % tile
        weights[:, :, keys:] = 0
        part = weights[:, at, :keys].contiguous()
        pairs = (
            (torch.bmm(query[:, at], key[:, :keys].mT), torch.bmm(query, key.mT)[:, at, :keys]),
            (torch.bmm(part, value[:, :keys]), torch.bmm(weights, value)[:, at]),
            (part[:, :1].sum(-1), weights.sum(-1)[:, at[:1]]),
        )
        if not all(torch.equal(own, full) for own, full in pairs):
            return False
    return True
