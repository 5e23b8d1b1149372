"""Cache-sized float32 scratch for the CPU implementations.

A temporary of some megabytes costs more in page faults than the arithmetic on it (measured: 6.8 ms for a 2048 x 1024
product that takes 0.2 ms in place), so the CPU implementations work through pieces that stay in the second-level cache.
"""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 65536  # elements of a layer's rows: 256 KiB of float32
GRAIN = 32768  # elements that torch gives a thread at least
VECTORS = 32  # of float32, that torch's loops over AVX512 take at once
UPDATE_PIECE = 1 << 19  # elements of an optimizer update: measured 30% faster than 1 << 16, where torch's calls show

_local = threading.local()  # offload threads run optimizer updates at the same time


def scratch(numel: int, *, slot: int = 0) -> Tensor:
    """Uninitialised float32 [numel], reused by every later call with this `slot` in this thread."""
    buffers = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get(slot)
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            buffer = torch.empty(max(numel, PIECE), dtype=torch.float32, device="cpu")
        buffers[slot] = buffer
    return buffer[:numel]


def scaled_float32(x: Tensor, *, scale: float, slot: int = 0) -> Tensor:
    """x * scale in float32: `x` itself when there is nothing to do, otherwise the scratch of `slot`. x is [n]."""
    if x.dtype == torch.float32 and scale == 1.0:
        return x
    out = scratch(x.numel(), slot=slot)
    if x.dtype == torch.float32:
        return torch.mul(x, scale, out=out)
    out.copy_(x)
    return out if scale == 1.0 else out.mul_(scale)


def rows_per_piece(columns: int) -> int:
    """Rows of `columns` elements that fill one piece."""
    return max(1, PIECE // max(1, columns))


def pieces(numel: int) -> Iterator[slice]:
    """Cuts of [0, numel) that keep a few tensors of a 16-bit or 32-bit dtype in cache."""
    for start in range(0, numel, 2 * PIECE):
        yield slice(start, start + 2 * PIECE)


def even_cuts(numel: int, *, among_all: bool = False) -> Iterator[slice]:
    """Cuts of [0, numel) such that every thread of an elementwise operation has full vectors, except at the very end.

    Torch divides the elements equally among as many threads as have `GRAIN` elements; for gelu, among all threads. The rest of a part after
    its full vectors takes another path of the code, with other bits of sigmoid, silu and gelu: an element's bits would depend on the number
    of elements.
    """
    threads, start = torch.get_num_threads(), 0
    units = (threads * VECTORS, 1) if among_all else (threads * GRAIN, GRAIN, 1)
    for unit in units if threads > 1 else (1,):
        stop = start + (numel - start) // unit * unit
        if stop > start:
            yield slice(start, stop)
        start = stop


def is_cut_evenly(numel: int) -> bool:
    """Whether every thread of an elementwise operation over so many elements has full vectors, see `even_cuts`."""
    part = -(-numel // min(torch.get_num_threads(), -(-numel // GRAIN)))
    return numel % VECTORS == 0 and part % VECTORS == 0
