"""`python run.py ds_config=my.json`: the run that a DeepSpeed configuration describes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ztk.config import ConfigError, Machine, compose, expand_ds_config

TWO = Machine(gpus=0, cores=2)
GIVEN = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "optimizer": {"type": "Lion", "params": {"lr": 2e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_type": "linear"}},
}


@pytest.fixture
def file(tmp_path):
    def write(**changes) -> str:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(GIVEN | changes))
        return f"ds_config={path}"

    return write


def composed(*words, tmp_path, machine=TWO):
    return compose(*words, output_dir=tmp_path, machine=machine)


def test_the_run_of_the_file(file, tmp_path):
    config = composed(file(), "train.steps=9", "model=tiny", tmp_path=tmp_path)
    assert (config.zero.stage, config.zero.prefetch_bucket_size, config.offload.optimizer) == (3, 1000, "cpu")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.betas) == ("lion", 2e-4, [0.9, 0.95])
    assert (config.optimizer.clip_grad_norm, config.precision.dtype) == (0.5, "bf16")
    assert (config.scheduler.name, config.scheduler.warmup_steps, config.train.steps) == ("constant", 7, 9)
    train = config.train
    assert (train.micro_batch_size, train.accumulation_steps, train.global_batch_size) == (8, 4, 64)


def test_the_rest_of_the_line_wins(file, tmp_path):
    words = ("zero=stage2", "optimizer.lr=0.5", "precision=fp16", "launch.ranks=4")
    for line in ((file(), *words), (*words, file())):
        config = composed(*line, tmp_path=tmp_path)
        assert (config.zero.stage, config.offload.optimizer, config.launch.ranks) == (2, "cpu", 4)
        assert (config.optimizer.name, config.optimizer.lr, config.precision.dtype) == ("lion", 0.5, "fp16")
        assert (config.train.micro_batch_size, config.train.global_batch_size) == (4, 64)


def test_the_global_batch_is_kept_on_any_number_of_ranks(file, tmp_path):
    """Twice as many ranks halve the micro-batch; ranks that hold parts of the same replica double the accumulation."""
    word = file(gradient_accumulation_steps=1)
    for machine, words, micro, accumulation in (
        (TWO, (), 32, 1),
        (Machine(gpus=4, cores=8), (), 16, 1),
        (Machine(gpus=4, cores=8), ("launch.device=cpu",), 32, 1),
        (Machine(gpus=0, cores=2, started_ranks=8, started_here=8), (), 8, 1),
        (TWO, ("launch.ranks=4", "topology=tp2_dp2"), 16, 2),
    ):
        config = composed(word, "offload=none", *words, tmp_path=tmp_path, machine=machine)
        assert (config.train.micro_batch_size, config.train.accumulation_steps) == (micro, accumulation), words
        assert config.train.global_batch_size == 64


def test_a_micro_batch_alone_is_per_rank(file, tmp_path):
    word = file(train_batch_size=None)
    text = json.loads(Path(word.partition("=")[2]).read_text())
    del text["train_batch_size"]
    Path(word.partition("=")[2]).write_text(json.dumps(text | {"train_micro_batch_size_per_gpu": 3}))
    config = composed(word, tmp_path=tmp_path)
    assert (config.train.micro_batch_size, config.train.accumulation_steps, config.train.global_batch_size) == (
        3,
        4,
        24,
    )


def test_keys_without_effect_are_noted(file):
    word = file(csv_monitor={"enabled": True}, wall_clock_breakdown=True, aio={"queue_depth": 8})
    notes = expand_ds_config([word], machine=TWO).notes
    assert {note.partition(":")[0] for note in notes} >= {"csv_monitor", "wall_clock_breakdown", "scheduler"}


def test_every_refused_key_is_named(file):
    word = file(zero_optimisation={}, optimizer={"type": "Adamw", "params": {"rl": 1}}, comet={"enabled": True})
    with pytest.raises(ConfigError) as caught:
        expand_ds_config([word], machine=TWO)
    text = str(caught.value)
    assert all(f"{word}: {key}" in text for key in ("zero_optimisation: ", "optimizer.params.rl: ", "comet.enabled: "))
    for words, part in (
        ([word, word], "one file for one run"),
        (["ds_config=a,b"], "one file"),
        (["ds_config=no"], "no such file"),
    ):
        with pytest.raises(ConfigError, match=part):
            expand_ds_config(words, machine=TWO)
    with pytest.raises(ConfigError, match="did you mean ds_config"):
        compose("ds_confg=x", output_dir=".", machine=TWO)


def test_the_command(file, tmp_path):
    """The full way, without starting ranks."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "run.py"), file(), "train.steps=9", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "  prefetch_bucket_size: 1000\n" in done.stdout and "  steps: 9\n" in done.stdout
    assert "ztk: ds_config: scheduler: DeepSpeed makes one update before the first step" in done.stderr
