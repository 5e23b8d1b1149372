"""Dropout in the main job: a step's draws depend on the seed, the step, the replica and the stage, not on the start of the run."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from tests.experiments.test_alignment import play
from tests.hf import small
from ztk.config import Config, Machine, compose
from ztk.core.runtime import Process
from ztk.core.runtime.seed import derive_seed
from ztk.experiments.ranks import seed_dropout

CPU = Machine(gpus=0, cores=2)


def draw(*, seed: int, replica: int, stage: int, step: int) -> float:
    mesh = SimpleNamespace(replica=replica, comm={"pp": SimpleNamespace(rank=stage)}.__getitem__)
    config = SimpleNamespace(train=SimpleNamespace(seed=seed))
    seed_dropout(config, process=SimpleNamespace(mesh=mesh), step=step)
    return torch.rand((), dtype=torch.float64).item()


def test_every_seed_step_replica_and_stage_draws_its_own_numbers_again():
    cases = [
        dict(zip(("seed", "replica", "stage", "step"), case, strict=True))
        for case in itertools.product(range(3), repeat=4)
    ]
    first = [draw(**case) for case in cases]
    assert len(set(first)) == len(cases) and [draw(**case) for case in cases] == first


def seeds(process: Process, *, config: Config) -> list[int]:
    """The values of the last steps of two consecutive runs."""
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        play(process, configs=[config])
        found.append(torch.initial_seed())
    return found


@pytest.mark.parametrize("layout", ["zero=stage2", "topology=pp2"])
def test_the_last_step_was_seeded(ranks, tmp_path, layout):
    folder = small.save_model(tmp_path / "model", attention_dropout=0.5)
    lines = [json.dumps({"text": "abcdefgh"[number % 7 :] * 9}) for number in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    data = (
        "model=hf",
        f"model.path={folder}",
        "data=files",
        f"data.path={folder}/texts.jsonl",
        f"data.tokenizer={folder}",
    )
    length = ("data.seq_len=16", "train.steps=2", "train.micro_batch_size=2", "train.eval_every=0", "train.seed=5")
    fixed = ("launch.ranks=2", "launch.device=cpu", "logger=disabled")
    config = compose(*data, *length, *fixed, layout, output_dir=str(tmp_path / "run"), machine=CPU)
    (tmp_path / "run").mkdir()
    places = [(0, 0), (0, 1)] if "pp2" in layout else [(0, 0), (1, 0)]  # replica and stage of each rank
    expected = [derive_seed(5, "dropout", *place, 2) for place in places]
    assert ranks(2).run(seeds, config=config) == [[seed, seed] for seed in expected]
