"""Measures the host time of a kernel launch and of an op, on a machine without a GPU.

`python scripts/bench_launch.py` runs the code path that an op takes on a GPU, with a stand-in for the driver: the dispatch to the launcher,
the launcher with the allocation of its results, and the launch up to the call that starts a compiled kernel. Columns, in microseconds: the
launches of an op by Triton and by `ztk.kernels.launch.jit` once their sizes are known; the op without autograd through torch's dispatcher with
Triton's launch, through torch's dispatcher, and by the direct call (`ztk.kernels.launch.direct`); the allocation of results in the direct call.
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
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from tests.kernels.aot.record import _tensors
from tests.kernels.stand_in import launching
from ztk.kernels import ALL_OPS
from ztk.kernels.launch import library, memory
from ztk.kernels.launch.jit import Bound, Prepared
from ztk.kernels.launch.library import LAUNCHERS, operator, set_backend
from ztk.kernels.launch.machine import MACHINES, assume

ROUNDS, CALLS = 30, 60


def cases() -> dict[str, tuple[str, tuple]]:
    """Name -> (op, arguments). The CPU tensors are small, so that allocating them is as cheap as from a GPU's caching allocator."""
    x, weight, scalars = (
        torch.zeros(8, 1024, dtype=torch.bfloat16),
        torch.zeros(1024, dtype=torch.bfloat16),
        torch.zeros(8),
    )
    flat, control = [torch.zeros(4096) for _ in range(4)], torch.zeros(16)
    heads, table = x.view(1, 8, 8, 128), torch.zeros(8, 64)
    queries, targets = x.view(8, 8, 128), torch.zeros(8, dtype=torch.int64)
    blocks, place = torch.zeros(4, 2, 8, 64, 128, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)
    tables, tiles = torch.zeros(8, 2, dtype=torch.int32), torch.zeros(8, 5, dtype=torch.int32)
    cached = (queries, blocks[:, 0], blocks[:, 1], tables, tiles, None, None, 0.1, 0, 0.0)
    square = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    expert, experts = torch.zeros(4, 64, 1024, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int32)
    options = (*(None for _ in range(8)), 1, "none")
    return {
        "swiglu": ("swiglu", (x, x)),
        "swiglu backward": ("swiglu_backward", (x, x, x)),
        "rms_norm": ("rms_norm", (x, None, weight, 1e-5)),
        "rms_norm with residual": ("rms_norm", (x, x, weight, 1e-5)),
        "rms_norm backward (2 kernels)": ("rms_norm_backward", (x, None, x, weight, scalars)),
        "layer_norm": ("layer_norm", (x, weight, weight, None, 1e-5)),
        "layer_norm backward (2 kernels)": ("layer_norm_backward", (x, None, x, weight, weight, scalars, scalars)),
        "rope": ("rope", (heads, table, table, False, False)),
        "attention": ("attention", (queries, queries, queries, None, 8, True, 0, 0.1)),
        "attention backward (3 kernels)": (
            "attention_backward",
            (
                queries,
                queries,
                queries,
                queries,
                queries,
                scalars[:, None].expand(8, 8).contiguous(),
                None,
                8,
                True,
                0,
                0.1,
            ),
        ),
        "cross_entropy": ("cross_entropy", (x, targets, -100, 0.0, 0.0)),
        "cross_entropy backward": ("cross_entropy_backward", (x, targets, scalars, scalars, -100, 0.0, 0.0)),
        "moe_combine": ("moe_combine", (x, torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32))),
        "grouped_matmul": ("grouped_matmul", (x, expert.mT.contiguous(), None, None, experts, None, 1, False)),
        "grouped_matmul, gradient of a pair": ("grouped_matmul", (x, expert, x, expert, experts, None, 1, True)),
        "sum_of_squares (2 kernels)": ("sum_of_squares", (flat[0],)),
        "adamw": ("adamw", (*flat, control, x.view(-1)[:4096], True, None)),
        "cast_copy": ("cast_copy", (flat[0], x.view(-1)[:4096], None)),
        "cache_rows": (
            "cache_rows",
            (
                torch.zeros(8, 3072, dtype=torch.bfloat16),
                None,
                None,
                table,
                table,
                place,
                place,
                blocks[:, 0],
                blocks[:, 1],
                None,
                0.0,
            ),
        ),
        "paged_attention": ("paged_attention", (*cached, False)),
        "linear_rows": ("linear_rows", (x, square, *options, True, False)),
        "linear_rows, few": ("linear_rows", (x, square, *options, False, False)),
        "draw_rows (2 kernels)": ("draw_rows", (x, square, None, None, scalars, place, 0.0)),
    }


