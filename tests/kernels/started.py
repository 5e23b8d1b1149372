"""What ops start on a stand-in for a GPU's driver, each op twice: `python -m tests.kernels.started` prints a JSON list.

Of each launch: the kernel's name, what Triton compiles it for, the grid, and the arguments. Run in a process that does not interpret, it shows
that `ZTK_LAUNCH=public` starts what the short path starts.
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
    print(json.dumps({"is_short": IS_SHORT, "started": started}))


if __name__ == "__main__":
    main()
