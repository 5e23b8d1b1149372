"""Records the launches of ops on a stand-in for a GPU's driver: `python -m tests.kernels.started` prints a JSON object.

"started": each launch of ops that run twice, as the key that Triton compiles the kernel for, the grid and the arguments. "programs": for each
op of a serving step, the number of programs that many sizes need. The process must not interpret.
"""

import json
from unittest import mock

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from scripts.bench_launch import cases
from tests.kernels.stand_in import launching
from ztk.kernels import operator, set_backend
from ztk.kernels.launch import library
from ztk.kernels.launch.library import _short_way
from ztk.kernels.launch.machine import MACHINES, assume
from ztk.kernels.launch.private import IS_SHORT


def described(value: object) -> object:
    """An argument as text that is the same in another process."""
    if isinstance(value, TensorDescriptor):
        return ["descriptor", described(value.base), *map(list, (value.shape, value.strides, value.block_shape))]
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride()), value.data_ptr() % 16]
    return repr(value)


def serving(rows: int, *, blocks: int) -> dict[str, tuple]:
    """Arguments of the ops of a step of `rows` rows, whose longest sequence has `blocks` blocks."""
    x, weight, square = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((rows, 1024), (1024,), (1024, 1024)))
    cache, places = torch.zeros(4, 2, 8, 64, 128, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
    heads = torch.zeros(rows, 3072, dtype=torch.bfloat16)
    table, warm, none = torch.zeros(8, 64), torch.zeros(rows), (None,) * 8
    tables, tiles = torch.zeros(rows, blocks, dtype=torch.int32), torch.zeros(rows, 5, dtype=torch.int32)
    both = cache[:, 0], cache[:, 1]
    return {
        "rms_norm": (x, x, weight, 1e-5),
        "layer_norm": (x, weight, weight, None, 1e-5),
        "linear_rows": (x, square, *none, 1, "none", True, False),
        "cache_rows": (heads, None, None, table, table, places, places, *both, None, 0.0),
        "paged_attention": (x.view(rows, 8, 128), *both, tables, tiles, None, None, 0.1, 0, 0.0, True),
        "draw_rows": (x, square, None, None, warm, places, 0.0),
        "select_rows": (*(torch.zeros(rows, 1024) for _ in range(2)), warm, places, warm.int(), warm, warm),
        "moe_route": (torch.zeros(rows, 8), 2, True),
        "moe_combine": (x, torch.zeros(rows, 1), torch.zeros(rows, 1, dtype=torch.int32)),
    }


def main() -> None:
    started: list[list] = []

    def start(program: object, *given: object) -> None:
        grid, arguments = given[:3], given[9:]
        started.append([program.key, list(grid), list(map(described, arguments))])

    set_backend("triton")
    with (
        torch.no_grad(),
        assume(MACHINES["sm_90"]),
        launching(start),
        mock.patch.object(library, "interpreting", lambda: True),
    ):
        for op, args in cases().values():
            run = _short_way(operator(op), launch=library.LAUNCHERS[op]) if IS_SHORT else operator(op)
            for _ in range(2):
                run(*args)
        twice, programs, first = started[:], {}, len(started)
        for rows, blocks in ((1, 9), (2, 16), (15, 17), (16, 31), (17, 32), (48, 33), (64, 64), (130, 70)):
            for op, args in serving(rows, blocks=blocks).items():
                operator(op)(*args)
                programs.setdefault(op, set()).update(key for key, *_ in started[first:])
                first = len(started)
    counts = {op: len(keys) for op, keys in programs.items()}
    print(json.dumps({"is_short": IS_SHORT, "started": twice, "programs": counts}))


if __name__ == "__main__":
    main()