def further_cases() -> dict[str, tuple[str, tuple]]:
    """Cases for all other ops, with the arguments that their public functions pass for the first shape of their SPEC."""
    known, found = {op for op, _ in cases().values()}, {}
    for spec in ALL_OPS:
        called: dict[str, tuple] = {}

        def note(name: str, run: Callable, args: tuple, *, on_gpu: bool, called: dict[str, tuple] = called) -> object:
            called.setdefault(name, args)
            return run(*args)

        shape = next(shape for shape in spec.small_shapes if 0 not in shape)
        dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else torch.float32
        inputs = spec.make_inputs(shape, dtype=dtype, device="cpu")
        for name in spec.differentiable:
            if isinstance(inputs[name], torch.Tensor):
                inputs[name].requires_grad_()
        library.set_watch(note)
        outputs = [out for out in _tensors(spec.op(**inputs)) if out.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        library.set_watch(None)
        for op, args in called.items():
            if op not in known:
                known.add(op)
                found[op] = op, tuple(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)
    return found


def microseconds(call: Callable[[], object]) -> float:
    """Microseconds per call of one round."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def usual(prepared: Prepared, grid: tuple[int, ...], *args: object) -> object:
    """Triton's launch."""
    return JITFunction.run(prepared.kernel, *args, grid=grid, warmup=False, **prepared.named)


def usual_bound(bound: Bound, *tensors: Tensor | None, count: int | None = None) -> object:
    """Triton's launch of a kernel that is bound to its sizes."""
    return usual(bound.prepared, bound.grid, *bound.arguments(tensors, count=count))


def launches_of(call: Callable[[], object]) -> list[tuple]:
    """(kernel, args, kwargs) of every launch in `call`."""
    noted: list[tuple] = []

    def note(kernel: object, *given: object, **named: object) -> None:
        noted.append((kernel, given, named))

    with mock.patch.object(Prepared, "launch", note), mock.patch.object(Bound, "launch", note):
        call()
    return noted


def allocations_of(call: Callable[[], object]) -> list[tuple]:
    """(function, args, kwargs) of every tensor allocation in `call`."""
    noted: list[tuple] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ in ("empty", "empty_like", "new_empty", "zeros_like"):
                noted.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    fast = torch._C._dynamo.guards._empty_strided_cpu  # pyrefly: ignore[missing-attribute]

    def note(*args: object) -> torch.Tensor:
        noted.append((fast, args, {}))
        return fast(*args)

    with Noting(), mock.patch.dict(memory._FAST, {False: note}):
        call()
    return noted


def row(op: str, args: tuple) -> list[float]:
    """The columns of one op; launches and allocations are sums over the op."""
    launcher = LAUNCHERS[op]
    dispatched = operator(op)
    short = library._short_way(dispatched, launch=launcher)
    launches, allocations = launches_of(lambda: launcher(*args)), allocations_of(lambda: launcher(*args))

    def launch() -> None:
        for kernel, given, named in launches:
            kernel.launch(*given, **named)

    def allocate() -> None:
        for function, given, named in allocations:
            function(*given, **named)

    def usually(call: Callable[[], object]) -> Callable[[], float]:
        def timed() -> float:
            with mock.patch.object(Prepared, "launch", usual), mock.patch.object(Bound, "launch", usual_bound):
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
    # In turn. The minimum over many rounds is the one with the least load from other processes.
    return [min(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    set_backend("triton")
    print(f"Triton {triton.__version__}, torch {torch.__version__}; microseconds of the host")
    print(f"{'':34}{'launch: Triton':>15}{'ztk':>7}{'op: Triton':>12}{'dispatcher':>12}{'short':>7}{'allocation':>12}")
    with (
        assume(MACHINES["sm_90"]),  # as the stand-in
        launching(lambda *_: None),
        mock.patch.object(library, "interpreting", lambda: True),
    ):
        for name, (op, args) in (cases() | further_cases()).items():
            launch, short_launch, op_usual, op_dispatched, op_short, allocation = row(op, args)
            print(
                f"{name:34}{launch:15.1f}{short_launch:7.1f}{op_usual:12.1f}{op_dispatched:12.1f}{op_short:7.1f}{allocation:12.1f}"
            )


if __name__ == "__main__":
    main()
