"""Measures every kernel on this machine's GPU: `python scripts/bench_kernels.py [--ops NAME] [--minutes 8.5]`.

First the limits of the machine: copy bandwidth and the rate of bfloat16 matrix products. Then, per op, a correctness check against its
reference. Only an op that passes is timed: p20, p50 and p80 of forward and of forward with backward, as share of the limit and as ratio to each
installed peer (torch eager, torch.compile, torch's fused forms, SDPA, liger-kernel). Writes experiments/results/<gpu>/
kernels-<date>-<commit>.json, a picture and an offline wandb run next to it, and docs/kernels.md.

Without a GPU the script times nothing and updates the ahead-of-time metrics and the page. `--dry-run` runs the same code with small shapes
on the CPU and writes only rows, into the folder of `--to`.
"""

import datetime
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kernels_page
import torch
import triton
from kernel_peers import all_peers
from torch import Tensor

from scripts.bench import parser_of
from scripts.kernel_records import Record
from scripts.results import commit_of, folder_of
from scripts.time_limit import OutOfTime, time_limit
from tests.kernels.aot.cases import CASES
from ztk.kernels import ALL_OPS, OpSpec

ROOT = Path(__file__).resolve().parents[1]
QUANTILES = (0.2, 0.5, 0.8)
FIRST = ("attention", "cross_entropy", "rms_norm", "layer_norm", "adamw")  # measured before the others
DRAWN_ON_CPU = (
    "adamw_bf16",
    "adamw_8bit",
    "adamw_stochastic",
)  # their references draw random bits: 43 s per call with 1e9 elements
SLOWEST_SECONDS = 20.0  # limit of one measurement
GATE_ULPS = 4  # factor on the spec's tolerance: tensor cores sum in another order than the reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement. Milliseconds, bytes and floating point operations are per call."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    direction: str  # forward, or forward+backward
    provider: str  # ztk or the peer's name
    p20: float
    p50: float
    p80: float
    floor_bytes: int
    floor_flops: int
    gb_per_s: float  # floor_bytes / p50
    tflop_per_s: float
    share: float  # of the binding limit, measured in this run
    limit: str  # memory or matmul
    speedup: float | None  # this provider's p50 / ztk's; None for ztk
    gpu: str
    date: str
    commit: str
    torch: str
    triton: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Copy bandwidth and matrix product rate of the machine, measured in this run."""

    copy_gb_per_s: float
    matmul_tflop_per_s: float


@dataclass(kw_only=True, slots=True)
class Results:
    """Rows, written one by one, so that a crash keeps the earlier ones. With file=None nothing is written."""

    limits: Limits
    file: Path | None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.file is not None:
            document = {"limits": asdict(self.limits), "rows": [asdict(row) for row in self.rows]}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(document, indent=1) + "\n")


class Clock:
    """Quantiles of a function's time in milliseconds: CUDA events with a cold second-level cache, or the CPU's clock."""

    def __init__(self, device: str, *, deadline: float = math.inf):
        """deadline: in the time of `time.monotonic`."""
        self.device, self.deadline = device, deadline

    def __call__(self, function: Callable[[], object]) -> tuple[float, float, float]:
        """Raises OutOfTime when a call takes longer than `SLOWEST_SECONDS` or than the time left."""
        if self.device == "cuda":
            self._warm(function)
            return tuple(triton.testing.do_bench(function, warmup=25, rep=100, quantiles=list(QUANTILES)))
        samples = []
        for _ in range(3):
            start = time.perf_counter()
            function()
            samples.append(1e3 * (time.perf_counter() - start))
        return tuple(sorted(samples))

    def _warm(self, function: Callable[[], object]) -> None:
        """Compiles, and times one call on the host first: `do_bench` makes at least eleven calls."""
        seconds = math.inf
        for _ in range(2):
            start = time.monotonic()
            function()
            torch.cuda.synchronize()
            seconds = time.monotonic() - start
        left = self.deadline - time.monotonic()
        if 12 * seconds > min(left, SLOWEST_SECONDS):
            raise OutOfTime(f"{seconds:.2f} s a call")


def measure_limits(clock: Clock) -> Limits:
    n, m = (1 << 30, 8192) if clock.device == "cuda" else (1 << 20, 256)
    return Limits(
        copy_gb_per_s=4 * n / _copy_ms(clock, n) / 1e6, matmul_tflop_per_s=2 * m**3 / _matmul_ms(clock, m) / 1e9
    )


def _copy_ms(clock: Clock, n: int) -> float:
    src, dst = (torch.randn(n, device=clock.device).bfloat16() for _ in range(2))
    return clock(lambda: dst.copy_(src))[1]


def _matmul_ms(clock: Clock, m: int) -> float:
    a, b = (torch.randn(m, m, device=clock.device).bfloat16() for _ in range(2))
    return clock(lambda: torch.mm(a, b))[1]


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def prepared(spec: OpSpec, inputs: dict) -> dict:
    """Copies the inputs; the differentiable ones become leaves."""

    def copied(value: object) -> object:
        if isinstance(value, list):
            return [copied(item) for item in value]
        return value.detach().clone() if isinstance(value, Tensor) else value

    copy: dict[str, Any] = {name: copied(value) for name, value in inputs.items()}
    for name in spec.differentiable:
        if isinstance(copy[name], Tensor):
            copy[name].requires_grad_()
    return copy


def gate(spec: OpSpec, *, dtype: torch.dtype, device: str) -> str:
    """The error of the op's outputs and gradients on small shapes; empty if they are correct. A wrong op is not timed."""
    for shape in spec.small_shapes[1:]:
        torch.manual_seed(0)
        inputs = spec.make_inputs(shape, dtype=dtype, device=device)
        results = []
        for function in (spec.op, spec.reference):
            copy = prepared(spec, inputs)
            outs = tensors(function(**copy))
            live = [o for o in outs if o.requires_grad]
            torch.manual_seed(1)
            if live:
                torch.autograd.backward(live, [torch.randn(o.shape, device=device).to(o.dtype) for o in live])
            named = outs + [t for name in spec.mutated for t in tensors(copy[name])]
            results.append(named + [copy[n].grad for n in spec.differentiable if isinstance(copy[n], Tensor)])
        for mine, theirs in zip(*results, strict=True):
            if not theirs.is_floating_point() or not theirs.numel():
                continue
            eps = torch.finfo(theirs.dtype).eps
            error = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
            if not error <= GATE_ULPS * spec.tolerance_ulps * eps:
                return f"{spec.name} {shape}: error {error / eps:.1f} eps"
    return ""


