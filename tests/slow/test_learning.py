"""Each alignment task learns with its defaults in under three minutes on two CPU cores.

The commands are a user's. `learned` is PPO on the reward model of `reward`: its values rise to the end. The true reward rises, and falls again
when the policy has left the reward model's training data. Nothing else should run meanwhile.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 180.0
COMMON = ("launch.device=cpu", "launch.ranks=2", "logger=disabled")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """words: on the command line. holds: from summary.json. shown: its keys, for the line."""

    words: tuple[str, ...]
    holds: Callable[[Mapping], bool]
    shown: tuple[str, ...]


def _spent(summary: Mapping) -> float:
    """Divergence over the least that any policy needs for the reward."""
    return summary["kl_after"] / summary["kl_least"]


def claims(work: Path) -> dict[str, Claim]:
    """Task -> the values to reach. work: the folder of the runs."""
    rewards = ("reward_before", "reward_after", "kl_after", "kl_least")
    learned = ("task=ppo", f"reward.path={work / 'reward'}")
    return {
        "sft": Claim(
            words=("task=sft",), holds=lambda found: found["validation_loss"] <= 0.01, shown=("validation_loss",)
        ),
        "reward": Claim(
            words=("task=reward", "checkpoint=periodic"),
            holds=lambda found: found["validation_accuracy"] >= 0.95,
            shown=("validation_accuracy",),
        ),
        "dpo": Claim(
            words=("task=dpo", "dpo.beta=0.5", "dpo.sft_weight=1"),
            holds=lambda found: found["reward"] >= 0.95 and found["greedy_reward"] >= 0.95 and found["kl"] <= 3,
            shown=("reward", "greedy_reward", "kl"),
        ),
        "grpo": Claim(
            words=("task=grpo",),
            holds=lambda found: (
                found["reward_before"] <= 0.4 and found["reward_after"] >= 0.95 and _spent(found) <= 1.5
            ),
            shown=rewards,
        ),
        "ppo": Claim(
            words=("task=ppo",),
            holds=lambda found: found["reward_before"] <= 0.4 and found["reward_after"] >= 0.9,
            shown=rewards,
        ),
        "learned": Claim(
            words=learned,
            holds=lambda found: found["reward_after"] > found["reward_before"] and found["true_reward_best"] >= 0.4,
            shown=("reward_before", "reward_after", "true_reward_best", "true_reward", "kl_after"),
        ),
    }


def run(claim: Claim, *, folder: Path) -> tuple[float, Mapping, str]:
    """Seconds of the command, its summary, and its output."""
    command = [sys.executable, str(ROOT / "run.py"), *claim.words, *COMMON, f"hydra.run.dir={folder}"]
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    seconds, summary = time.monotonic() - began, folder / "summary.json"
    found = json.loads(summary.read_text()) if summary.is_file() else {"status": "failed"}
    rows = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if summary.is_file() else []
    )
    if measured := [row["true_reward"] for row in rows if "true_reward" in row]:
        found["true_reward_best"] = max(measured)
    return seconds, found, done.stdout + done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "grpo", "ppo", "learned"])
def test_a_task_learns_with_its_defaults(show, work: Path, name: str):
    every = claims(work)
    if name == "learned" and not (work / "reward" / "checkpoints").is_dir():
        run(every["reward"], folder=work / "reward")
    seconds, found, text = run(every[name], folder=work / name)
    values = ", ".join(f"{key} {found[key]:.3f}" for key in every[name].shown if key in found)
    spent = f", {_spent(found):.2f} times the least" if found.get("kl_least") else ""
    show(f"{name}: {seconds:.0f} s; {values}{spent}")
    assert found["status"] == "done", text[-2000:]
    assert every[name].holds(found)
    assert seconds < MOST_SECONDS
