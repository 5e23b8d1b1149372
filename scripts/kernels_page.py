"""Write docs/kernels.md from data: the ops' counted floors, the newest measured rows per GPU, the ahead-of-time metrics.

`python scripts/kernels_page.py [--aot]` regenerates the page, with `--aot` after compiling every kernel again.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.kernel_callers import HOT_PATHS, callers
from scripts.kernel_records import Record
from scripts.results import RESULTS
from tests.kernels.aot.cases import CASES
from ztk.kernels import ALL_OPS

ROOT = Path(__file__).resolve().parents[1]
AOT_FOLDER = RESULTS / "aot"  # a file per version of Triton
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
    """Compile every kernel for every target with the Triton at hand, and keep the metrics. ops: only those ops whose name contains it; the rows
    of the others stay."""
    # Behind ROOT what this process had: the Triton that names the file may come from there.
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
    """8192x4096; equal neighbours from four on are counted, 24 of 1048576."""
    runs = [(length, len(list(same))) for length, same in itertools.groupby(shape)]
    return "x".join(f"({n} of {length})" if n > 3 else "x".join([str(length)] * n) for length, n in runs)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


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
    header = ["op", "shape", "bytes", "bytes of backward", "FLOPs", "floor", "share to reach", "against the best peer"]
    return table(header, rows)


def called() -> str:
    found = callers()
    rows = []
    for spec in ALL_OPS:
        names = [f"`{name}`" for name in found[spec.name]]
        kernels = [f"`{name}`" for name in sorted({case.kernel for case in CASES[spec.name]})]
        if other := KERNELS_OF.get(spec.name):
            kernels.append(f"those of `{other}`")
        rows.append([HOT_PATHS[spec.name], f"`{spec.name}`", ", ".join(kernels), ", ".join(names)])
    empty = [row[1] for row in rows if not all(row)]
    if empty:
        raise ValueError(f"{', '.join(empty)}: an op without a kernel or a caller")
    return table(["hot path", "op", "Triton kernels", "caller"], sorted(rows))


def measured() -> str:
    documents = newest_measurements()
    if not documents:
        return (
            "**Speed is unmeasured.** No row from a GPU exists in `experiments/results/`: nothing on this page says how fast "
            "a kernel runs. The floors above are counted, the metrics below come from the compiler."
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
        parts.append(table(header, lines))
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
        f"Compilations that keep their budget: {', '.join(kept)}. Two values in a cell are those of Triton {versions}, where they differ. "
        "Programs: launched in all, and how many a processor holds at once (not counted for gfx942).\n\n"
        + table(header, lines)
    )


def budget(row: dict) -> str:
    state = "kept" if row["ok"] else "**broken**"
    return f"{state}: {row['reason']}" if row["reason"] else state


def each(values: Iterable[object]) -> str:
    """The values with " / " between them, or the one that they all are."""
    texts = ["-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def write() -> None:
    """Write the page."""
    PAGE.write_text(f"""# Kernels

This page is generated by `python scripts/kernels_page.py`; `python scripts/bench_kernels.py` measures on this machine's GPU
(under nine minutes) and writes the page again. Both read the ops from `ztk.kernels.ALL_OPS`.

## Counted floors

The bytes and operations of a perfect kernel for 16-bit tensors, counted from the op's definition. The floor in milliseconds is
that count over the ceilings of one H200 as measured elsewhere: {COPY_GB_PER_S} GB/s of copy, {MATMUL_TFLOP_PER_S} TFLOP/s of
bfloat16 products. Shares of measured rows are relative to the limits of the same machine in the same run.

{floors()}

## Callers

Where each op is used, and the functions that call it, read from the source (`scripts/kernel_callers.py`). On a GPU an op is its Triton
kernel, on a CPU torch's operations.

{called()}

Gradients of the native decoder's matrices are written into their bucket by the product that computes them
(`ztk.core.runtime.gradient_places`): of a layer's nine gradients two, of its norms, are copied. The others reach their bucket by one copy
each, when autograd brings them: it runs behind the backward's products and frees the gradient at once, where one launch per bucket would
keep the gradients of a bucket beside its buffer until the last one has come. Parameters are views of what is gathered. So there is no
kernel that flattens or unflattens a list of tensors.