def call(function: Callable, spec: OpSpec, inputs: dict, *, backward: bool) -> Callable[[], object]:
    """The function to time. With backward it also computes gradients of all differentiable inputs from fixed output gradients."""
    if not backward:
        return lambda: function(**inputs)
    leaves = [inputs[n] for n in spec.differentiable if isinstance(inputs[n], Tensor)]

    def outputs() -> list[Tensor]:
        return [out for out in tensors(function(**inputs)) if out.requires_grad]

    d_outs = [
        torch.ones_like(out) if out.dim() == 0 else torch.randn(out.shape, device=out.device).to(out.dtype)
        for out in outputs()
    ]
    return lambda: torch.autograd.grad(outputs(), leaves, d_outs, allow_unused=True)


def bench_op(spec: OpSpec, *, clock: Clock, results: Results, peers: dict, stamp: dict) -> None:
    """Adds the op's rows to `results`. Raises OutOfTime."""
    dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else spec.dtypes[0]
    problem = gate(spec, dtype=dtype, device=clock.device)
    if problem:
        print(f"  NOT TIMED, wrong: {problem}")
        return
    providers = {"ztk": spec.op} | peers.get(
        spec.name, {}
    )  # the peers first: compiling eager torch can take the rest of the time
    eager = spec.eager or spec.reference  # the reference is plain torch too
    if clock.device == "cpu" or spec.name not in DRAWN_ON_CPU:
        providers["torch eager"] = eager
    if clock.device == "cuda" and spec.name not in DRAWN_ON_CPU:
        providers["torch.compile"] = torch.compile(eager)
    mine: dict[tuple, Row] = {}
    shapes = spec.bench_shapes if clock.device == "cuda" else spec.small_shapes[1:2]
    works = [(shape, backward) for shape in shapes for backward in ((False, True) if spec.differentiable else (False,))]
    for name, function in providers.items():  # all of ztk's rows first
        for shape, backward in works:
            row = bench_one(spec, name, function, shape=shape, dtype=dtype, backward=backward, clock=clock,
                            limits=results.limits, mine=mine.get((shape, backward)), stamp=stamp)  # fmt: skip
            if row is not None:
                if name == "ztk":
                    mine[shape, backward] = row
                results.add(row)
                print(f"  {name:42s} {'x'.join(map(str, shape)):24s} {row.direction:17s} {row.p50:9.3f} ms "
                      f"{row.share:6.1%} of {row.limit}" + (f"  ztk is {row.speedup:.2f}x" if row.speedup else ""))  # fmt: skip


