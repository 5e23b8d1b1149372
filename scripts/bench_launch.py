"""The host's time of a kernel's launch and of an op, on a machine without a GPU.

`python scripts/bench_launch.py` runs the real path of an op on a GPU, with a stand-in for what the driver does: torch's dispatcher, the
launcher with the results that it allocates, and the launch up to the call that starts a compiled kernel. Columns, in microseconds: the
launch of Triton, the launch of `ztk.kernels._jit`, the op (by torch's dispatcher, without autograd) with each of them.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from triton.runtime.jit import JITFunction

from tests.kernels.stand_in import launching
from ztk.kernels import _library
from ztk.kernels._jit import LaunchedKernel
from ztk.kernels._library import operator, set_backend

ROUNDS, CALLS = 60, 100


def cases() -> dict[str, tuple[str, tuple]]:
    """Name -> (op, arguments) on CPU tensors, so small that their allocation costs what a GPU's cache of memory costs."""
    x, weight, scalars = (
        torch.zeros(8, 1024, dtype=torch.bfloat16),
        torch.zeros(1024, dtype=torch.bfloat16),
        torch.zeros(8),
    )
    flat = [torch.zeros(4096) for _ in range(4)]
    return {
        "rms_norm": ("rms_norm", (x, None, weight, 1e-5)),
        "rms_norm with residual": ("rms_norm", (x, x, weight, 1e-5)),
        "rms_norm backward (2 kernels)": ("rms_norm_backward", (x, None, x, weight, scalars)),
        "swiglu": ("swiglu", (x, x)),
        "swiglu backward": ("swiglu_backward", (x, x, x)),
        "sum_of_squares (2 kernels)": ("sum_of_squares", (flat[0],)),
    }


def microseconds(call: Callable[[], object]) -> float:
    """Of one of a round's calls."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def usual(kernel: LaunchedKernel, grid: tuple[int, ...], *args: object, **named: object) -> object:
    """The launch of Triton."""
    return JITFunction.run(kernel, *args, grid=grid, warmup=False, **named)


def launches_of(call: Callable[[], object]) -> list[tuple]:
    """(kernel, grid, args, named) of what `call` launches."""
    noted: list[tuple] = []
    with mock.patch.object(
        LaunchedKernel, "launch", lambda kernel, *args, **named: noted.append((kernel, args, named))
    ):
        call()
    return noted


def row(op: str, args: tuple) -> list[float]:
    """The four columns; launches are summed over the op's kernels."""
    run = operator(op)
    noted = launches_of(lambda: run(*args))

    def launch() -> None:
        for kernel, given, named in noted:
            kernel[given[0]](*given[1:], **named)

    least = [float("inf")] * 4
    for _ in range(ROUNDS):  # in turn: the least of many rounds is the one that other processes disturbed least
        for place, patch in enumerate((usual, LaunchedKernel.launch)):
            with mock.patch.object(LaunchedKernel, "launch", patch):
                times = microseconds(launch), microseconds(lambda: run(*args))
            least[place], least[2 + place] = min(least[place], times[0]), min(least[2 + place], times[1])
    return least


def main() -> None:
    torch.set_num_threads(1)
    set_backend("triton")
    print(f"Triton {triton.__version__}, torch {torch.__version__}; microseconds of the host")
    print(f"{'':34}{'launch: Triton':>15}{'ztk':>8}{'op: Triton':>13}{'ztk':>8}")
    with launching(lambda *_: None), mock.patch.object(_library, "interpreting", lambda: True):
        for name, (op, args) in cases().items():
            before, after, op_before, op_after = row(op, args)
            print(f"{name:34}{before:15.1f}{after:8.1f}{op_before:13.1f}{op_after:8.1f}")


if __name__ == "__main__":
    main()
