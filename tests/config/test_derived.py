"""Values that the user left open: learning rates by task, method and size, and the record of where each value came from."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.parallel.topology.families import make
from ztk.config import Config, Machine, compose, from_yaml, to_explained_yaml
from ztk.config.keys import read
from ztk.config.record import explained

CPU = Machine(gpus=0, cores=2)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make("Llama", vocab_size=300, max_position_embeddings=128).save_pretrained(path)
    return path


def composed(*overrides: str) -> Config:
    return compose(*overrides, output_dir="/tmp/run", machine=CPU)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("model=tiny", 3e-3),
        ("model=tiny_moe", 3e-3),
        ("model=10m", 1e-3),
        ("model=100m", 6e-4),
        ("model=1b", 4e-4),
        ("model=7b", 3e-4),
        ("model=70b", 1.5e-4),
        ("model=175b", 6e-5),
        ("model=7b optimizer.lr=1e-3", 1e-3),
        ("model=7b optimizer=muon", 0.02),
    ],
)
def test_rates_from_scratch_follow_the_size(words, rate):
    assert composed(*words.split()).optimizer.lr == rate


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ("task=reward", (1e-4, None)),
        ("task=reward lora=adapter", (1e-3, None)),
        ("task=dpo warm_start.steps=0", (1e-6, None)),
        ("task=dpo warm_start.steps=0 lora=adapter", (1e-5, None)),
        ("task=grpo warm_start.steps=0 reward.function={path}/f.py:f", (1e-6, None)),
        ("task=ppo warm_start.steps=0 reward.function={path}/f.py:f", (3e-6, 9e-6)),
        ("task=ppo warm_start.steps=0 reward.function={path}/f.py:f critic.lr=1e-5", (3e-6, 1e-5)),
    ],
)
def test_rates_of_pretrained_weights_follow_the_task(folder, tmp_path, words, rates):
    from tests.rl.align.chats import train_tokenizer

    train_tokenizer().save_pretrained(folder)
    (tmp_path / "f.py").write_text("def f(**given): return 0.0\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    config = composed(
        *("model=hf", f"model.path={folder}", f"data.path={tmp_path}/a.jsonl", "data.seq_len=64"),
        *words.format(path=tmp_path).split(),
    )
    assert (config.optimizer.lr, config.critic.lr) == rates


def test_a_small_model_keeps_its_rates(tmp_path):
    """The tasks' option files were measured with this model, also with other weights."""
    assert composed("task=sft").optimizer.lr == 3e-3


def test_each_derived_value_has_its_reason():
    config = composed("model=7b")
    text = to_explained_yaml(config)
    assert "  lr: 0.0003  # 6,738M parameters from scratch (Llama at 7B)\n" in text
    assert "  warmup_steps: 15  # train.steps / 20\n" in text
    assert from_yaml(text) == config
    given = composed("model=7b", "optimizer.lr=3e-4", "scheduler.warmup_steps=15")
    assert not {"optimizer.lr", "scheduler.warmup_steps"} & given.reasons.keys()


def test_reasons_leave_every_value_as_it_is():
    values = {"a": {"path": "/long name " * 20, "list": [1, 2], "text": "one: two\nb: c\n"}, "b": {"list": 3}}
    text = yaml.safe_dump(values, sort_keys=False)
    shown = explained(text, reasons=dict.fromkeys(("a.path", "a.list", "a.text", "b.list"), "why"))
    assert yaml.safe_load(shown) == values and shown.count("# why") == 4 and "  list: 3  # why\n" in shown


def test_the_command_shows_the_run_that_would_start(tmp_path):
    def shown(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "run.py"), *words, "--cfg", "job"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    done = shown("model=7b", "launch.device=cpu")
    assert done.returncode == 0, done.stderr
    assert "  lr: 0.0003  # 6,738M parameters from scratch (Llama at 7B)\n" in done.stdout
    assert read(from_yaml(done.stdout), key="scheduler.warmup_steps") == 15
    assert not list(tmp_path.iterdir())
    done = shown("data.seq_len=4096")
    assert done.returncode == 2 and "use data.seq_len=1024" in done.stderr
