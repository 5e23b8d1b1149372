"""docs/alignment.md, "The same task in TRL and in ztk": its names exist on both sides, and its command is accepted."""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest

from ztk.config import compose
from ztk.config.keys import run_keys

PAGE = (Path(__file__).parents[3] / "docs" / "alignment.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## The same task in TRL and in ztk") :]


def test_names_of_the_table_exist():
    trl = pytest.importorskip("trl")
    pairs = re.findall(r"\| `([a-z]\w+)` \| `([\w.]+)` (?=\|)", SECTION)
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert len(pairs) == 21 and {name for name, _ in pairs} <= theirs
    assert {name for _, name in pairs} <= run_keys().keys()
    script = SECTION[SECTION.index("GRPOConfig(\n") : SECTION.index("train_dataset=")]
    assert set(re.findall(r"^        (\w+)=", script, re.MULTILINE)) <= theirs


def test_options_of_the_other_trainers_exist():
    """Rows `TRAINER` | choices | `option`: `key`; ..."""
    trl = pytest.importorskip("trl")
    places = {"CPOTrainer": "experimental.cpo", "ORPOTrainer": "experimental.orpo", "GKDTrainer": "experimental.gkd"}
    rows = re.findall(r"^\| `(\w+Trainer)`[^|]* \| (.*?) \| (.*?) \|$", SECTION, re.MULTILINE)
    assert len(rows) == 6
    for trainer, choices, options in rows:
        module = importlib.import_module(f"trl.{places[trainer]}") if trainer in places else trl
        theirs = {field.name for field in dataclasses.fields(getattr(module, trainer.replace("Trainer", "Config")))}
        pairs = re.findall(r"`(\w+)`: `([\w.]+)(?:=\w+)?`", options)
        assert pairs and {name for name, _ in pairs} - {"teacher_model"} <= theirs, trainer
        assert {key for _, key in pairs} <= run_keys().keys(), trainer
        assert re.match(r"`task=\w+", choices)


def test_the_defaults_are_trls_or_have_a_reason():
    """The page is made from TRL's classes and ztk's configuration of today. `python -m tests.rl.align.trl_defaults` writes it."""
    pytest.importorskip("trl")
    from tests.rl.align import trl_defaults

    assert trl_defaults.page() == trl_defaults.PAGE.read_text(encoding="utf-8")


def test_the_command_is_accepted(monkeypatch, tmp_path):
    from tests.hf import small
    from ztk.config import Machine

    folder = small.save_model(tmp_path / "FOLDER")
    (tmp_path / "mine.py").write_text("")
    for name in ("prompts", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "ab"}\n')
    monkeypatch.chdir(tmp_path)
    command = re.search(r"```bash\npython run.py (.*?)\n```", SECTION, re.DOTALL)
    words = shlex.split(command[1].replace("\\\n", " ").replace("model.path=FOLDER", f"model.path={folder}"))
    assert len(words) == 17
    words = [word.replace("rollout.max_tokens=256", "rollout.max_tokens=4") for word in words]
    config = compose(*words, output_dir=str(tmp_path / "run"), machine=Machine(gpus=0, cores=2))
    assert config.checkpoint.metric == "eval_reward" and config.data.eval_path == [str(tmp_path / "held_out.jsonl")]
