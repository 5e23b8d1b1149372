"""One launch of an optimizer over parts of a partition with separate hyperparameters or positions in the model.

A table on the device holds for every tile of `TILE_PER_THREAD` elements per thread its start and end, its row of the control table, and the
offset from an element's index to its position in the model, which selects its random bits. A position can be 2^62, so the table is int64.
Tiles have the same size for every op and dtype: kernels with fewer elements per thread have several programs for one. So a table is never
too coarse for a kernel, which would leave elements unchanged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.shared.control import CONTROL_COLUMNS

ALIGNMENT = 16  # elements: a partition consists of 64-byte units of float32
NUM_WARPS = 4
TILE_PER_THREAD = 8  # elements, the most that an optimizer's kernel has
_FIELDS = 4
_GROUP = 32  # elements that share a scale of 8-bit states

_ALIGNMENT, _COLUMNS = tl.constexpr(ALIGNMENT), tl.constexpr(CONTROL_COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePart:
    """Elements [start, stop) of a partition, from a multiple of 32 to one of 16.

    row: its row in the control table. position: index of the first element in the model.
    """

    start: int
    stop: int
    row: int
    position: int = 0


def tiles_of(parts: Sequence[UpdatePart], *, device: torch.device) -> Tensor:
    """int64 [tiles, 4] on `device`: first element, end, row, and position less index, of every tile of these parts. To be made once: it comes
    from the host."""
    size = TILE_PER_THREAD * threads(machine(device))
    tiles = [
        (first, min(first + size, part.stop), part.row, part.position - part.start)
        for part in parts
        for first in range(part.start, part.stop, size)
    ]
    assert not any(first % _GROUP or stop % ALIGNMENT for first, stop, *_ in tiles), "parts are padded"
    if device.type == "meta":
        return torch.empty((len(tiles), _FIELDS), dtype=torch.int64, device=device)
    return torch.tensor(tiles, dtype=torch.int64).reshape(-1, _FIELDS).to(device)


def check_tiles(op: str, *, tiles: Tensor) -> None:
    """Raise ValueError unless they can be of `tiles_of`: int64 [tiles, 4]."""
    if tiles.dtype != torch.int64 or tiles.dim() != 2 or tiles.shape[1] != _FIELDS:
        raise ValueError(
            f"{op}: tiles {tuple(tiles.shape)} {tiles.dtype} are not of tiles_of: int64 [tiles, {_FIELDS}]"
        )


def threads(target: Machine) -> int:
    """Of a program."""
    return target.warp_size * NUM_WARPS


@triton.jit
def part_of(tiles_ptr, control_ptr, N, start, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """(first element, end, control row, position less index) of this program: of its tile, which has PROGRAMS of them, or of [0, N)"""
    i_n = tl.program_id(0).to(tl.int64)
    first = i_n * BLOCK
    stop = N
    shift = start
    if tiles_ptr is not None:
        p_tile = tiles_ptr + i_n // PROGRAMS * 4
        first = tl.multiple_of(tl.load(p_tile), _ALIGNMENT) + i_n % PROGRAMS * BLOCK
        stop = tl.multiple_of(tl.load(p_tile + 1), _ALIGNMENT)
        control_ptr += tl.load(p_tile + 2) * _COLUMNS
        shift = tl.load(p_tile + 3)
    return first, stop, control_ptr, shift


def each_tile(tiles: Tensor, *, group: int, named: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments `named` of an update, in their order, for the elements of each of `tiles`, int64 [tiles, 4]: the tile's part of tensors
    [n], as the first one is, or [ceil(n / group)], its row of `control`, and its position as `start`."""
    n = next(iter(named.values())).numel()
    for first, stop, row, shift in tiles.tolist():
        part = dict(named)
        for name, value in named.items():
            if name == "control":
                part[name] = value[row]
            elif name == "start":
                part[name] = first + shift
            elif isinstance(value, Tensor):
                part[name] = value[first:stop] if value.numel() == n else value[first // group : cdiv(stop, group)]
        yield part
