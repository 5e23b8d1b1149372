"""Checks on two or more GPUs: bit identity, communication volume, overlap, and speed compared with FSDP2 and DDP.

    python scripts/check_gpus.py [--ranks N] [--parts identity volume overlap speed] [--seconds 570]
    python scripts/check_gpus.py --dry-run       # two ranks on the CPU with small models, over gloo; writes nothing

identity: stages 0 to 3, and states in main memory, train to the same bits on the same ranks.
volume: bytes per step that a rank's collectives count: 2 per model parameter at stages 0 to 2, 3 at stage 3, in units of a parameter's size.
overlap: from rank 0's trace, the hidden share of the collectives, and the step compared with its longest part, computing or moving.
speed: tokens/s per rank, compared with FSDP2 and DDP that reduce gradients in the same dtype.

With one GPU the ranks share it, and their collectives use gloo through main memory. Identity and volume then hold as well; FSDP2 and DDP are
left out. Writes experiments/results/GPU/check_gpus.json. Exit code 1 if a check fails.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.results import folder_of

REPOSITORY = Path(__file__).resolve().parents[1]
RANK = str(Path(__file__).with_name("gpus_rank.py"))
PARTS = ("identity", "volume", "overlap", "speed")
PRECISIONS = ("fp32", "bf16")
VOLUME = {"0": 2, "1": 2, "2": 2, "3": 3}
PADDING = 0.02  # share of padding in the smallest model's buffers
ITEM_SECONDS = 240.0


def main() -> int:
    options = parse()
    gpus = torch.cuda.device_count()
    if not gpus and not options.dry_run:
        print("check_gpus: no GPU is visible to torch; nothing to check")
        return 0
    dry = options.dry_run
    ranks = options.ranks or (max(2, gpus) if not dry else 2)
    shared = dry or gpus < ranks
    console, deadline = Console(width=130), time.monotonic() + options.seconds
    name = "none" if dry else torch.cuda.get_device_name()
    report: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": name,
        "gpus": gpus,
        "ranks": ranks,
        "collectives": "gloo through main memory" if shared else "nccl",
        "torch": torch.__version__,
    }
    console.print(report)
    failures: list[str] = []
    for part in options.parts:
        rows = {
            item: run(item, ranks=ranks, shared=shared, deadline=deadline, dry=dry)
            for item in items(part, shared=shared)
        }
        report[part] = rows
        failures += [f"{item}: {row['error']}" for item, row in rows.items() if "error" in row]
        good = {item: row for item, row in rows.items() if "error" not in row}
        console.print(table(part, rows=good))
        failures += CHECKS[part](good)
        if not dry:
            folder = folder_of(name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "check_gpus.json").write_text(json.dumps(report, indent=1) + "\n")
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print("FAILED" if failures else "all checks passed")
    return int(bool(failures))


def items(part: str, *, shared: bool) -> list[str]:
    match part:
        case "identity":
            return [f"identity {precision}" for precision in PRECISIONS]
        case "volume":
            return ["volume"]
        case "overlap":
            return [f"overlap {contender}" for contender in ("ztk1", "ztk3", "ztk3+cpu")]
        case "speed":
            return [
                f"speed {contender}" for contender in ("ztk0", "ztk1", "ztk3", *(() if shared else ("fsdp2", "ddp")))
            ]
    raise AssertionError(part)


def run(item: str, *, ranks: int, shared: bool, deadline: float, dry: bool) -> dict:
    """The JSON of the item's rank 0, or {"error": ...}."""
    left = min(ITEM_SECONDS, deadline - time.monotonic())
    if left < 15:
        return {"error": "no time left, raise --seconds"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answer.json")
        command = [sys.executable, RANK, *item.split(), "--ranks", str(ranks), "--out", str(out)]
        command += ["--device", "cpu" if dry else "cuda", *(["--shared"] if shared else [])]
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        log = Path(folder, "log")
        with log.open("w") as file:
            child = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=file, stderr=file)
            try:
                code = child.wait(timeout=left)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGTERM)  # the handler ends the ranks
                child.wait()
                return {"error": f"did not end in {left:.0f} s"}
        return json.loads(out.read_text()) if code == 0 and out.exists() else {"error": log.read_text()[-1500:]}


def identity_failures(rows: dict[str, dict]) -> list[str]:
    """States on the device must have one digest, and so must states in main memory, which the CPU updates."""
    found = []
    for item, row in rows.items():
        for tier in ("none", "cpu"):
            digests = {digest for layout, digest in row["digests"].items() if layout.endswith(tier)}
            if len(digests) != 1:
                found.append(f"{item}: {len(digests)} different digests with tier {tier}")
    return found


def volume_failures(rows: dict[str, dict]) -> list[str]:
    counted = rows.get("volume", {}).get("counted", {})
    return [
        f"volume: stage {stage} moves {value:.3f} times the parameters, not {VOLUME[stage]}"
        for stage, value in counted.items()
        if not VOLUME[stage] <= value <= VOLUME[stage] * (1 + PADDING)
    ]


CHECKS: dict[str, Callable[[dict[str, dict]], list[str]]] = {
    "identity": identity_failures, "volume": volume_failures, "overlap": lambda rows: [], "speed": lambda rows: [],
}  # fmt: skip


def table(part: str, *, rows: dict[str, dict]) -> Table:
    """A row per item. Digests are abbreviated, numbers have four digits."""
    made = Table(title=part)
    flat = {item: next(iter(row.values())) if part in ("identity", "volume") else row for item, row in rows.items()}
    columns = list(next(iter(flat.values()), {}))
    for heading in ("", *columns):
        made.add_column(heading, justify="right")
    for item, row in flat.items():
        made.add_row(item, *(_text(row.get(column)) for column in columns))
    return made


def _text(value: object) -> str:
    if isinstance(value, str):
        return value[:6]
    return "-" if value is None else f"{value:.4g}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: one per GPU, two on one GPU")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--seconds", type=float, default=570, help="items that do not start within this time fail")
    parser.add_argument("--dry-run", action="store_true", help="two ranks on the CPU; nothing is written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
