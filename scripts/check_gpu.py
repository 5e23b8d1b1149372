"""On a machine with a GPU: bit identity, memory and speed with the Triton kernels, in under nine minutes.

    python scripts/check_gpu.py [--parts identity memory speed] [--seconds 500]

identity: stages 0 to 3 on the device, in main memory and on disk train to the same bits; an optimizer on the host agrees within
    rounding. In a world of one, NCCL's collectives give the CPU's results.
memory: model state by the CUDA allocator's own counters, beside the ledger and the formula of the ZeRO paper.
speed: tokens/s and model FLOP utilisation of a model of 1B parameters in bf16 beside plain PyTorch and FSDP2.

Each item runs in its own process, so that a failure affects one row. Writes experiments/results/GPU/check_gpu.json; exit code 1
if a check fails. Without a GPU it prints a message and does nothing.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
TIERS = ("none", "cpu", "nvme")
PRECISIONS = ("fp32", "bf16", "fp16")
CONTENDERS = ("plain", "plain+kernels", "fsdp2", "ztk0", "ztk3", "ztk2+cpu")
ITEM = str(Path(__file__).with_name("gpu_item.py"))


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("check_gpu: no GPU is visible to torch; nothing to check")
        return 0
    console, deadline = Console(width=130), time.monotonic() + options.seconds
    report: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    failures: list[str] = []
    for part in options.parts:
        rows = {item: run(item, deadline=deadline) for item in items(part)}
        report[part] = rows
        failures += [f"{item}: {row['error']}" for item, row in rows.items() if "error" in row]
        good = {item: row for item, row in rows.items() if "error" not in row}
        console.print({"identity": identity_table, "memory": memory_table, "speed": speed_table}[part](good))
        if part == "identity":
            failures += identity_failures(good)
        if part == "memory":
            failures += [f"{item}: the allocator's number differs" for item, row in good.items() if not row["agrees"]]
    write(report)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print("FAILED" if failures else "all checks passed")
    return int(bool(failures))


def items(part: str) -> list[str]:
    """The processes of a part, by the arguments they take."""
    match part:
        case "identity":
            return ["nccl", *(f"identity {precision}" for precision in PRECISIONS)]
        case "memory":
            return [
                f"memory {stage} {tier}"
                for stage, tier in ((0, "none"), (1, "none"), (3, "none"), (2, "cpu"), (3, "cpu"))
            ]
        case "speed":
            return [f"speed {contender}" for contender in CONTENDERS]
    raise AssertionError(part)


def run(item: str, *, deadline: float) -> dict:
    """The item's answer: the last line that its process prints, or {"error": ...}."""
    left = deadline - time.monotonic()
    if left < 15:
        return {"error": "no time left, raise --seconds"}
    # cuBLAS sums in one order only with a workspace of fixed size.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, ITEM, *item.split()]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=min(left, 240))
    except subprocess.TimeoutExpired:
        return {"error": "did not end in time"}
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    return json.loads(done.stdout.splitlines()[-1])


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
    made = Table(title="100M parameters in bf16: MB on the device after a step")
    keys = ("parameters", "gradients", "optimizer", "buffers", "ledger", "allocator", "formula")
    for heading in ("stage and tier", *keys, "agrees"):
        made.add_column(heading, justify="right")
    for item, row in rows.items():
        made.add_row(item.removeprefix("memory "), *(f"{row[key] / 1e6:.1f}" for key in keys), str(row["agrees"]))
    return made


def speed_table(rows: dict[str, dict]) -> Table:
    shape = next(iter(rows.values()), None)
    made = Table(
        title=f"1B parameters in bf16, batch {shape['micro_batch']} x {shape['seq_len']}" if shape else "speed"
    )
    for heading in ("", "tokens/s", "ms/step", "MFU", "of measured matmul", "peak GB", "loss"):
        made.add_column(heading, justify="right")
    for item, row in rows.items():
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "unknown GPU"
        made.add_row(
            item.removeprefix("speed "),
            f"{row['tokens_per_second']:.0f}",
            f"{row['step_seconds'] * 1e3:.1f}",
            mfu,
            f"{row['of_matmul']:.1%}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            f"{row['loss']:.4f}",
        )
    return made


def write(report: dict[str, object]) -> None:
    folder = REPOSITORY / "experiments" / "results" / str(report["gpu"]).lower().replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check_gpu.json").write_text(json.dumps(report, indent=1) + "\n")


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("identity", "memory", "speed")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument(
        "--seconds", type=float, default=500, help="items that cannot start in this time are reported as failed"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
