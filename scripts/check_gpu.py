"""Checks on one GPU, in at most ten minutes: bit identity, memory, the main job, overlap, speed and kernels.

    python scripts/check_gpu.py [--parts identity memory job overlap speed kernels] [--seconds 570]
    python scripts/check_gpu.py --dry-run        # the same code on a CPU with small models; writes nothing

identity: stages 0 to 3 on the device, in main memory and on disk train to the same bits, without torch's deterministic mode. A host optimizer
    agrees within rounding. In a world of one, NCCL's collectives return the CPU's results.
memory: model state from the CUDA allocator's counters, compared with the ledger and the formula of the ZeRO paper.
job: the main job, `python run.py`; its held-out loss must be below the text's byte-bigram entropy.
overlap: from a trace, the hidden share of the copies of `offload=cpu`, and the step compared with its longest part, computing or copying. At
    stage 3 the step may take 10 % more.
speed: tokens/s and model FLOP utilisation of a 1B model in bf16, compared with plain PyTorch and FSDP2.
kernels: `scripts/bench_kernels.py` in the remaining time.

Each item runs in its own process, so that a failure affects one row. Writes experiments/results/GPU/check_gpu.json. Exit code 1 if a check
fails. Without a GPU and without --dry-run the script prints a message and ends. For several ranks use `scripts/check_gpus.py`.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.results import commit_of, folder_of
from scripts.time_limit import GRACE_SECONDS
from tests.kernels.aot.case import TARGETS
from ztk.core.launch import allocator_settings

REPOSITORY = Path(__file__).resolve().parents[1]
JUDGED_STEPS = 100
OVERLAP_GOAL = 1.10  # step of `stage3 offload=cpu` / its longest part, computing or copying
IMPORT_SECONDS = 20.0  # until the kernel benchmark starts its own clock
TIERS = ("none", "cpu", "nvme")
PRECISIONS = ("fp32", "bf16", "fp16")
CONTENDERS = ("plain", "plain+kernels", "fsdp2", "ztk0", "ztk3", "ztk2+cpu")
ITEM = str(Path(__file__).with_name("gpu_item.py"))


def main() -> int:
    options = parse()
    if not torch.cuda.is_available() and not options.dry_run:
        print("check_gpu: no GPU is visible to torch; nothing to check")
        return 0
    dry, console, deadline = options.dry_run, Console(width=130), time.monotonic() + options.seconds
    report: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **device(dry=dry),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit_of(REPOSITORY),
    }
    console.print(report)
    failures: list[str] = []
    for part in options.parts:
        started = time.monotonic()
        rows = {item: run(item, deadline=deadline, dry=dry) for item in items(part)}
        report[part] = rows
        failures += [f"{item}: {row['error']}" for item, row in rows.items() if "error" in row]
        good = {item: row for item, row in rows.items() if "error" not in row}
        console.print(TABLES[part](good))
        console.print(f"{part}: {time.monotonic() - started:.0f} s")
        failures += FAILURES[part](good)
        if not dry:
            write(report, folder=options.to)  # after every part, so that a crash keeps the results so far
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print("FAILED" if failures else "all checks passed")
    return int(bool(failures))


def device(*, dry: bool) -> dict[str, object]:
    """The GPU's name and kind, and the target whose kernels were compiled ahead of time for it."""
    if dry:
        return {"gpu": "none", "target": "none"}
    major, minor = torch.cuda.get_device_capability()
    target = torch.cuda.get_device_properties(0).gcnArchName if torch.version.hip else f"sm_{major}{minor}"
    return {"gpu": torch.cuda.get_device_name(), "target": target, "compiled_ahead": target.startswith(TARGETS)}


def items(part: str) -> list[str]:
    """The processes of a part, as arguments of `gpu_item.py`."""
    match part:
        case "identity":
            return ["nccl", *(f"identity {precision}" for precision in PRECISIONS)]
        case "memory":
            return [
                f"memory {stage} {tier}"
                for stage, tier in ((0, "none"), (1, "none"), (3, "none"), (2, "cpu"), (3, "cpu"))
            ]
        case "overlap":
            return ["overlap ztk3+cpu", "overlap ztk2+cpu"]
        case "job" | "kernels":
            return [part]
        case "speed":
            return [f"speed {contender}" for contender in CONTENDERS]
    raise AssertionError(part)


