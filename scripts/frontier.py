"""Plots reward over KL divergence of the alignment methods, with the largest reward that a divergence allows.

    python scripts/frontier.py --work FOLDER                       all methods: about ten minutes on two cores
    python scripts/frontier.py --work FOLDER --methods grpo dpo --steps 150 --jobs 1

Every method starts from the same policy (`warm_start`) and trains on the sorting task, whose rewards are exact. Writes FOLDER/frontier.png and
.svg, and FOLDER/frontier.csv with method, step, kl (nats per answer), reward, most (the largest reward of that divergence) and least (the
smallest divergence of that reward). Runs are in FOLDER/METHOD. GRPO and its variants are measured on their training answers, over WINDOW
steps; DPO answers prompts of its own evaluation.

`most` is the closed form of `ztk.rl.align.Frontier` over prompts that training does not use.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of
from ztk.config import Config, Machine, compose
from ztk.experiments.least_divergence import frontier_of
from ztk.experiments.models import build, warm_start
from ztk.experiments.ranks import started
from ztk.report.folder import read_rows
from ztk.report.status import read_summary
from ztk.rl.align import Frontier

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 10  # steps per point: 1,280 answers, so that the standard error of a reward is at most 0.014
BETAS = "optimizer.betas=[0.9,0.95]"
COMMON = ("launch.ranks=1", "launch.device=cpu", "logger=disabled", "scheduler.warmup_steps=0", BETAS)
PAIRS = ("task=dpo", "dpo.beta=0.5", "dpo.length_normalised=false")
WITH_SFT = (*PAIRS, "dpo.sft_weight=1")
METHODS = {  # name -> choices
    "grpo": ("task=grpo",),
    "dr_grpo": ("task=grpo", "algorithm=dr_grpo"),
    "dapo": ("task=grpo", "algorithm=dapo"),
    "gspo": ("task=grpo", "algorithm=gspo"),
    "cispo": ("task=grpo", "algorithm=cispo"),
    "rloo": ("task=grpo", "algorithm=rloo"),
    "ppo": ("task=ppo",),
    "dpo": WITH_SFT,
    "ipo": (*WITH_SFT, "dpo.loss=ipo"),
    "hinge": (*WITH_SFT, "dpo.loss=hinge"),
    "dpo without sft": (*PAIRS, "dpo.sft_weight=0"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """kl: nats per answer. most: the largest reward of this divergence. least: the smallest divergence of this reward."""

    method: str
    step: int
    kl: float
    reward: float
    most: float
    least: float


def main(arguments: Sequence[str] | None = None) -> list[Point]:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for runs and results; finished runs with the same overrides are reused",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps per run")
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs, each with one thread")
    parser.add_argument("overrides", nargs="*", help="overrides for every run, such as model.dim=64")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    machine = Machine(gpus=0, cores=1)
    frontier = first_frontier(compose(*common(given), "task=grpo", output_dir=str(given.work), machine=machine))
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda method: run(method, given=given), given.methods))
    points = [
        Point(method=method, step=step, kl=kl, reward=reward, most=frontier.most(kl), least=frontier.least(reward))
        for method, measured in zip(given.methods, found, strict=True)
        for step, kl, reward in measured
    ]
    write(points, to=given.work / "frontier.csv")
    draw(points, frontier=frontier, to=given.work / "frontier.png")
    for method in given.methods:
        last = [point for point in points if point.method == method][-1]
        ratio = f", spent {last.kl / last.least:.2f} times" if last.least > 0 else ""
        print(
            f"{method:>16}: reward {last.reward:.3f} at {last.kl:.2f} nats; the most there is {last.most:.3f}; the least for this reward "
            f"{last.least:.2f}{ratio}"
        )
    print(f"{given.work / 'frontier.csv'}, {given.work / 'frontier.png'}")
    return points


def common(given: argparse.Namespace) -> tuple[str, ...]:
    """The choices of every run."""
    return (*COMMON, f"train.steps={given.steps}", *given.overrides)


def first_frontier(config: Config) -> Frontier:
    """The frontier of the common first policy. Raises ValueError if its answers are all correct or all wrong."""
    with started(config) as process:
        engine = build(config, process=process, values=warm_start(config, process=process), is_trained=False)
        found = frontier_of(engine, config=config)
        engine.close()
    return found


def run(method: str, *, given: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Runs a method. Returns (step, kl, reward) rows. Raises RuntimeError with the end of the output if the run fails."""
    folder = (given.work / method.replace(" ", "_")).resolve()
    every = ("train.eval_every=5",) if "task=dpo" in METHODS[method] else ()
    words = (*METHODS[method], *every, *common(given))
    if not is_done(folder, words=words):
        command = [sys.executable, str(ROOT / "run.py"), *words, f"hydra.run.dir={folder}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{method}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return measured(folder)


def is_done(folder: Path, *, words: Sequence[str]) -> bool:
    """Whether the folder has a successful run with these overrides."""
    recorded = folder / "overrides.json"
    if read_summary(folder).get("status") != "done" or not recorded.is_file():
        return False
    return json.loads(recorded.read_text()) == {key: value for key, _, value in (word.partition("=") for word in words)}


def measured(folder: Path) -> list[tuple[int, float, float]]:
    """(step, kl, reward) rows: means over windows of steps for GRPO and PPO, evaluations for DPO."""
    rows = [row for row in read_rows(folder) if row.get("reward") is not None]
    if "rollout_differing" in rows[0]:
        windows = [rows[first : first + WINDOW] for first in range(0, len(rows), WINDOW)]
        return [(window[-1]["step"], _mean(window, "kl"), _mean(window, "reward")) for window in windows]
    summary = json.loads((folder / "summary.json").read_text())
    return [(row["step"], row["kl"], row["reward"]) for row in rows] + [
        (summary["steps"], summary["kl"], summary["reward"])
    ]


def _mean(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def write(points: list[Point], *, to: Path) -> None:
    """Writes a line per point."""
    with to.open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(Point.__dataclass_fields__))
        table.writeheader()
        table.writerows(asdict(point) for point in points)


def draw(points: list[Point], *, frontier: Frontier, to: Path) -> None:
    """Draws a line per method and the largest possible reward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    right = 1.05 * max(point.kl for point in points)
    shown = frontier.kl <= right
    axes.plot(frontier.kl[shown], frontier.reward[shown], color="black", linewidth=2, label="the most (closed form)")
    for method in dict.fromkeys(point.method for point in points):
        own = [point for point in points if point.method == method]
        axes.plot([point.kl for point in own], [point.reward for point in own], marker="o", markersize=4, label=method)
    axes.set(
        xlabel="KL divergence to the first policy, nats per answer",
        ylabel="mean reward of sampled answers",
        xlim=(0, right),
    )
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(to, dpi=120)
    figure.savefig(to.with_suffix(".svg"))


if __name__ == "__main__":
    main()
