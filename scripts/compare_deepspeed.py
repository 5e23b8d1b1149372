"""Runs the same script, seed and data with DeepSpeed and with ztk, in fp32 at ZeRO stages 0 to 3, and compares losses and speed.

    python scripts/compare_deepspeed.py --deepspeed-python PATH [--rounds 3] [--steps 12] [--ranks 2]

PATH is an interpreter with deepspeed; it does not need ztk. The ranks of both sides start once and then train in turns, in alternating order,
with one thread per rank. Seconds per step are medians over rounds, of the slowest rank. Exit code 1 if a loss of any step differs by more than
1e-5. Appends rows to experiments/results/cpu/compare_deepspeed.jsonl.
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import ROOT, Worker, append_rows, parser_of, table
from ztk.deepspeed.names import SHIM

TOLERANCE = 1e-5
NAMES = ("DeepSpeed", "ztk")


class Side:
    """The ranks of DeepSpeed or of ztk, which wait for stages to train."""

    def __init__(self, name: str, *, interpreter: str, ranks: int, path: list[str]) -> None:
        self.name = name
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        environment = os.environ | world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(path)}
        self._ranks = [
            Worker(
                interpreter,
                Path(__file__).with_name("compare_rank.py"),
                environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=tempfile.gettempdir(),  # keeps the repository off the other interpreter's path
            )
            for rank in range(ranks)
        ]
        self.version = self._answers()[0]["version"]

    def train(self, **task) -> list[dict]:
        """Trains on all ranks and returns their results."""
        for rank in self._ranks:
            rank.send(**task)
        return self._answers()

    def _answers(self) -> list[dict]:
        try:
            return [rank.receive() for rank in self._ranks]
        except RuntimeError as error:
            raise SystemExit(f"{self.name} failed:\n{error}") from None

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def main() -> None:
    options = parse()
    console = Console(width=140)
    sides = start(options)
    console.print(
        f"DeepSpeed {sides[0].version}, ztk answering as {sides[1].version}, {options.ranks} gloo ranks, fp32"
    )
    measured: dict[tuple[str, int], list[list[dict]]] = {}
    for number in range(options.rounds):
        for stage in options.stages:
            for side in sides if number % 2 == 0 else reversed(sides):
                found = side.train(stage=stage, steps=options.steps, width=options.width, layers=options.layers)
                measured.setdefault((side.name, stage), []).append(found)
    for side in sides:
        side.close()
    rows = [summarise(stage, measured=measured, options=options) for stage in options.stages]
    console.print(shown(rows))
    append_rows("compare_deepspeed", rows, deepspeed=sides[0].version)
    far = [row["stage"] for row in rows if not row["largest_difference"] <= TOLERANCE]
    if far:
        sys.exit(f"losses differ by more than {TOLERANCE} at stages {far}")


def start(options: argparse.Namespace) -> list[Side]:
    return [
        Side("DeepSpeed", interpreter=options.deepspeed_python, ranks=options.ranks, path=[]),
        Side("ztk", interpreter=sys.executable, ranks=options.ranks, path=[str(SHIM), str(ROOT)]),
    ]


def summarise(stage: int, *, measured: dict, options: argparse.Namespace) -> dict[str, Any]:
    """Compares the losses of the first round, and the seconds per step of all rounds. CPU seconds are means over ranks."""
    theirs, ours = (measured[name, stage] for name in NAMES)
    pairs = zip(theirs[0], ours[0], strict=True)
    differences = [abs(a - b) for their, our in pairs for a, b in zip(their["losses"], our["losses"], strict=True)]

    def wall(rounds: list[list[dict]]) -> float:
        return statistics.median(max(rank["wall_seconds"] for rank in ranks) for ranks in rounds)

    def cpu(rounds: list[list[dict]]) -> float:
        return statistics.median(statistics.mean(rank["cpu_seconds"] for rank in ranks) for ranks in rounds)

    return {
        "stage": stage,
        "ranks": options.ranks,
        "rounds": options.rounds,
        "steps": options.steps,
        "parameters_width": options.width,
        "parameters_layers": options.layers,
        "largest_difference": max(differences),
        "last_loss": ours[0][0]["losses"][-1],
        "deepspeed_wall_seconds": wall(theirs),
        "ztk_wall_seconds": wall(ours),
        "deepspeed_cpu_seconds": cpu(theirs),
        "ztk_cpu_seconds": cpu(ours),
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    losses = ("stage", "largest loss difference", "last loss")
    seconds = ("DeepSpeed", "ztk", "ratio", "CPU DeepSpeed", "CPU ztk", "ratio")
    lines = []
    for row in rows:
        cells = [str(row["stage"]), f"{row['largest_difference']:.1e}", f"{row['last_loss']:.6f}"]
        for clock in ("wall", "cpu"):
            theirs, ours = row[f"deepspeed_{clock}_seconds"], row[f"ztk_{clock}_seconds"]
            cells += [f"{theirs:.4f}", f"{ours:.4f}", f"{theirs / ours:.2f}"]
        lines.append(cells)
    return table("seconds per step (medians), and how much faster ztk is", (*losses, *seconds), lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--deepspeed-python", metavar="PATH", required=True, help="an interpreter with deepspeed")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
