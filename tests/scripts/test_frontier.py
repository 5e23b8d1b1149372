"""The most reward of a divergence: the closed form against a search, and the table of a run's points."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from scripts.frontier import WINDOW, is_done, measured
from ztk.experiments import least_divergence
from ztk.rl.align import Frontier


def divergence(q: torch.Tensor, p: float) -> torch.Tensor:
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def test_no_policy_earns_more_for_its_divergence():
    """All pairs of a fine grid for two prompts; the best of them comes near, so the bound is not loose. A step of the grid is 0.001."""
    first = (0.3, 0.05)
    frontier = Frontier(torch.tensor(first))
    grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    spent = (divergence(grid, first[0]).unsqueeze(1) + divergence(grid, first[1])) / 2
    earned = (grid.unsqueeze(1) + grid) / 2
    for budget in (0.02, 0.2, 0.6, 1.2):
        best = float(earned[spent <= budget].max())
        assert best <= frontier.most(budget) + 1e-6
        assert best == pytest.approx(frontier.most(budget), abs=1e-3)
        assert frontier.least(frontier.most(budget)) == pytest.approx(budget, abs=1e-6)


def test_its_ends():
    frontier = Frontier(torch.tensor([0.3, 0.1]))
    assert frontier.most(0.0) == pytest.approx(0.2) == frontier.most(-0.01)
    assert frontier.most(-(math.log(0.3) + math.log(0.1)) / 2) == pytest.approx(1.0)
    assert frontier.least(0.1) == 0.0  # the first policy has more
    with pytest.raises(ValueError, match="give the first policy warm_start steps"):
        Frontier(torch.tensor([0.0, 0.5]))


def test_rows_of_a_run_become_points(tmp_path):
    drawn = [{"step": step, "reward": step / 100, "kl": 1.0, "rollout_differing": 0} for step in range(1, WINDOW + 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    (tmp_path / "summary.json").write_text(json.dumps({"steps": WINDOW + 1}))
    mean = sum(range(1, WINDOW + 1)) / WINDOW / 100
    assert measured(tmp_path) == [(WINDOW, 1.0, pytest.approx(mean)), (WINDOW + 1, 1.0, (WINDOW + 1) / 100)]


def test_a_run_that_failed_or_had_other_words_is_made_again(tmp_path):
    words = ("task=grpo", "train.steps=80")
    assert not is_done(tmp_path, words=words)
    (tmp_path / "overrides.json").write_text(json.dumps({"task": "grpo", "train.steps": "80"}))
    for status, wanted in (("failed", False), ("done", True)):
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        assert is_done(tmp_path, words=words) is wanted
    assert not is_done(tmp_path, words=("task=grpo", "train.steps=20"))


def test_the_first_policy_has_the_temperature_of_rollouts(monkeypatch):
    """Half of it is twice the logits."""
    monkeypatch.setattr(least_divergence, "PROMPTS", 3)
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def right(*, scale: float, temperature: float) -> torch.Tensor:
        def engine(rows: torch.Tensor) -> torch.Tensor:
            return scale * table[rows]

        engine.evaluating, engine.process = nullcontext, SimpleNamespace(device=torch.device("cpu"))
        rollout = SimpleNamespace(task=SimpleNamespace(value="copying"), temperature=temperature)
        sizes = {"train": SimpleNamespace(seed=0, micro_batch_size=2), "data": SimpleNamespace(seq_len=64)}
        return least_divergence.right_probabilities(engine, config=SimpleNamespace(rollout=rollout, **sizes))

    torch.testing.assert_close(right(scale=1.0, temperature=0.5).log(), right(scale=2.0, temperature=1.0).log())
