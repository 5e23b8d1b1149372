"""Writes docs/kernels.md from data: the ops' counted floors, the newest measured rows per GPU, the ahead-of-time metrics.

`python scripts/kernels_page.py [--aot]` writes the page; with `--aot` it compiles every kernel first.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import markdown, parser_of
from scripts.kernel_callers import HOT_PATHS, callers
from scripts.kernel_records import Record
from scripts.results import RESULTS
from tests.kernels.aot.cases import CASES
from ztk.kernels import ALL_OPS

ROOT = Path(__file__).resolve().parents[1]
AOT_FOLDER = RESULTS / "aot"  # one file per version of Triton
PAGE = ROOT / "docs" / "kernels.md"
COPY_GB_PER_S, MATMUL_TFLOP_PER_S = 4300, 790  # ceilings measured on one H200, for floors in milliseconds
ITEMSIZE = 2
PICTURED = "sm_90"

KERNELS_OF = {
    "linear_cross_entropy": "cross_entropy",
    "linear_logprob": "cross_entropy",
}  # ops without kernels of their own

# (share of the limit, ratio to the best peer) to reach on an H200.
GOALS = {
    "adamw": ("90 %", "1.7x norm + mul + torch._fused_adamw_ + cast"),
    "adamw_bf16": ("90 %", "1.4x"),
    "adamw_stochastic": ("90 %", ""),
    "adamw_8bit": ("80 %", "1.5 to 2x flashoptim"),
    "sum_of_squares": ("90 %", "1.1x torch._foreach_norm"),
    "quantize": ("85 %", "1.1x torch.compile"),
    "dequantize": ("85 %", "1.1x torch.compile"),
    "dequantize_reduce": ("85 %", "1.1x torch.compile"),
    "cross_entropy": ("80 %", "1.7x liger"),
    "linear_cross_entropy": ("88 %", "1.3x"),
    "rms_norm": ("88 % forward, 80 % backward", "1.05x, 2.2x liger backward"),
    "layer_norm": ("88 % forward, 80 % backward", "1.05x, 1.5x aten backward"),
    "swiglu": ("93 %", "1.03x"),
    "rope": ("88 %", "1.1x"),
    "attention": ("70 % forward", "1.4x SDPA flash forward, 1.3x backward"),
    "grouped_matmul": ("78 %", "1.08x torch._grouped_mm"),
    "grouped_matmul_pair": ("78 %", "1.08x torch._grouped_mm twice"),
    "linear_rows": ("90 % (int8, fp8 85 %, int4 75 %)", ""),
    "gated_rows": ("90 %", ""),
    "cache_rows": ("85 %", ""),
    "paged_attention": ("85 % from 64k keys", ""),
    "copy_blocks": ("90 %", ""),
    "draw_rows": ("90 %", ""),
    "select_rows": ("80 % without top-k and top-p", ""),
}


def refresh_aot(ops: str = "") -> None:
    """Compiles every kernel for every target with the installed Triton and stores the metrics. ops: compile only ops whose name contains it;
    the rows of the others stay."""
    # ROOT first, then this process's path, which may hold the Triton that names the file.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.kernels.aot", "--json", *(["--ops", ops] if ops else [])]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if not done.stdout.strip():
        raise RuntimeError(f"the ahead-of-time report failed:\n{done.stderr[-2000:]}")
    rows = json.loads(done.stdout)
    AOT_FOLDER.mkdir(parents=True, exist_ok=True)
    file = AOT_FOLDER / f"triton-{triton.__version__}.json"
    if ops and file.exists():
        new, known = {row["op"] for row in rows}, json.loads(file.read_text())
        order = list(dict.fromkeys(row["op"] for row in known + rows))
        rows = sorted([row for row in known if row["op"] not in new] + rows, key=lambda row: order.index(row["op"]))
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.write_text(f"[\n{lines}\n]\n")
    record_aot(rows)


def record_aot(rows: list[dict]) -> None:
    """A wandb run and a picture of the metrics of `PICTURED`."""
    pictured = [row for row in rows if row["arch"] == PICTURED]
    record = Record(title=f"instructions per element, {PICTURED}", column="instructions_per_element")
    labels = [f"{row['op']} {row['kernel']}" for row in pictured]
    record.write(pictured, folder=AOT_FOLDER, name=f"kernels-{PICTURED}", labels=labels)


def compiled() -> dict[str, dict[tuple[str, str], dict]]:
    """Version of Triton -> (kernel, target) -> metrics, oldest version first."""
    files = {file.stem.removeprefix("triton-"): file for file in AOT_FOLDER.glob("triton-*.json")}
    versions = sorted(files, key=lambda version: tuple(map(int, version.split("."))))
    return {
        version: {(row["kernel"], row["arch"]): row for row in json.loads(files[version].read_text())}
        for version in versions
    }


def newest_measurements() -> dict[str, dict]:
    """GPU folder -> the document of its newest file."""
    found = {}
    for file in sorted(RESULTS.glob("*/kernels-*.json"), key=lambda f: (f.name, f.stat().st_mtime)):
        found[file.parent.name] = json.loads(file.read_text())
    return found


def quantity(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def size(shape: Iterable[int]) -> str:
    """8192x4096; four or more equal sizes are counted: 24 of 1048576."""
    runs = [(length, len(list(same))) for length, same in itertools.groupby(shape)]
    return "x".join(f"({n} of {length})" if n > 3 else "x".join([str(length)] * n) for length, n in runs)


def floors() -> str:
    rows = []
    for spec in ALL_OPS:
        for shape in spec.bench_shapes:
            moved, flops = spec.num_bytes(shape, ITEMSIZE), spec.num_flops(shape)
            by_memory = moved / COPY_GB_PER_S / 1e6
            is_product = spec.name == "linear_cross_entropy" or any(
                case.matrix_instructions for case in CASES[spec.name]
            )
            by_flops = flops / MATMUL_TFLOP_PER_S / 1e9 if is_product else 0.0
            backward = spec.num_bytes_backward(shape, ITEMSIZE) if spec.num_bytes_backward else 0
            bound = "matmul" if by_flops > by_memory else "memory"
            rows.append([
                spec.name, size(shape), quantity(moved, "B"), quantity(backward, "B") if backward else "-",
                quantity(flops, "FLOP"), f"{max(by_memory, by_flops):.3g} ms, {bound}", *GOALS.get(spec.name, ("-", "-")),
            ])  # fmt: skip
    header = ["op", "shape", "bytes", "bytes of backward", "FLOPs", "floor", "goal: share", "goal: best peer"]
    return markdown(header, rows)


def called() -> str:
    found = callers()
    rows = []
    for spec in ALL_OPS:
        names = [f"`{name}`" for name in found[spec.name]]
        kernels = [f"`{name}`" for name in sorted({case.kernel for case in CASES[spec.name]})]
        if other := KERNELS_OF.get(spec.name):
            kernels.append(f"as `{other}`")
        rows.append([HOT_PATHS[spec.name], f"`{spec.name}`", ", ".join(kernels), ", ".join(names)])
    empty = [row[1] for row in rows if not all(row)]
    if empty:
        raise ValueError(f"{', '.join(empty)}: an op without a kernel or a caller")
    return markdown(["hot path", "op", "Triton kernels", "caller"], sorted(rows))


def measured() -> str:
    documents = newest_measurements()
    if not documents:
        return (
            "**Speed is unmeasured.** No row from a GPU exists in `experiments/results/`: this page shows no speed. "
            "The floors above are counted, the metrics below come from the compiler."
        )
    parts = []
    for gpu, document in documents.items():
        rows, limits = document["rows"], document["limits"]
        if not rows:
            continue
        first = rows[0]
        parts.append(
            f"### {first['gpu']}\n\n{first['date']}, commit {first['commit']}, torch {first['torch']}, triton "
            f"{first['triton']} (folder `{gpu}`). Limits in the same run: copy {limits['copy_gb_per_s']:.0f} GB/s, matmul "
            f"{limits['matmul_tflop_per_s']:.0f} TFLOP/s.\n"
        )
        lines = []
        for mine in (row for row in rows if row["provider"] == "ztk"):
            same = [
                r
                for r in rows
                if (r["op"], r["shape"], r["direction"]) == (mine["op"], mine["shape"], mine["direction"])
            ]
            peers = [f"{r['provider']} {r['speedup']:.2f}x" for r in same if r["speedup"]]
            rate = f"{mine['gb_per_s']:.0f} GB/s" if mine["limit"] == "memory" else f"{mine['tflop_per_s']:.0f} TFLOP/s"
            goal = GOALS.get(mine["op"], ("-", "-"))[0]
            lines.append([
                mine["op"], size(mine["shape"]), mine["direction"], f"{mine['p20']:.3g}",
                f"{mine['p50']:.3g}", f"{mine['p80']:.3g}", rate, f"{mine['share']:.0%}", goal, "; ".join(peers) or "-",
            ])  # fmt: skip
        header = ["op", "shape", "direction", "p20 ms", "p50 ms", "p80 ms", "rate", "share", "goal", "ztk faster than"]
        parts.append(markdown(header, lines))
        unmeasured = sorted({spec.name for spec in ALL_OPS} - {row["op"] for row in rows})
        if unmeasured:
            parts.append(f"\nNot measured in that run: {', '.join(unmeasured)}.")
    return "\n".join(parts)


def ahead_of_time() -> str:
    found = compiled()
    if not found:
        return "No metrics yet: run `python scripts/kernels_page.py --aot`."
    newest = list(found.values())[-1]
    lines = []
    for place, row in newest.items():
        rows = [rows[place] for rows in found.values() if place in rows]
        resident = [f"{r['programs']}, {r['programs_per_processor'] or '-'}" for r in rows]
        access = [f"{r['widest_load']}, {r['widest_store']}" for r in rows]
        counts = (each(r[name] for r in rows) for name in ("registers", "stack_bytes", "shared_bytes"))
        work = (
            each(r[name] for r in rows)
            for name in ("matrix_instructions", "instructions_per_element", "loop_instructions")
        )
        lines.append(
            [
                row["op"],
                f"`{row['kernel']}`",
                row["arch"],
                *counts,
                each(resident),
                each(access),
                *work,
                each(map(budget, rows)),
            ]
        )
    header = [
        "op", "kernel", "target", "registers", "stack bytes", "shared bytes", "programs, fit", "widest load, store",
        "matrix instructions", "instructions per element", "in loops", "budget",
    ]  # fmt: skip
    kept = (
        f"Triton {version}: {sum(r['ok'] for r in rows.values())} of {len(rows)}" for version, rows in found.items()
    )
    versions = " / ".join(found)
    return (
        f"Compilations that keep their budget: {', '.join(kept)}. Two values in a cell belong to Triton {versions}, where they differ. "
        "Programs: launched in all, and how many a processor holds at once (not counted for gfx942).\n\n"
        + markdown(header, lines)
    )


def budget(row: dict) -> str:
    state = "kept" if row["ok"] else "**broken**"
    return f"{state}: {row['reason']}" if row["reason"] else state


def each(values: Iterable[object]) -> str:
    """The values joined by " / ", or one value if all are equal."""
    texts = ["-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def write() -> None:
    """Writes the page."""
    PAGE.write_text(f"""# Kernels

