"""Compares a training step of ztk at every stage and tier with DDP, FSDP2 and DeepSpeed: same model, data and ranks.

    python scripts/bench_engine.py [--model 30m] [--modules ztk] [--dtype fp32] [--rounds 3] [--deepspeed-python PATH]

All candidates train a model with the same parameters, first values and function. `--modules` chooses its layers. `ztk`: ztk's layers for
everybody, so that only the engines differ. `torch`: torch's layers (`plain_decoder.py`), as in an existing DDP script, with
`ztk.parallelize(fast_linear=True)`, which replaces the products of linear layers by ztk's. `own`: ztk's layers for ztk, torch's for `compute`
and the peers, so that kernels count as well.

Each round runs all candidates once, in another order, in fresh processes with one thread per rank. The numbers are medians over rounds. On a
shared machine, compare CPU seconds and ratios, not wall time. `ratio` is the ratio of tokens/s to the best peer with the same stage and tier,
`cpu ratio` the same ratio of CPU seconds; above 1 ztk is faster. `of compute` divides the CPU time by the time of forward, backward and AdamW
alone. `MB` is the largest resident set, `Pss MB` the proportional set of rank 0 while gradients exist. ztk keeps freed memory
(`ztk.core.runtime.host_memory`, about 4 %); torch's and DeepSpeed's candidates run with their defaults.
Appends rows to experiments/results/cpu/engine.jsonl.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import ROOT, Worker, append_rows, parser_of, rotated, table

TORCH = ["compute", "ddp", "zro", "fsdp2-keep", "fsdp2"]
ZTK = [f"ztk{stage}" for stage in range(4)]
ZTK_OFFLOAD = [f"ztk{stage}+{tier}" for tier in ("cpu", "nvme") for stage in (1, 2, 3)]
DEEPSPEED = [
    "deepspeed0",
    "deepspeed1",
    "deepspeed2",
    "deepspeed3",
    "deepspeed2+cpu",
    "deepspeed3+cpu",
    "deepspeed3+nvme",
]
# Torch's peers, with the stages and tiers of ztk that they correspond to.
TORCH_STAGES = {"ddp": "0", "zro": "1", "fsdp2-keep": "2", "fsdp2": "3"}


def worker(interpreter: str) -> Worker:
    """An interpreter that has imported torch and forks ranks on demand. See `bench_rank.py`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return Worker(interpreter, Path(__file__).with_name("bench_rank.py"), environment=environment)


Row = dict[str, Any]  # a candidate's medians; ratios are None without a peer


