"""Reward over KL divergence of the methods that align a policy, beside the most reward that a divergence can buy.

    python scripts/frontier.py --work FOLDER                       all methods: about ten minutes on two cores
    python scripts/frontier.py --work FOLDER --methods grpo dpo --steps 150 --jobs 1

Every method starts from the same policy (`warm_start`) and trains on the sorting task, whose rewards are exact. Writes FOLDER/frontier.csv
(method, step, kl in nats per answer, reward, and the most reward of that divergence) and FOLDER/frontier.png; a run's folder is
FOLDER/METHOD. GRPO and its kin are measured by the answers that they train on, of WINDOW steps each; DPO by answers to prompts of its own.

The most reward: among all policies with a divergence, the best ones are the first policy tilted by exp(reward / beta) (Korbak et al. 2022,
arXiv 2205.11275). One answer to a prompt has reward 1 and all others 0, so with p, the first policy's probability of that answer, the
tilted one has q = p e / (p e + 1 - p), e = exp(1 / beta), and the divergence q log(q / p) + (1 - q) log((1 - q) / (1 - p)); both are means
over prompts.
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

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.examples import HELD_OUT
from experiments.models import build, warm_start
from experiments.prompts import PAD, STOP
from experiments.ranks import started
from experiments.tasks import TASKS
from ztk.config import Config, Machine, compose
from ztk.report.folder import read_rows
from ztk.report.status import read_summary
from ztk.rollout import token_logprobs

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = 256  # that the closed form is a mean over
WINDOW = 10  # steps whose answers are one point: 1,280 answers, so that a reward's standard error is at most 0.014
COMMON = ("launch.ranks=1", "launch.device=cpu", "logger=disabled", "scheduler.warmup_steps=0")
METHODS = {  # name -> its choices
    "grpo": ("task=grpo",),
    "dr_grpo": ("task=grpo", "algorithm=dr_grpo"),
    "dapo": ("task=grpo", "algorithm=dapo"),
    "gspo": ("task=grpo", "algorithm=gspo"),
    "cispo": ("task=grpo", "algorithm=cispo"),
    "rloo": ("task=grpo", "algorithm=rloo"),
    "ppo": ("task=ppo",),
    "dpo": ("task=dpo",),
    "ipo": ("task=dpo", "dpo.loss=ipo"),
    "hinge": ("task=dpo", "dpo.loss=hinge"),
    "dpo without sft": ("task=dpo", "dpo.sft_weight=0"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """kl: nats per answer. most: the most reward of this divergence."""

    method: str
    step: int
    kl: float
    reward: float
    most: float


class Frontier:
    """The most mean reward for a mean divergence. right: the first policy's probability of the right answer to each prompt, [P]."""

    def __init__(self, right: Tensor) -> None:
        """Raises ValueError for a probability that is not inside (0, 1): no divergence changes it, or none is needed."""
        if not bool(((right > 0) & (right < 1)).all()):
            raise ValueError("the probability of a right answer is 0 or 1: give the first policy warm_start steps")
        inverse = torch.linspace(0, 40, 4001, dtype=torch.float64)  # of beta
        logits = torch.logit(right.double()).unsqueeze(1) + inverse
        tilted, p = torch.sigmoid(logits), right.double().unsqueeze(1)
        others = torch.nn.functional.logsigmoid(-logits) - torch.log1p(
            -p
        )  # log((1 - q) / (1 - p)), without cancellation
        kl = tilted * (torch.nn.functional.logsigmoid(logits) - p.log()) + (1 - tilted) * others
        self.kl, self.reward = kl.mean(0), tilted.mean(0)

    def most(self, kl: float) -> float:
        """The most reward, by lines between points; a noisy estimate below 0 counts as 0."""
        index = int(
            torch.searchsorted(self.kl, torch.tensor(max(kl, 0.0), dtype=torch.float64)).clamp(1, len(self.kl) - 1)
        )
        first, second = float(self.kl[index - 1]), float(self.kl[index])
        share = min(1.0, (max(kl, 0.0) - first) / max(second - first, 1e-300))
        return float(self.reward[index - 1] + share * (self.reward[index] - self.reward[index - 1]))


def main(arguments: Sequence[str] | None = None) -> list[Point]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="a folder; runs of the same words that are done there are not made again",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of a run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("overrides", nargs="*", help="for every run, such as model.dim=64")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    frontier = Frontier(
        probabilities(
            compose(*common(given), "task=grpo", output_dir=str(given.work), machine=Machine(gpus=0, cores=1))
        )
    )
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda method: run(method, given=given), given.methods))
    points = [
        Point(method=method, step=step, kl=kl, reward=reward, most=frontier.most(kl))
        for method, measured in zip(given.methods, found, strict=True)
        for step, kl, reward in measured
    ]
    write(points, to=given.work / "frontier.csv")
    draw(points, frontier=frontier, to=given.work / "frontier.png")
    for method in given.methods:
        last = [point for point in points if point.method == method][-1]
        print(f"{method:>16}: reward {last.reward:.3f} at {last.kl:.2f} nats; the most there is {last.most:.3f}")
    print(f"{given.work / 'frontier.csv'}, {given.work / 'frontier.png'}")
    return points


def common(given: argparse.Namespace) -> tuple[str, ...]:
    """The choices of every run."""
    return (*COMMON, f"train.steps={given.steps}", *given.overrides)


def probabilities(config: Config) -> Tensor:
    """The first policy's probability of the right answer, its end included, to each of `PROMPTS` prompts that training does not see: [P]."""
    with started(config) as process:
        engine = build(config, process=process, values=warm_start(config, process=process), is_trained=False)
        prompts = [
            TASKS["sorting"].prompt(seed=config.train.seed, number=HELD_OUT + number) for number in range(PROMPTS)
        ]
        rows = torch.full((PROMPTS, config.data.seq_len), PAD)
        answers = torch.zeros_like(rows, dtype=torch.bool)
        for row, mask, prompt in zip(rows, answers, prompts, strict=True):
            text = f"{prompt.text}{prompt.answer}{chr(STOP)}".encode()
            row[: len(text)] = torch.tensor(list(text))
            mask[len(prompt.text) : len(text)] = True
        with engine.evaluating():
            found = token_logprobs(engine(rows), tokens=rows, temperature=1.0)
        right = (found.double() * answers).sum(1).exp()
        engine.close()
    return right


def run(method: str, *, given: argparse.Namespace) -> list[tuple[int, float, float]]:
    """(step, kl, reward) of a method's run. Raises RuntimeError, with the end of its output, if it fails."""
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
    """The folder has a run of these words, and it did not fail."""
    recorded = folder / "overrides.json"
    if read_summary(folder).get("status") != "done" or not recorded.is_file():
        return False
    return json.loads(recorded.read_text()) == {key: value for key, _, value in (word.partition("=") for word in words)}


def measured(folder: Path) -> list[tuple[int, float, float]]:
    """Of a run of GRPO or PPO the means over windows of steps; of DPO its evaluations."""
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
    """A line per point."""
    with to.open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(Point.__dataclass_fields__))
        table.writeheader()
        table.writerows(asdict(point) for point in points)


def draw(points: list[Point], *, frontier: Frontier, to: Path) -> None:
    """The picture: a line per method, and the most reward above them."""
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


if __name__ == "__main__":
    main()
