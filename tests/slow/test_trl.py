"""Losses of SFT, reward models, DPO, distillation and GRPO are TRL's within 1e-5 at every step.

Of GRPO and its variants TRL replays ztk's answers and rewards. The loss of a first step depends on the answers only, so gradient norms are
compared, too.
"""

import pytest

pytest.importorskip("trl")

import transformers
from trl.trainer import grpo_trainer

from tests.rl.align import trl_runs
from tests.rl.align.trl_runs import TOLERANCE
from tests.rl.rollout import trl_runs as rollout_runs
from ztk.config import Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import grpo, rollouts
from ztk.report import plot

STEPS = 6


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(plot, "plot_run", lambda folder: None)
    monkeypatch.setattr(rollouts, "HELD_OUT_PROMPTS", 1)
    monkeypatch.setattr(rollouts, "EVALUATED", 1)
    monkeypatch.setattr(grpo, "warm_start", grpo.warm_start)  # the runs replace it
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)  # the order of ztk's samples
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("case", trl_runs.CASES)
def test_losses_are_trls(tmp_path, show, case):
    overrides, options = trl_runs.CASES[case]
    words = trl_runs.with_teacher(overrides, folder=str(tmp_path))
    config = compose(
        *words,
        *trl_runs.COMMON,
        f"train.steps={STEPS}",
        output_dir=str(tmp_path),
        machine=Machine(gpus=0, cores=2),
    )
    process = Process.start(device="cpu")
    ours, theirs = trl_runs.run_both(config, process=process, folder=str(tmp_path), options=options)
    largest = max(abs(own - their) for own, their in zip(ours.losses, theirs.losses, strict=True))
    show(f"{case}: {largest:.1e}, from {ours.losses[0]:.5f} to {ours.losses[-1]:.5f}")
    assert largest <= TOLERANCE


@pytest.mark.parametrize("case", rollout_runs.CASES)
def test_losses_and_norms_of_rollouts_are_trls(show, case):
    overrides, options = rollout_runs.CASES[case]
    choices = (*rollout_runs.SMALL, f"train.steps={STEPS}", *overrides)
    ours, theirs = rollout_runs.run_both(choices, process=Process.start(device="cpu"), options=options)
    loss = max(abs(own - their) for own, their in zip(ours.losses, theirs.losses, strict=True))
    norm = max(abs(own - their) / their for own, their in zip(ours.norms, theirs.norms, strict=True))
    show(f"{case}: loss {loss:.1e}, gradient's norm {norm:.1e}, from {ours.losses[0]:.6f} to {ours.losses[-1]:.6f}")
    assert loss <= TOLERANCE and norm <= rollout_runs.NORM_TOLERANCE