Find the least bytes and operations of an op, its callers, its measured speed and its compiled code. Measure on your GPU in under nine minutes:

```bash
python scripts/bench_kernels.py     # writes experiments/results and this page
```

`python scripts/kernels_page.py` writes the page without measuring. Both read the ops from `ztk.kernels.ALL_OPS`.

## Counted floors and goals

The bytes and operations of a perfect kernel for 16-bit tensors, counted from the op's definition. The floor in milliseconds is
that count divided by the ceilings of one H200, as measured elsewhere: {COPY_GB_PER_S} GB/s of copy, {MATMUL_TFLOP_PER_S} TFLOP/s of
bfloat16 products. Shares of measured rows are relative to the limits of the same machine in the same run.
The last two columns are goals, not results.

{floors()}

## Callers

Where each op is used, and the functions that call it, read from the source (`scripts/kernel_callers.py`). On a GPU an op is its Triton
kernel, on a CPU torch's operations.

{called()}

## Design

- **Gradients** of the native decoder's matrices are written into their bucket by the product that computes them
  (`ztk.core.runtime.gradient_places`). The others reach it by one copy each when autograd brings them, which frees the gradient at once.
  Parameters are views of the gathered buffer. No kernel flattens tensors.
- **Updates.** One launch updates the states of a bucket on a device, with every optimizer except Muon's matrices and LAMB. A table on the
  device (`ztk.kernels.shared.tiles`) has, per 1,024 elements (2,048 on AMD GPUs), the row of the control table and the position in the
  model: 32 bytes.