One launch updates the states of a bucket that are on a device, with every optimizer but for Muon's matrices and LAMB, whatever parameter groups
the bucket has and wherever positions in the model jump, by which stochastic rounding draws. A table on the device (`ztk.kernels.shared.tiles`)
says for every 1,024 elements, on AMD GPUs 2,048, which row of the control table is theirs, and which position: 32 bytes, 0.03 per element,
where an update moves 12 to 28, and one to five instructions per element more, nine for `adamw_bf16` on sm_100 ("three segments" below).

The sum of a block's input and result is an eager addition: a fused one would be part of the next block's norm, so a block would hand on two
tensors. Pipelines would send both, and recomputation, which keeps a block's inputs, would keep both. Inside a block the addition is the
norm's. It would save 2 of about 95 bytes per element that a layer's elementwise work moves: 16 us of 12.6 ms, 0.12 %, by the floors of a 7b
layer with 8,192 tokens on an H200.

The attention's backward has seven products where five are possible: with five, dQ is added up over programs, by atomics, whose order is not
fixed, or in a float32 copy of Q per block of keys, T / 64 times Q, which at 8192 tokens is 128 times its memory.

One program could own all keys of a batch and key head and add dQ up by itself, in a fixed order. It reads and writes 8 D bytes of dQ per
query and block of keys, and there are only as many programs as batches times key heads. The longer of five products on the processors that
are used and of that traffic, over seven products on all (counted, not measured: 790 TFLOP/s, 132 processors, 4.3 TB/s of an H200 and 3.0 of
an H100, causal, 32,768 tokens, 32 heads, D = 128, blocks of 128 keys):

| T | H200, 8 key heads | H100, 8 key heads | H200, 32 key heads | H100, 32 key heads |
| ---: | ---: | ---: | ---: | ---: |
| 2048 | 0.82 | 1.18 | 0.82 | 1.18 |
| 4096 | 1.47 | 1.47 | 0.82 | 1.18 |
| 8192 | 2.95 | 2.95 | 0.82 | 1.18 |
| 16384 | 5.89 | 5.89 | 1.47 | 1.47 |
| 32768 | 11.8 | 11.8 | 2.95 | 2.95 |

Two more ways keep the order. A program per block of keys, as now, could wait for its turn to add to dQ: from the diagonal down
nobody waits long, because the one before has begun a tile earlier. A tile of 128 x 128 then moves 131 KB through the second-level
cache, 3.1 us of a processor's share of 5.5 TB/s, beside 3.5 us of five products and 4.9 of seven, and waits for a flag and publishes
one, twice 0.7 us: 4.9 at best, with programs that spin. Or the kernel of keys writes dS in 16 bits and dQ = dS K is a product of its
own: 4 bytes per pair of query and key, 0.93 ps, in place of the 512 operations of two products, 0.65 ps, and memory that is the
square of T.

So five products could win on one GPU, for short sequences, if all traffic hides, and lose elsewhere: seven stay.

On Hopper 16-bit weights of experts come by descriptors, from which the copy engine (TMA) loads blocks of one expert, if their rows are
multiples of 16 bytes; a tile's rows of x are gathered, so they come by pointers. The host makes the descriptors, or the kernel would
(`tl.make_tensor_descriptor`). Compiled for each way (Triton 3.9.0, bfloat16, tiles of 128 x 128 x 64, 8 warps, 3 stages, on sm_90 128 registers
at most; three numbers: `x @ w`, `d_out @ w^T`, and the gradient that a pair of weights has in common; counted, not measured):

| | sm_90: pointers | the host's | the kernel's | sm_100: pointers | the host's |
| --- | ---: | ---: | ---: | ---: | ---: |
| registers | 123, 123, 122 | 113, 115, 109 | 128, 128, 128 | 140, 120, 136 | 137, 145, 138 |
| spilled bytes | 0 | 0 | 24, 24, 32 | 0 | 0 |
| programs that fit | 2 | 2 | 2 | 1, 2, 1 | 1 |
| instructions of a warp per step of 64 | 141, 122, 149 | 115, 116, 138 | 136, 137, 165 | 154, 130, 149 | 132, 129, 138 |
| barriers per step | 2 | 4 | 4 | 3 | 5 |
| cycles that issue takes, 8 warps on 4 schedulers | 282, 244, 298 | 230, 232, 276 | 272, 274, 330 | 308, 260, 298 | 264, 258, 276 |
| cycles that the products take | 512 | 512 | 512 | 256 | 256 |

