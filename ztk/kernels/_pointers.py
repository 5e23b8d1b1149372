"""Pointer tables: what one launch needs to know about many tensors and their places in a flat buffer."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of one tensor that one program copies
MAX_VECTOR = (
    8  # elements of a 16-byte access of 16-bit values; offsets and sizes of this multiple vectorise for any dtype
)
CACHED_TABLES = 64

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerTable:
    """The device tables of one set of tensors in one flat buffer."""

    table: Tensor  # int64 [4, num_tensors]: address, offset in the flat buffer, number of elements, first tile
    tile_tensor: Tensor  # int32 [num_tiles]: the tensor of each tile
    num_tensors: int
    num_tiles: int
    aligned: bool  # every address, offset and size allows 16-byte accesses


_cache: OrderedDict[tuple, PointerTable] = OrderedDict()


def pointer_table(tensors: Sequence[Tensor], *, flat: Tensor, offsets: Sequence[int]) -> PointerTable:
    """The table for `tensors` at `offsets` of `flat`, from the cache while addresses, sizes and offsets are the same.

    The key is the table's full content, so a cached table is right even when memory was freed and handed out again.
    """
    key = (
        flat.device,
        flat.data_ptr() % 16,
        tuple((t.data_ptr(), t.numel(), offset) for t, offset in zip(tensors, offsets, strict=True)),
    )
    table = _cache.get(key)
    if table is None:
        table = _cache[key] = _build(key)
        if len(_cache) > CACHED_TABLES:
            _cache.popitem(last=False)
    else:
        _cache.move_to_end(key)
    return table


def triton_dtype(x: Tensor) -> tl.dtype:
    """The Triton name of the dtype of x, of any shape. Raises ValueError for all but float32, bfloat16 and float16."""
    if x.dtype not in _TRITON_DTYPES:
        raise ValueError(f"pointer tables hold float32, bfloat16 or float16 tensors, not {x.dtype}")
    return _TRITON_DTYPES[x.dtype]


def _build(key: tuple) -> PointerTable:
    device, flat_misalignment, entries = key
    columns, tile_tensor, num_tiles = [], [], 0
    for index, (address, numel, offset) in enumerate(entries):
        tiles = -(-numel // TILE)
        columns.append((address, offset, numel, num_tiles))
        tile_tensor.append(torch.full((tiles,), index, dtype=torch.int32, device="cpu"))
        num_tiles += tiles
    aligned = flat_misalignment == 0 and all(
        address % 16 == 0 and numel % MAX_VECTOR == 0 and offset % MAX_VECTOR == 0 for address, numel, offset in entries
    )
    table = torch.tensor(columns, dtype=torch.int64, device="cpu").reshape(-1, 4).t().contiguous()
    return PointerTable(
        table=table.to(device),
        tile_tensor=torch.cat(tile_tensor).to(device),
        num_tensors=len(entries),
        num_tiles=num_tiles,
        aligned=aligned,
    )
