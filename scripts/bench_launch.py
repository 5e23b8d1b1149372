"""The host's time of a kernel's launch and of an op, on a machine without a GPU.

`python scripts/bench_launch.py` runs the real path of an op on a GPU, with a stand-in for what the driver does: the way to the launcher,
the launcher with the results that it allocates, and the launch up to the call that starts a compiled kernel. Columns, in microseconds: the
launches of an op by Triton and by `ztk.kernels._jit`; the op without autograd, by torch's dispatcher with Triton's launch, by torch's
dispatcher, and the short way (`ztk.kernels._direct`); what of the last is its results' allocation.
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
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from tests.kernels.stand_in import launching
from ztk.kernels import _library
from ztk.kernels._jit import Prepared
from ztk.kernels._library import LAUNCHERS, operator, set_backend

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


def usual(prepared: Prepared, grid: tuple[int, ...], *args: object) -> object:
    """The launch of Triton."""
    return JITFunction.run(prepared.kernel, *args, grid=grid, warmup=False, **prepared.named)


def launches_of(call: Callable[[], object]) -> list[tuple]:
    """(kernel, grid, *args) of what `call` launches."""
    noted: list[tuple] = []
    with mock.patch.object(Prepared, "launch", lambda *given: noted.append(given)):
        call()
    return noted


def allocations_of(call: Callable[[], object]) -> list[tuple]:
    """(function, args, named) of the tensors that `call` makes."""
    noted: list[tuple] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ in ("empty", "empty_like", "new_empty", "zeros_like"):
                noted.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Noting():
        call()
    return noted


def row(op: str, args: tuple) -> list[float]:
    """The columns; launches and allocations are summed over the op's."""
    launcher = LAUNCHERS[op]
    dispatched = operator(op)
    short = _library._short_way(dispatched, launch=launcher)
    launches, allocations = launches_of(lambda: launcher(*args)), allocations_of(lambda: launcher(*args))

    def launch() -> None:
        for prepared, *given in launches:
            prepared.launch(*given)

    def allocate() -> None:
        for function, given, named in allocations:
            function(*given, **named)

    def usually(call: Callable[[], object]) -> Callable[[], float]:
        def timed() -> float:
            with mock.patch.object(Prepared, "launch", usual):
                return microseconds(call)

        return timed

    columns = (
        usually(launch),
        lambda: microseconds(launch),
        usually(lambda: dispatched(*args)),
        lambda: microseconds(lambda: dispatched(*args)),
        lambda: microseconds(lambda: short(*args)),
        lambda: microseconds(allocate),
    )
    with torch.no_grad():
        rounds = [[column() for column in columns] for _ in range(ROUNDS)]
    # In turn: the least of many rounds is the one that other processes disturbed least.
    return [min(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    set_backend("triton")
    print(f"Triton {triton.__version__}, torch {torch.__version__}; microseconds of the host")
    print(f"{'':32}{'launch: Triton':>15}{'ztk':>7}{'op: Triton':>12}{'dispatcher':>12}{'short':>7}{'allocation':>12}")
    with launching(lambda *_: None), mock.patch.object(_library, "interpreting", lambda: True):
        for name, (op, args) in cases().items():
            launch, short_launch, op_usual, op_dispatched, op_short, allocation = row(op, args)
            print(
                f"{name:32}{launch:15.1f}{short_launch:7.1f}{op_usual:12.1f}{op_dispatched:12.1f}{op_short:7.1f}{allocation:12.1f}"
            )


if __name__ == "__main__":
    main()
