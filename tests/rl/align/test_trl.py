"""Losses without pairs, without a reference, and of a teacher, next to TRL's trainers: one model, the same texts, fp32, one process."""

import json

import pytest

from tests.rl.align import trl_runs
from ztk.config import Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import rollouts
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
    monkeypatch.setattr(rollouts, "HELD_OUT_PROMPTS", 1)
    overrides, options = trl_runs.CASES[case]
    words = (*trl_runs.with_teacher(overrides, folder=str(tmp_path)), *trl_runs.COMMON, "train.steps=4")
    config = compose(*words, output_dir=str(tmp_path), machine=Machine(gpus=0, cores=2))
    ours, theirs = trl_runs.run_both(config, process=Process.start(device="cpu"), folder=str(tmp_path), options=options)
    assert ours.losses == pytest.approx(theirs.losses, abs=trl_runs.TOLERANCE) and len(set(ours.losses)) == 4


def test_mismatched_pairs_of_kto_keep_all_tokens(tmp_path, monkeypatch):
    """Long prompts have short answers, so that a prompt with the answer to another one is longer than any record."""
    monkeypatch.setattr(plot, "plot_run", lambda folder: None)
    monkeypatch.setattr(rollouts, "HELD_OUT_PROMPTS", 1)
    sizes = [(30, 2), (3, 28), (12, 5), (4, 31)]
    records = [
        {"prompt": "a" * (prompt + number % 3) + "=", "completion": letter * answer, "label": number % 4 > 0}
        for number, letter in enumerate("bcdefghijklmnopq")
        for prompt, answer in [sizes[number % 4]]
    ]
    (tmp_path / "kto.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    words = (f"data.path={tmp_path}/kto.jsonl", "data.validation_fraction=0", "train.steps=4", "dpo.beta=0.5")
    config = compose(
        *(*trl_runs.DPO[:-1], "dpo.loss=kto", *trl_runs.COMMON, *words, "optimizer.lr=1e-2"),
        output_dir=str(tmp_path / "run"),
        machine=Machine(gpus=0, cores=2),
    )
    assert config.data.seq_len == 72  # 33 tokens of the longest prompt and 32 of the longest answer
    ours, theirs = trl_runs.run_both(
        config, process=Process.start(device="cpu"), folder=str(tmp_path / "run"), options={}
    )
    assert ours.losses == pytest.approx(theirs.losses, abs=trl_runs.TOLERANCE) and len(set(ours.losses)) == 4