- **Residual additions** between blocks are eager. A fused one would belong to the next block's norm, and pipelines and recomputation would
  keep two tensors. It would save 0.12 % of a 7b layer's elementwise traffic.
- **Attention's backward** has seven products. Five would need atomics, whose order is not fixed, or more traffic
  ([counts](results.md#counts-behind-the-design-of-two-kernels)). FlashAttention-3's deterministic backward replaces it for shapes where it is
  installed and measured faster, as its forward or cuDNN's replaces ztk's [in the same way](gpu.md#attention-by-libraries).
- **Experts on Hopper**: 16-bit weights are loaded by the copy engine (TMA) through descriptors that the host makes, if their rows are
  multiples of 16 bytes. Other rows and Blackwell use pointers.
- **Launches.** `ztk.kernels.launch.jit` finds a compiled program by a tuple of its arguments; launchers of small ops keep grid, constants
  and options per size ([Note: Cost of a repeated launch]). Without a mode, trace, transform, profiler or autograd an op is its launcher
  (`ztk.kernels.launch.direct`). `ZTK_LAUNCH=public`, or other releases than `ztk.kernels.launch.private` lists, use Triton's public
  functions: the same programs, 5 to 15 microseconds more per op ([measured](results.md#microseconds-of-the-host-per-op)).
- **From Hopper on** the kernels of a decoding step, norms and routes start while the kernel before them runs ([Note: Programmatic dependent
  launch] in `ztk/kernels/launch/dependent.py`). They wait before their first access to memory; the report below fails for a kernel whose
  code does not.

## Measured

{measured()}

## Ahead-of-time metrics

The compilers' results for every kernel, on any machine: `python -m tests.kernels.aot`. A budget is registers, stack (zero
unless the spec gives a reason), the widest global load and store, barriers, the target's matrix instructions and
instructions per element. gfx942 reports vector registers. `python scripts/kernels_page.py --aot` compiles with the Triton at hand
and keeps the rows of the others.

{ahead_of_time()}
""")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--aot", action="store_true", help="compile every kernel first")
    parser.add_argument("--ops", default="", help="with --aot: only ops whose name contains this")
    options = parser.parse_args()
    if options.aot:
        refresh_aot(options.ops)
    write()