def run(item: str, *, deadline: float, dry: bool) -> dict:
    """Runs an item. Returns its result, which most items print as their last line, or {"error": ...}."""
    left = deadline - time.monotonic()
    if left < (IMPORT_SECONDS + 2 * GRACE_SECONDS if item == "kernels" else 15):
        return {"error": "no time left, raise --seconds"}
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(item, folder=folder, left=left, dry=dry)
        # The allocator settings of a rank that ztk starts.
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **allocator_settings(), "PYTHONPATH": path}
        limit = left if item == "kernels" else min(left, 240)
        try:
            done = subprocess.run(
                command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return {"error": "did not end in time"}
        if done.returncode:
            return {"error": (done.stderr or done.stdout)[-1500:]}
        if item == "job":
            summary = json.loads(Path(folder, "summary.json").read_text())
            return {
                key: value for key, value in summary.items() if key != "error"
            }  # the command succeeded, so no error
        if item == "kernels":
            return {"lines": done.stdout.splitlines()}
        return json.loads(done.stdout.splitlines()[-1])


def command_of(item: str, *, folder: str, left: float, dry: bool) -> list[str]:
    """The command line of an item. left: its time limit in seconds."""
    if item == "kernels":
        # After its minutes the benchmark writes rows, picture and page; a hanging one is killed.
        minutes = (left - IMPORT_SECONDS - GRACE_SECONDS) / 60
        options = ["--dry-run", "--ops", "cross_entropy"] if dry else []
        return [
            sys.executable,
            str(REPOSITORY / "scripts" / "bench_kernels.py"),
            "--minutes",
            f"{minutes:.2f}",
            *options,
        ]
    if item == "job":
        small = ["launch.device=cpu", "train.steps=2", "train.eval_batches=1"] if dry else ["launch.device=cuda"]
        words = ["launch.ranks=1", "logger=disabled", f"hydra.run.dir={folder}", *small]
        return [sys.executable, str(REPOSITORY / "run.py"), *words]
    return [sys.executable, ITEM, *item.split(), "--device", "cpu" if dry else "cuda"]


def memory_failures(rows: dict[str, dict]) -> list[str]:
    return [f"{item}: the allocator's number differs" for item, row in rows.items() if not row["agrees"]]


def job_failures(rows: dict[str, dict]) -> list[str]:
    """The held-out loss must be below the byte-bigram entropy. Runs of a few steps are not checked."""
    row = rows.get("job")
    if row is None or row["steps"] < JUDGED_STEPS or row["validation_loss"] < row["bigram_entropy"]:
        return []
    return [f"job: held-out loss {row['validation_loss']:.4f}, the byte-bigram entropy is {row['bigram_entropy']:.4f}"]


def overlap_failures(rows: dict[str, dict]) -> list[str]:
    """Checks the step of stage 3. A dry run has no GPU trace."""
    row = rows.get("overlap ztk3+cpu")
    if row is None or row["of_longest"] is None or row["of_longest"] <= OVERLAP_GOAL:
        return []
    times = ", ".join(f"{key} {1e3 * row[key]:.1f}" for key in ("step", "compute", "to_device", "from_device", "wire"))
    return [
        f"overlap ztk3+cpu: a step takes {row['of_longest']:.2f} of its longest part, goal {OVERLAP_GOAL} (ms: {times})"
    ]


def no_failures(rows: dict[str, dict]) -> list[str]:
    return []


def identity_failures(rows: dict[str, dict]) -> list[str]:
    failures = []
    for item, row in rows.items():
        if item == "nccl":
            continue
        for where in ("device", "host"):
            digests = {
                digest for layout, digest in row["digests"].items() if layout.endswith("none") == (where == "device")
            }
            if len(digests) != 1:
                failures.append(f"{item}: {len(digests)} different digests with the optimizer on the {where}")
        if row["host_difference"] > row["tolerance"]:
            failures.append(f"{item}: losses with a host optimizer differ by {row['host_difference']:.1e} relative")
    return failures


def identity_table(rows: dict[str, dict]) -> Table:
    made = Table(title="digests of losses and weights; 20 steps on one GPU, Triton kernels")
    for heading in ("", *(f"stage {stage}, {tier}" for tier in TIERS for stage in range(4)), "host differs by"):
        made.add_column(heading)
    for item, row in rows.items():
        if item != "nccl":
            digests = (row["digests"][f"{stage} {tier}"][:6] for tier in TIERS for stage in range(4))
            made.add_row(item.removeprefix("identity "), *digests, f"{row['host_difference']:.1e}")
    return made


def memory_table(rows: dict[str, dict]) -> Table:
    made = Table(title="bf16: MB on the device after a step")
    keys = ("parameters", "gradients", "optimizer", "buffers", "ledger", "allocator", "formula")
    for heading in ("stage and tier", *keys, "agrees"):
        made.add_column(heading, justify="right")
    for item, row in rows.items():
        numbers = ("-" if row[key] is None else f"{row[key] / 1e6:.2f}" for key in keys)
        made.add_row(item.removeprefix("memory "), *numbers, str(row["agrees"]))
    return made


def speed_table(rows: dict[str, dict]) -> Table:
    shape = next(iter(rows.values()), None)
    made = Table(title=f"bf16, batch {shape['micro_batch']} x {shape['seq_len']}" if shape else "speed")
    for heading in ("", "tokens/s", "ms/step", "MFU", "of measured matmul", "peak GB", "loss"):
        made.add_column(heading, justify="right")
    for item, row in rows.items():
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "unknown GPU"
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        made.add_row(
            item.removeprefix("speed "),
            f"{row['tokens_per_second']:.0f}",
            f"{row['step_seconds'] * 1e3:.1f}",
            mfu,
            f"{row['of_matmul']:.1%}",
            peak,
            f"{row['loss']:.4f}",
        )
    return made


def overlap_table(rows: dict[str, dict]) -> Table:
    made = Table(title="ms of a step, from a trace")
    keys = ("step", "compute", "to_device", "from_device", "wire")
    for heading in ("", *keys, "hidden", f"step / longest (goal of stage 3: {OVERLAP_GOAL:.2f})"):
        made.add_column(heading, justify="right")
    for item, row in rows.items():
        hidden = "-" if row["hidden"] is None else f"{row['hidden']:.1%}"
        ratio = "-" if row["of_longest"] is None else f"{row['of_longest']:.2f}"
        made.add_row(item.removeprefix("overlap "), *(f"{1e3 * row[key]:.1f}" for key in keys), hidden, ratio)
    return made


def job_table(rows: dict[str, dict]) -> Table:
    made = Table(title="the main job, one rank")
    keys = ("steps", "first_loss", "final_loss", "validation_loss", "bigram_entropy", "tokens_per_second")
    for heading in keys:
        made.add_column(heading, justify="right")
    for row in rows.values():
        made.add_row(*("-" if row.get(key) is None else f"{row[key]:.5g}" for key in keys))
    return made


def kernels_table(rows: dict[str, dict]) -> Table:
    made = Table(title="kernels")
    made.add_column("as bench_kernels.py prints it")
    for row in rows.values():
        for line in row["lines"]:
            made.add_row(line)
    return made


def write(report: dict[str, object], *, folder: Path | None = None) -> None:
    folder = folder or folder_of(str(report["gpu"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check_gpu.json").write_text(json.dumps(report, indent=1) + "\n")


PARTS = ("identity", "memory", "job", "overlap", "speed", "kernels")
TABLES = {
    "identity": identity_table, "memory": memory_table, "job": job_table, "overlap": overlap_table, "speed": speed_table,
    "kernels": kernels_table,
}  # fmt: skip
FAILURES = {
    "identity": identity_failures, "memory": memory_failures, "job": job_failures, "overlap": overlap_failures,
    "speed": no_failures, "kernels": no_failures,
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--seconds", type=float, default=570, help="items that do not start within this time fail")
    parser.add_argument("--to", type=Path, help="folder of the result (default: experiments/results/GPU)")
    parser.add_argument("--dry-run", action="store_true", help="small models on the CPU; nothing is written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
