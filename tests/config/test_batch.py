"""The global batch: the keys that decide it, and that a restarted run keeps it."""

import pytest

from ztk.config import ConfigError, Machine, compose, from_yaml, on_fewer_ranks, save, to_yaml

CPU = Machine(gpus=0, cores=4)
STARTED = Machine(gpus=0, cores=4, started_ranks=3, started_here=3)


def sizes(config) -> tuple[int, int]:
    return config.train.global_batch_size, config.train.accumulation_steps


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (("launch.ranks=4", "train.micro_batch_size=2"), (8, 1)),
        (("launch.ranks=4", "train.micro_batch_size=2", "train.accumulation_steps=3"), (24, 3)),
        (("launch.ranks=3", "train.micro_batch_size=2", "train.global_batch_size=8"), (8, 2)),
        (("launch.ranks=3", "train.micro_batch_size=8", "train.global_batch_size=8"), (8, 1)),
    ],
)
def test_each_of_them_follows_from_the_others(overrides, expected, tmp_path):
    config = compose(*overrides, output_dir=tmp_path, machine=CPU)
    assert sizes(config) == expected
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    "overrides, fix",
    [
        (("train.global_batch_size=8", "train.accumulation_steps=2"), "leave one out"),
        (("launch.elastic=true",), "use checkpoint=periodic"),
        (("launch.elastic=true", "checkpoint.every=5", "launch.ranks=2", "launch.min_ranks=3"), "launch.min_ranks=2"),
        (("launch.min_ranks=2",), "launch.elastic=true"),
        (("launch.max_failures=2",), "launch=ray"),
        (("launch=ray", "launch.ranks=2", "launch.max_failures=2"), "use checkpoint=periodic"),
    ],
)
def test_what_does_not_fit_together_names_the_fix(overrides, fix, tmp_path):
    with pytest.raises(ConfigError, match=fix):
        compose(*overrides, output_dir=tmp_path, machine=CPU)


def test_torchrun_starts_ranks_again_by_itself(tmp_path):
    with pytest.raises(ConfigError, match="--max-restarts"):
        compose("launch.elastic=true", "checkpoint.every=5", output_dir=tmp_path, machine=STARTED)


def test_a_run_that_goes_on_in_its_folder_keeps_its_global_batch(tmp_path):
    """Also if it was lost before its first checkpoint."""
    options = ("train.micro_batch_size=2", "checkpoint.every=5", "checkpoint.resume=auto")
    first = compose(*options, "launch.ranks=4", output_dir=tmp_path, machine=CPU)
    assert sizes(first) == (8, 1) and first.checkpoint.resume == "auto"
    save(first, path=tmp_path / "config.yaml")
    assert sizes(compose(*options, output_dir=tmp_path, machine=STARTED)) == (8, 2)
    assert sizes(compose(*options[:2], output_dir=tmp_path, machine=STARTED)) == (6, 1)  # a run of its own


def test_fewer_ranks_are_those_that_the_topology_allows(tmp_path):
    options = ("checkpoint.every=5", "launch.elastic=true", "train.micro_batch_size=2", "launch.min_ranks=2")
    config = compose(*options, "launch.ranks=4", output_dir=tmp_path, machine=CPU)
    smaller = on_fewer_ranks(config, lost=1)
    assert smaller.launch.ranks == 3 and sizes(smaller) == (8, 2) and sizes(config) == (8, 1)
    assert on_fewer_ranks(config, lost=3) is None
    paired = compose(*options, "topology=tp2", "launch.ranks=4", output_dir=tmp_path, machine=CPU)
    assert on_fewer_ranks(paired, lost=1).launch.ranks == 2


def test_synthetic_tokens_have_nothing_to_evaluate_and_can_be_recorded(tmp_path):
    config = compose("data=synthetic", output_dir=tmp_path, machine=CPU)
    assert config.train.eval_every is None and from_yaml(to_yaml(config)) == config