With Triton 3.6.0 on sm_90: 128, 128 and 128 registers and 132, 112 and 143 instructions with pointers, 128, 128 and 124 registers and 106, 106
and 130 instructions with the host's descriptors. On Blackwell the second program of a processor is lost for `d_out @ w^T`, and there are two
barriers more where issue is what binds: pointers stay there. A kernel's descriptors take a buffer that the process has to provide at each
launch (1.1 us of the host for `torch.empty` and the look at Triton's allocator, which each thread has its own of), and each program writes its
own and waits for it. Of the host's, Triton's launcher makes one per weight and launch, 1.4 us with 3.9.0 and 2.0 with 3.6.0, and the driver
fills it in, which refuses what it cannot describe. A loop for each weight of a pair would take 115 instructions in place of 138, and 116
registers, but fill its pipeline twice per tile; one loop chooses the descriptor in each step.

Rows of no multiple of 16 bytes take pointers, one program per processor and up to 255 registers: with 128, as before, they spilled 266 times or
more, and now 6 to 80 times.

A kernel is launched by `ztk.kernels.launch.jit`, which finds the compiled program by a tuple of what Triton's own C function says of the
arguments. Launchers of small ops bind a kernel to its grid, numbers, constexprs and options in a function of the sizes alone, which keeps its
results, and what memory the op's results take: of a call whose sizes are known only the tensors are looked at, their dtypes and addresses
([Note: Cost of a repeated launch]). An op on a GPU that nobody looks at is its launcher (`ztk.kernels.launch.direct`): torch's dispatcher is
called where a mode, a trace, a transform, a profiler or autograd wants to see it. Where no gradients are recorded, norms, gated activations
and `rope` leave `autograd.Function` out, too, and norms take tensors of any number of dimensions without views around them.

The short launch uses private names of torch and Triton, which `ztk.kernels.launch.private` lists with the releases that it was tested with.
With other releases, or with the environment variable `ZTK_LAUNCH=public`, kernels are launched by Triton's public functions: the same programs,
5 to 15 microseconds of the host more per op.

From Hopper on the kernels of a decoding step are launched while the kernel before them still runs ([Note: Programmatic dependent launch] in
`ztk/kernels/launch/dependent.py`), norms and routes of training with them. They wait before their first access to memory: the report below
fails for one whose PTX or assembled code does not.

`python scripts/bench_launch.py` prints the host's microseconds per op, with a stand-in for what the driver does. Triton 3.9.0, torch
2.13.0, one core without other work, the least of 30 rounds, and of eight runs the median; launches are those of all the op's kernels. Before:
commit 4c59ab7, with launches that look at every argument and grids and constexprs that are computed per call, beside other work:

| op (kernels) | launches: Triton | `jit` | op: before | now | of it: its results |
| --- | ---: | ---: | ---: | ---: | ---: |
| `swiglu` (1) | 6.6 | 2.1 | 5.8 | 4.3 | 0.9 |
| `swiglu_backward` (1) | 7.3 | 2.4 | 7.3 | 5.5 | 1.8 |
| `rms_norm` (1) | 8.3 | 2.3 | 9.8 | 5.0 | 1.0 |
| `rms_norm` with residual (1) | 8.6 | 2.7 | 9.8 | 5.7 | 1.4 |
| `rms_norm_backward` (2) | 15.6 | 4.5 | 14.7 | 8.9 | 1.8 |
| `layer_norm` (1) | 9.1 | 2.7 | 17.1 | 5.7 | 1.4 |
| `layer_norm_backward` (2) | 16.8 | 5.1 | 25.8 | 11.5 | 3.6 |
| `rope` (1) | 10.0 | 2.3 | 20.4 | 5.7 | 1.0 |
| `attention` (1) | 11.0 | 2.5 | 17.1 | 5.8 | 1.0 |
| `attention_backward` (3) | 32.0 | 7.8 | 40.2 | 14.9 | 3.7 |
| `cross_entropy` (1) | 8.8 | 2.4 | 13.1 | 4.9 | 0.9 |
| `cross_entropy_backward` (1) | 8.3 | 2.4 | 10.9 | 5.3 | 0.9 |
| `moe_combine` (1) | 7.4 | 2.2 | 9.3 | 4.7 | 0.5 |
| `sum_of_squares` (2) | 12.4 | 3.6 | 9.0 | 5.9 | 0.9 |
| `adamw` (1) | 8.2 | 2.6 | 8.2 | 4.4 | 0.1 |
| `cast_copy` (1) | 6.9 | 2.0 | 6.9 | 3.6 | 0.1 |
| `cache_rows` (1) | 10.6 | 3.0 | 11.8 | 5.9 | 0.5 |
| `paged_attention` (1) | 11.9 | 2.8 | 14.6 | 5.9 | 0.5 |
| `linear_rows` (1) | 11.3 | 2.5 | 20.3 | 5.8 | 0.5 |
| `linear_rows`, few (1) | 9.7 | 2.4 | 18.0 | 5.5 | 0.5 |
| `draw_rows` (2) | 17.4 | 4.8 | 22.7 | 10.4 | 1.8 |
| `step_control` (1) | 7.9 | 2.5 | 7.2 | 3.7 | 0.1 |
| `quantize` (1) | 7.7 | 2.1 | 11.9 | 5.6 | 0.5 |
| `dequantize` (1) | 7.6 | 2.1 | 11.4 | 5.6 | 0.5 |
| `dequantize_reduce` (1) | 8.0 | 2.1 | 11.6 | 5.7 | 0.5 |
| `sharded_cross_entropy` (1) | 7.6 | 2.1 | 11.1 | 4.2 | 0.5 |
| `sharded_cross_entropy_join` (1) | 7.5 | 2.2 | 9.5 | 4.4 | 0.9 |
| `sharded_cross_entropy_backward` (1) | 7.8 | 2.4 | 9.5 | 4.0 | 0.1 |
| `segment_scan` (1) | 7.0 | 2.2 | 7.5 | 4.1 | 0.5 |
| `copy_blocks` (1) | 6.3 | 1.8 | 7.3 | 3.3 | 0.1 |
| `chosen_logprob` (1) | 8.6 | 2.3 | 6.1 | 5.9 | 0.9 |
| `adamw_8bit` (1) | 9.1 | 2.9 | 6.4 | 4.8 | 0.1 |

The last eleven, from `step_control` on, had a turn of their own: before is commit 63f2e2a, both in turn with nothing else running, of four runs
the median.

Each of these ops of one kernel takes less than 6, which was the goal; those of two and three kernels take 2.9 to 5.8 for each. What is left
of a launch is 0.13 for each tensor, the questions to Triton whether somebody looks, 0.2, and the call that starts the program, 0.5; the way to
the launcher is nine questions to torch, 0.4, and types of arguments, 1.0 to 1.3 in all; sizes, strides and dtypes are read once, 0.06 to
0.15 each, and looked up in 0.1 to 0.3; a result takes 1.0 by `torch.empty`, 0.8 by `empty_like`, and 0.4 to 0.5 by the function that
torch.compile's code calls, if its shape, strides and dtype are kept with the launch (`launch.memory`). The first call with new sizes takes
longer, `rms_norm`'s launcher 13 in place of 4: it goes the way of all arguments, and keeps what it finds. `rms_norm(x, weight)` without
gradients took 11.3 and takes 6.6, `swiglu(gate, up)` 7.9 and 6.5. The driver's own part, and what Triton's
launcher asks it about every address, are in none of these numbers.

The script prints the other ops, too. Routes take 11 for three kernels, where they took 32 before their launches were kept, losses of the router
5.6 for two (14), and chosen rows 5.9 (16). Products of experts take 6.0 (18.9), the common gradient of a pair 6.6 (20.0) and a weight's
gradient 5.2 (10.5), with 0.4 for a descriptor; by pointers 5.6 and 5.9. Where experts are divided over ranks the number
of rows changes from step to step: it is no part of what is kept but its bits, from which the grid follows, and a new number takes 6.5.
`quantize` and its inverses look at the packed rows as words and as scales, 0.7 for each view.

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aot", action="store_true", help="compile every kernel first")
    parser.add_argument("--ops", default="", help="with --aot: only ops whose name contains this")
    options = parser.parse_args()
    if options.aot:
        refresh_aot(options.ops)
    write()