def bench_one(
    spec: OpSpec, name: str, function: Callable, *, shape: tuple[int, ...], dtype: torch.dtype, backward: bool,
    clock: Clock, limits: Limits, mine: Row | None, stamp: dict,
) -> Row | None:  # fmt: skip
    """Times one provider. Returns None if it cannot run here (out of memory, not built for this machine) or takes too long.

    Raises OutOfTime after the deadline, and every error of ztk's own op.
    """
    itemsize = torch.finfo(dtype).bits // 8
    floor_bytes, flops = spec.num_bytes(shape, itemsize), spec.num_flops(shape)
    if backward:
        floor_bytes += spec.num_bytes_backward(shape, itemsize) if spec.num_bytes_backward else 2 * floor_bytes
        # the FLOPs of linear_cross_entropy include backward; the backward of a product is two products, of attention 2.5
        flops = {"linear_cross_entropy": flops, "attention": 7 * flops // 2}.get(spec.name, 3 * flops)
    elif spec.name == "linear_cross_entropy":
        flops //= 3
    try:
        inputs = prepared(spec, spec.make_inputs(shape, dtype=dtype, device=clock.device))
        if not backward:
            inputs = {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        p20, p50, p80 = clock(call(function, spec, inputs, backward=backward))
    except Exception as error:
        if time.monotonic() > clock.deadline:
            raise OutOfTime("the deadline has passed") from error
        if name == "ztk" and not isinstance(error, OutOfTime):
            raise
        print(f"  {name}: not available ({type(error).__name__}: {str(error).splitlines()[0][:90]})")
        return None
    finally:
        if clock.device == "cuda":
            torch.cuda.empty_cache()
    memory, matmul = floor_bytes / p50 / 1e6, flops / p50 / 1e9
    shares = {"memory": memory / limits.copy_gb_per_s}
    if any(case.matrix_instructions for case in CASES[spec.name]) or spec.name == "linear_cross_entropy":
        shares["matmul"] = matmul / limits.matmul_tflop_per_s
    limit = max(shares, key=lambda name: shares[name])
    return Row(
        op=spec.name, shape=shape, dtype=str(dtype)[6:], direction="forward+backward" if backward else "forward",
        provider=name, p20=p20, p50=p50, p80=p80, floor_bytes=floor_bytes, floor_flops=flops, gb_per_s=memory,
        tflop_per_s=matmul, share=shares[limit], limit=limit, speedup=p50 / mine.p50 if mine else None, **stamp,
    )  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ops", default="", help="measure only ops whose name contains this")
    parser.add_argument("--minutes", type=float, default=8.5, help="stop measuring after this long")
    parser.add_argument(
        "--to",
        type=Path,
        help="folder of the rows alone (default: experiments/results/GPU, with picture, run and page)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="small shapes on the CPU; only rows are written, with --to"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.dry_run else "cpu"
    if device == "cpu" and not options.dry_run:
        print("no GPU here: speed stays unmeasured; refreshing the ahead-of-time metrics and docs/kernels.md")
        kernels_page.refresh_aot()
        kernels_page.write()
        return 0

    clock = Clock(device, deadline=time.monotonic() + 60 * options.minutes)
    stamp = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "date": datetime.date.today().isoformat(),
        "commit": commit_of(ROOT),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    writes, folder = device == "cuda" or options.to is not None, options.to or folder_of(stamp["gpu"])
    name = f"kernels-{stamp['date']}-{stamp['commit']}"
    results, failed = None, []
    try:
        with time_limit(60 * options.minutes):
            limits = measure_limits(clock)
            print(
                f"{stamp['gpu']}: copy {limits.copy_gb_per_s:.0f} GB/s, matmul {limits.matmul_tflop_per_s:.1f} TFLOP/s"
            )
            results = Results(limits=limits, file=folder / f"{name}.json" if writes else None)
            peers = all_peers()
            for spec in sorted(ALL_OPS, key=lambda spec: FIRST.index(spec.name) if spec.name in FIRST else len(FIRST)):
                if options.ops in spec.name:
                    print(spec.name)
                    try:
                        bench_op(spec, clock=clock, results=results, peers=peers, stamp=stamp)
                    except OutOfTime:
                        raise
                    except Exception as error:  # noqa: BLE001  # an op that fails leaves the others their rows
                        failed.append(spec.name)
                        print(f"  FAILED: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                        if device == "cuda" and not is_usable():
                            print("  the device is unusable in this process; the other ops are not measured")
                            break
    except OutOfTime as error:
        print(f"  {error}; the rest is not measured")
    if results is not None and results.file is not None and options.to is None:
        record = Record(title=f"share of the limit, {stamp['gpu']}", column="share", line=1.0)
        own = [asdict(row) for row in results.rows if row.provider == "ztk"]
        labels = [f"{row['op']} {'x'.join(map(str, row['shape'][:4]))} {row['direction']}" for row in own]
        record.write(own, folder=folder, name=name, labels=labels)
        kernels_page.write()
        print(f"{len(results.rows)} rows in {folder}; docs/kernels.md written")
    return int(bool(failed))


def is_usable() -> bool:
    """Whether the GPU still works in this process. After an illegal memory access every later call fails."""
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
