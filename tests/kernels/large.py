"""Tensors of more than 2^31 elements with only a few real pages, and launches that run only their last programs.

An offset computed in 32 bits is right below 2^31 elements and wraps to a negative one above. The tests run such offsets. Memory is mapped
without being reserved, so untouched pages cost nothing. The tensor's last elements hold the data, and the interpreter runs the programs at
the end of the grid. As much untouched memory lies in front of each tensor, so that a wrapped offset reads zeros and writes outside the
result instead of ending the process.
"""

import mmap

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

BEYOND = 2**31  # elements in front of the data
MAP_NORESERVE = 0x4000  # of Linux; Python's mmap does not name it


def sparse(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape`, mapped but not resident, behind 2^31 elements of the same."""
    numel = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, (BEYOND + numel) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)[BEYOND:].view(shape)


def behind(x: Tensor, *, rows: int) -> Tensor:
    """A sparse tensor of `rows` rows (elements, where x is flat) whose last ones are x."""
    far = sparse((rows, *x.shape[1:]), x.dtype)
    far[rows - x.shape[0] :] = x
    return far


def run_last_programs(count: int, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on launches run only the last `count` programs along their first axis, and allocate sparsely."""
    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder

    def run(self, *args, grid, warmup, **kwargs):
        skipped = max(0, grid[0] - count)
        part = (grid[0] - skipped, *grid[1:])
        full = grid + (1,) * (3 - len(grid))
        monkeypatch.setattr(builder, "set_grid_dim", lambda *_: type(builder).set_grid_dim(builder, *full))
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda x, y, z: type(builder).set_grid_idx(builder, x + skipped, y, z)
        )
        executor(self.rewrite(), self.arg_names, part, self.pre_run_hooks)(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    # CPU tensors are used in place: the interpreter would copy back the same memory, all 2^31 elements of it.
    monkeypatch.setattr(executor, "_restore_args_dev", lambda *_: None)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: sparse(tuple(x.shape), x.dtype))
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, **_: sparse(_flat_shape(shape), dtype))


def _flat_shape(shape: tuple) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