def main() -> None:
    options = parse()
    console, deadline = Console(stderr=True, width=140), time.monotonic() + options.seconds
    workers = {"ztk": worker(sys.executable)}
    if options.deepspeed_python:
        workers["deepspeed"] = worker(options.deepspeed_python)
    keys = ("model", "modules", "dtype", "ranks", "warmup", "steps", "micro_batch", "seq_len")
    task = {key: getattr(options, key) for key in keys}
    measured: dict[str, list[dict]] = {candidate: [] for candidate in options.candidates}
    with tempfile.TemporaryDirectory(prefix="ztk-bench-", dir=options.nvme_path) as folder:
        for number in range(options.rounds):
            shift = number * max(1, len(options.candidates) // options.rounds)
            for candidate in rotated(options.candidates, by=shift):
                if time.monotonic() > deadline:
                    break
                used = workers["deepspeed" if candidate.startswith("deepspeed") else "ztk"]
                used.send(candidate=candidate, nvme_path=folder, **task)
                try:
                    result = used.receive()
                except RuntimeError as error:
                    result = str(error)
                if isinstance(result, str):
                    console.print(f"{candidate} failed:\n{result}", style="red", markup=False)
                    continue
                measured[candidate].append(result)
                console.print(f"round {number + 1}: {candidate} {result['cpu_seconds']:.3f} CPU s", style="dim")
    for used in workers.values():
        used.close()
    rows = summarise({name: runs for name, runs in measured.items() if runs}, options=options)
    console.print(shown(rows, options=options))
    append_rows("engine", rows, torch=torch.__version__)


def summarise(measured: dict[str, list[dict]], *, options: argparse.Namespace) -> list[Row]:
    """Medians over rounds, and the ratio of each ztk candidate to its best peer."""

    def median(candidate: str, key: str) -> float:
        return statistics.median(run[key] for run in measured[candidate])

    rows = []
    for candidate, runs in measured.items():
        peers = [other for other in measured if is_peer(other, of=candidate)]
        fastest = min(peers, key=lambda peer: median(peer, "wall_seconds"), default=None)
        thriftiest = min(peers, key=lambda peer: median(peer, "cpu_seconds"), default=None)
        cpu, wall = median(candidate, "cpu_seconds"), median(candidate, "wall_seconds")
        rows.append({
            "candidate": candidate,
            **{key: getattr(options, key) for key in ("model", "modules", "dtype", "ranks")},
            "rounds": len(runs),
            "wall_seconds": wall,
            "cpu_seconds": cpu,
            "tokens_per_second": options.ranks * options.micro_batch * options.seq_len / wall,
            "peak_resident_bytes": int(median(candidate, "peak_resident_bytes")),
            "proportional_bytes": int(median(candidate, "proportional_bytes")),
            "loss": runs[0]["loss"],
            "best_peer": thriftiest,
            "tokens_ratio": median(fastest, "wall_seconds") / wall if fastest else None,
            "cpu_ratio": median(thriftiest, "cpu_seconds") / cpu if thriftiest else None,
            "of_compute": cpu / median("compute", "cpu_seconds") if "compute" in measured else None,
        })  # fmt: skip
    return rows


def is_peer(other: str, *, of: str) -> bool:
    """Whether `other` is a peer with the stage and tier of ztk's candidate `of`."""
    if not of.startswith("ztk") or other.startswith("ztk"):
        return False
    wanted = of.removeprefix("ztk")
    return TORCH_STAGES.get(other, other.removeprefix("deepspeed")) == wanted


def shown(rows: list[Row], *, options: argparse.Namespace) -> Table:
    title = (
        f"{options.model} of {options.modules} layers, {options.dtype}, {options.ranks} ranks, "
        f"batch {options.micro_batch} x {options.seq_len}, "
        f"medians of up to {options.rounds} rounds of {options.steps} steps"
    )
    seconds = ("wall s/step", "CPU s/step/rank", "tokens/s", "of compute")
    columns = ("candidate", *seconds, "best peer", "ratio", "cpu ratio", "MB", "Pss MB", "loss")
    lines = []
    for row in rows:
        of, ratio, cpu = (f"{row[key]:.2f}" if row[key] else "" for key in ("of_compute", "tokens_ratio", "cpu_ratio"))
        speed = (f"{row['wall_seconds']:.3f}", f"{row['cpu_seconds']:.3f}", f"{row['tokens_per_second']:.0f}")
        memory = (f"{row[key] / 1e6:.0f}" for key in ("peak_resident_bytes", "proportional_bytes"))
        rest = (ratio, cpu, *memory, f"{row['loss']:.5f}")
        lines.append((row["candidate"], *speed, of, row["best_peer"] or "", *rest))
    return table(title, columns, lines, left=("candidate", "best peer"))


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="30m", choices=("tiny", "30m"))
    parser.add_argument(
        "--modules", default="ztk", choices=("ztk", "torch", "own"), help="library of the model's layers"
    )
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per candidate and round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=450, help="start no measurement after this time")
    parser.add_argument("--candidates", nargs="+", help="default: all")
    parser.add_argument(
        "--deepspeed-python", metavar="PATH", help="an interpreter that can import deepspeed, triton and einops"
    )
    parser.add_argument(
        "--nvme-path", metavar="FOLDER", help="folder for offload files (default: the temporary folder)"
    )
    options = parser.parse_args()
    everybody = [*TORCH, *ZTK, *ZTK_OFFLOAD, *(DEEPSPEED if options.deepspeed_python else [])]
    options.candidates = options.candidates or everybody
    for candidate in options.candidates:
        if candidate not in everybody:
            parser.error(f"--candidates {candidate}: must be among {' '.join(everybody)}")
    return options


if __name__ == "__main__":
    main()
