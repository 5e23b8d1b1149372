"""Losses without pairs, without a reference, and of a teacher, next to TRL's trainers: one model, the same texts, fp32, one process."""

import pytest

from experiments import answers
from tests.rl.align import trl_runs
from ztk.config import Machine, compose
from ztk.core.runtime import Process
from ztk.report import plot

pytest.importorskip("trl")
CASES = (
    "simpo",
    "simpo and sft",
    "orpo",
    "kto",
    "distill",
    "distill, forward",
    "distill, reverse",
    "distill, own draws",
)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_trls_at_every_step(case, tmp_path, monkeypatch):
    """Sums of fp32 in another order; see `tests/slow/test_trl.py`, which has the other losses, too."""
    monkeypatch.setattr(plot, "plot_run", lambda folder: None)
    monkeypatch.setattr(answers, "PROMPTS", 1)
    overrides, options = trl_runs.CASES[case]
    words = (*trl_runs.with_teacher(overrides, folder=str(tmp_path)), *trl_runs.COMMON, "train.steps=4")
    config = compose(*words, output_dir=str(tmp_path), machine=Machine(gpus=0, cores=2))
    ours, theirs = trl_runs.run_both(config, process=Process.start(device="cpu"), folder=str(tmp_path), options=options)
    assert ours.losses == pytest.approx(theirs.losses, abs=trl_runs.TOLERANCE) and len(set(ours.losses)) == 4
