"""A program of one's own around the main loop that passes a torch optimizer: the records have the optimizer and rate that acted."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

import ztk
from ztk.config import Machine, compose, save
from ztk.experiments import pretrain
from ztk.report import history, plot

WORDS = (
    *("model=nano", "data=synthetic", "data.seq_len=8", "train.micro_batch_size=1", "train.steps=3"),
    *("logger=disabled", "precision=fp32", "launch.ranks=1", "launch.device=cpu", "train.quick=true"),
)


def play(process, *, config, is_own: bool) -> None:
    """`ztk.experiments.pretrain` with `parallelize(torch_optimizer=)`."""
    parallelize = pretrain.parallelize

    def own(model, **options):
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.25, weight_decay=0.5)
        options |= {"optimizer": ztk.OptimizerPolicy(name="torch"), "lr_table": None}
        return parallelize(model, torch_optimizer=optimizer, **options)

    plot.plot_run = lambda folder: None
    with mock.patch.object(pretrain, "parallelize", own if is_own else parallelize):
        pretrain.run(config, process=process)


def test_the_records_have_the_optimizer_and_the_rate_that_acted(ranks, tmp_path):
    for name in ("own", "configured"):
        folder = Path(tmp_path, name)
        folder.mkdir()
        config = compose(*WORDS, output_dir=str(folder), machine=Machine(gpus=0, cores=2))
        save(config, path=folder / "config.yaml")
        ranks(1).run(play, config=config, is_own=name == "own")
    rows = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert {row["lr"] for row in rows} == {0.25}
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert (summary["optimizer.name"], summary["optimizer.lr"]) == ("NAdam", 0.25)
    runs = history.load(tmp_path).runs.set_index("run")
    assert runs.loc["own", "optimizer.name"] == "NAdam" and runs.loc["configured", "optimizer.name"] == "adamw"
    assert runs.loc["own", "optimizer.weight_decay"] == pytest.approx(0.5)
    assert runs.loc["own", "arm"] != runs.loc["configured", "arm"]  # no repeats of one experiment
