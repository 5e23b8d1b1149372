"""Runs of `task=grpo` and `task=ppo` over models that several ranks share."""

import pytest

from tests.rl.rollout.runs import config_of, play, rows_of

DIVIDED = ("tp2", "pp2", "sp2")
SHORT = ("model.kv_heads=2", "warm_start.steps=10", "train.steps=3")  # the last step is the first of a second rollout


def losses_of(task: str, topology: str, *more: str, ranks, folder, count: int) -> list[float]:
    config = config_of(task, *SHORT, *more, f"topology={topology}", folder=folder / topology, ranks=count)
    found = ranks(count).run(play, config=config)
    assert all(rank["rollouts"] == found[0]["rollouts"] for rank in found)  # with the bits of their log-probabilities
    rows = rows_of(folder / topology)
    assert [row["rollout_differing"] for row in rows] == [0] * 3  # identity=exact holds in every layout
    return [row["loss"] for row in rows] + [row["critic_loss"] for row in rows if task == "ppo"]


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_losses_of_divided_models_are_those_of_one_rank(task, ranks, tmp_path):
    expected = losses_of(task, "dp", ranks=ranks, folder=tmp_path, count=1)
    for topology in DIVIDED:
        # fp32 sums in another order, and a loss is a small difference of larger terms
        found = losses_of(task, topology, ranks=ranks, folder=tmp_path, count=2)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), topology
