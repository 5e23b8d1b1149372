"""`checkpoint.resume=RUN` takes the run's options; options on the command line replace them."""

import json

import pytest

from tests.config.test_config import CPU
from ztk.config import ConfigError, check_resumed, compose, save, take_run_words

RUN = ("model=nano", "zero=stage3", "offload=nvme", "offload.block_bytes=8192", "optimizer.lr=2e-3", "launch.ranks=2")


@pytest.fixture
def run(tmp_path):
    """A run folder with a record and a checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "text.txt").write_text("text " * 100)
    words = (*RUN, f"data.path={tmp_path}/text.txt", "train.accumulation_steps=2")
    save(compose(*words, output_dir=folder, machine=CPU), path=folder / "config.yaml")
    recorded = dict(word.split("=") for word in words) | {"data.path": "text.txt", "checkpoint.allow_changes": "true"}
    (folder / "overrides.json").write_text(json.dumps(recorded))
    return folder


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/step-000002"])
def test_the_options_of_the_run_are_taken(run, below):
    config = compose(f"checkpoint.resume={run / below}", output_dir=run.parent / "new", machine=CPU)
    assert (config.zero.stage, config.optimizer.lr, config.offload.block_bytes) == (3, 2e-3, 8192)
    assert config.data.path == [str(run.parent / "text.txt")]  # wherever the command is started
    assert not config.checkpoint.allow_changes
    check_resumed(config)


def test_paths_of_a_resumed_run_keep_its_working_folder(tmp_path, monkeypatch):
    """Even if a path has the name of a key group."""
    started, run = tmp_path / "started", tmp_path / "run"
    (started / "train").mkdir(parents=True)
    (started / "train" / "text.txt").write_text("text " * 100)
    hardware = dict.fromkeys(("bf16_rate", "fp16_rate", "fp32_rate", "memory_bandwidth"), 8)
    (started / "here.json").write_text(json.dumps({"hardware": hardware}))
    words = ("data.path=train", "kernels.log_every=10", "hardware=here", "hardware.file=here.json")
    monkeypatch.chdir(started)
    run.mkdir()
    save(compose(*words, output_dir=run, machine=CPU), path=run / "config.yaml")
    (run / "overrides.json").write_text(json.dumps(dict(word.split("=") for word in words)))
    monkeypatch.chdir(tmp_path)
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    config = compose(f"checkpoint.resume={run}", output_dir=tmp_path / "new", machine=CPU)
    assert config.data.path == [str(started / "train")]
    assert config.hardware.file == str(started / "here.json")


def test_the_line_replaces_the_run_and_a_group_its_keys(run):
    taken = take_run_words([f"checkpoint.resume={run}", "offload=none", "train.steps=7"]).taken
    assert "zero=stage3" in taken and not any(word.startswith(("offload", "train.accumulation")) for word in taken)
    started = take_run_words([f"checkpoint.resume={run}"], has_ranks=True).taken
    assert not any(word.startswith("launch.") for word in started)
    for other in ("auto", "null", str(run.parent)):
        assert take_run_words([f"checkpoint.resume={other}"]).taken == ()


@pytest.mark.parametrize("ranks, steps", [(1, 4), (2, 2), (4, 1)])
def test_another_number_of_ranks_keeps_the_batch_that_was_never_set(run, ranks, steps):
    words = (f"checkpoint.resume={run}", f"launch.ranks={ranks}")
    config = compose(*words, output_dir=run.parent / "new", machine=CPU)
    assert (config.train.global_batch_size, config.train.accumulation_steps) == (32, steps)
    check_resumed(config)


def test_contradictions_are_refused_with_the_way_out(run):
    given = {"output_dir": run.parent / "new", "machine": CPU}
    with pytest.raises(ConfigError, match="train.accumulation_steps=5: .*train.accumulation_steps=2 here"):
        compose(f"checkpoint.resume={run}", "train.accumulation_steps=5", **given)
    with pytest.raises(ConfigError, match=r"optimizer.lr=0.001: the checkpoint's run has optimizer.lr=0.002"):
        check_resumed(compose(f"checkpoint.resume={run}", "optimizer.lr=1e-3", **given))
    with pytest.raises(ConfigError, match=r"task=sft: the checkpoint's run has task=pretrain .*warm_start.path"):
        check_resumed(compose(f"checkpoint.resume={run}", "task=sft", "data=chat", "data.path=null", **given))


def test_an_environment_of_a_resumed_run_keeps_its_folder(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "mine.py").write_text("class Env: pass\n")
    words = ("task=grpo", "rollout.environment=mine.py:Env")
    monkeypatch.chdir(tmp_path)
    save(compose(*words, output_dir=run, machine=CPU), path=run / "config.yaml")
    (run / "overrides.json").write_text(json.dumps(dict(word.split("=") for word in words)))
    taken = take_run_words([f"checkpoint.resume={run}"]).taken
    assert any(word.startswith("rollout.environment=") and f"{tmp_path}/mine.py:Env" in word for word in taken)
