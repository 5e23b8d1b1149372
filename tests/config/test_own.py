"""Keys and objects of the user's: composed, hashed, recorded, and refused before ranks start."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ztk.config import (
    Config,
    ConfigError,
    build_reference,
    check_resumed,
    compose,
    conf_dir,
    differences,
    from_yaml,
    job_hash,
    parse_arguments,
    save,
    takes_share,
    to_yaml,
)
from ztk.data import Share
from ztk.report.sweep import as_written

RESEARCH = Path(__file__).parents[2] / "examples" / "research"

MINE = """
from dataclasses import dataclass

@dataclass
class Options:
    width: int = 32
    alpha: float = 0.5

class Model:
    def __init__(self, *, width, dim=0): ...

thing = 3

def halve(step, every=1): return 0.5

def main(config, greeting="hello"): ...

class Split:
    def __init__(self, *, share=0.5): ...

class Sharded:
    def __init__(self, *, share: "ztk.data.Share", size=1): ...

class Unnamed:
    def __init__(self, *, share): ...

class Clips:
    def __init__(self, params, *, clip_grad_norm=0.0): ...

class Judge:
    def __init__(self, *, margin=0.0): ...
    def __call__(self, completions): return [0.0] * len(completions)

def score(completions, prompts=(), **fields): return [0.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    (tmp_path / "own_mine.py").write_text(MINE)
    (tmp_path / "own_broken.py").write_text("import json\n\nimport no_such_module\n")
    (tmp_path / "own_wrong.py").write_text("import json\ndef f(:\n")
    (tmp_path / "own_script.py").write_text("import sys\n\nsys.exit(3)\n")
    for folder in (tmp_path, RESEARCH):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in ("own_mine", "own_broken", "conv_lm", "vit", "optimizers"):
        sys.modules.pop(name, None)


def composed(*words: str) -> Config:
    return compose(*words, output_dir="/tmp/own", folders=[str(RESEARCH / "conf")])


def test_objects_and_keys_of_the_users_are_recorded_as_they_are_written():
    config = composed(
        "experiment=conv", "user.width=64", "user.deep.er=[1,2]", "zero=stage3", "offload=nvme", "optimizer.beta=0.5"
    )
    assert config.own["model"] == {"_target_": "conv_lm.ConvLM", "kernel": 5, "width": 64}
    assert config.own["optimizer"]["beta"] == 0.5 and config.user.deep.er == [1, 2]
    text = to_yaml(config)
    again = from_yaml(text)
    assert to_yaml(again) == text and job_hash(again) == job_hash(config) and again.own == config.own
    for key in ("_target_: conv_lm.ConvLM", "kernel: 5", "width: 64", "smoothing: 0.1"):
        assert key in text
    assert "own:" not in text and "heads" not in text  # no section of ztk's model


@pytest.mark.parametrize("word", ["user.width=65", "model.kernel=3", "loss.smoothing=0", "user.new=1"])
def test_every_own_key_is_part_of_the_experiment(word):
    before, now = composed("experiment=conv"), composed("experiment=conv", word)
    assert job_hash(before) != job_hash(now)
    assert word.partition("=")[0] in differences(before, now=now)


def test_a_schema_types_the_users_keys_before_others_refer_to_them():
    config = composed("model=conv", "user._schema_=own_mine.Options", "user.alpha=1")
    assert config.own["model"]["width"] == 32 and config.user.alpha == 1.0 and type(config.user).__name__ == "Options"
    again = from_yaml(to_yaml(config))
    assert again.user == config.user
    for word, said in (("user.alpha=x", "user.alpha: Value 'x'"), ("user.beta=1", "'beta' not in 'Options'")):
        with pytest.raises(ConfigError, match=said):
            composed("user._schema_=own_mine.Options", word)


def test_an_object_on_the_command_line_takes_the_place_of_the_usual_option(tmp_path):
    config = composed(
        "train.steps=9",
        "model._target_=own_mine.Model",
        "model.width=3",
        "scheduler._target_=own_mine.halve",
        "scheduler.every=2",
    )
    assert config.own["model"] == {"_target_": "own_mine.Model", "width": 3}
    assert config.own["scheduler"] == {"_target_": "own_mine.halve", "every": 2}
    save(config, path=tmp_path / "config.yaml")
    config.checkpoint.resume = str(tmp_path / "checkpoints" / "step-000001")
    check_resumed(config)
    config.own["scheduler"]["last"] = 3
    with pytest.raises(ConfigError, match="scheduler.last=3: the checkpoint's run has .* Leave it out, or use another"):
        check_resumed(config)
    del config.own["scheduler"]["last"]
    config = composed("task._target_=own_mine.main", "task.greeting=hi")
    assert config.own["task"] == {"_target_": "own_mine.main", "greeting": "hi"} and config.task.name == "pretrain"


PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["model._target_=own_mine.Mdoel"],
            "model._target_=own_mine.Mdoel: AttributeError: module 'own_mine' has no attribute 'Mdoel'",
        ),
        (["model._target_=no_such.Model"], "ModuleNotFoundError: No module named 'no_such'"),
        (["model._target_=own_broken.Model"], r"No module named 'no_such_module' \(.*own_broken.py, line 3\)"),
        (["model._target_=own_wrong.Model"], r"SyntaxError: invalid syntax \(.*/own_wrong.py, line 2\)$"),
        (["model._target_=own_script.Model"], r"SystemExit: 3 \(.*/own_script.py, line 3\)$"),
        (["loss._target_=own_mine.thing"], "is a int, which cannot be called"),
        (["model=conv", "user.width=3", "model.kernle=3"], "unexpected keyword argument 'kernle'; it takes"),
        (["model._target_=own_mine.Model"], "missing a required argument: 'width'"),
        (["model=own"], "model=own names no object: use model._target_=MODULE.NAME"),
        (["model=conv"], "Interpolation key 'user.width' not found; add user.width=VALUE"),
        (["optimizer=normed", "optimizer.elementwise=true"], "optimizer=Normed: it is not elementwise"),
        (["optimizer=normed", "topology=tp2"], "optimizers.Normed: steps full parameters, and topology.tensor=2"),
        (["optimizer=adamw", "optimizer.elementwise=true"], "optimizer.elementwise=true has no effect"),
        (
            ["optimizer=adamw", "scheduler=own", f"scheduler._target_={PLATEAU}"],
            "ReduceLROnPlateau: follows a measured loss",
        ),
        (["optimizer=sign", "zero=ddp"], "zero=ddp runs torch's AdamW"),
        (["task=sft", "data=chat", "loss=smooth"], "loss: an own one has no effect with task=sft"),
        (["task=dpo", "data=preferences", "optimizer=sign"], "optimizer: an own one has no effect with task=dpo"),
        (["model.dmi=3"], "model.dmi: there is no such key; did you mean model.dim"),
        (["loss.smoothing=3"], "loss: names no object: use loss._target_=MODULE.NAME"),
        (["user.a b=3"], "user.a b is no key"),
        (["user.größe=3"], "user.größe is no key"),
        (["user=3"], "user=3: write its keys one by one, user.KEY=value"),
        (["reward._target_=own_mine.halve"], "reward: an own one has no effect with task=pretrain"),
        (["data._target_=own_mine.Sharded", "data.share=0.5"], "data.share: ztk passes this argument.*leave it out"),
        (["data._target_=own_mine.Unnamed"], "'share'.*ztk passes it to a parameter `share: ztk.data.Share`"),
        (
            ["optimizer._target_=own_mine.Clips", "optimizer.clip_grad_norm=1"],
            "optimizer.clip_grad_norm: is a key of ztk's",
        ),
        (["task=grpo", "reward._target_=own_mine.Judge", "reward.margin=1"], "reward.margin"),
        (["task=grpo", "reward._target_=own_mine.score", "reward.prompts=[a]"], "reward.prompts: every call passes"),
    ],
)
def test_faults_are_said_before_ranks_start(words, said):
    with pytest.raises(ConfigError, match=said):
        composed(*words)


def test_a_key_of_the_users_that_is_spelt_like_another_is_refused(tmp_path):
    """An option file sets `width`, refers to `height`, and an own group sets `augment.probability`."""
    experiment = "# @package _global_\n# Mine.\nuser:\n  width: 3\n  lr_a: 1\n  lr_b: 1\n"
    write_option(tmp_path / "model" / "tall.yaml", text="# Tall.\n_target_: own_mine.Model\nwidth: ${user.height}\n")
    write_option(tmp_path / "experiment" / "mine.yaml", text=experiment)
    write_option(tmp_path / "augment" / "strong.yaml", text="# Flips.\nprobability: 0.5\n")

    def user(*words: str):
        return compose("experiment=mine", *words, output_dir="/tmp/own", folders=[str(tmp_path)]).user

    for word, near in (
        ("user.widht=64", "width"),
        ("user.heigth=2", "height"),
        ("user.augment.probabilty=1", "augment.probability"),
    ):
        said = f"{word}: no option file has this key; did you mean user.{near}. A new key is written [+]{word}"
        with pytest.raises(ConfigError, match=said):
            user(word)
    assert user("+user.widht=64").widht == 64 and user("user.lr_a=2", "user.lr_b=3").lr_b == 3
    assert user("user.temperature=2", "user.width=4").temperature == 2
    assert user("augment=strong", "user.augment.probability=1").augment.probability == 1


def test_a_share_is_passed_by_its_type_alone():
    """A parameter of this name with another type is the user's."""
    assert composed("data._target_=own_mine.Split", "data.share=0.2").own["data"]["share"] == 0.2
    composed("data._target_=own_mine.Sharded")

    def typed(share: Share, size=1): ...

    def optional(*, share: Share | None = None): ...

    def text(share): ...

    text.__annotations__["share"] = "data.Share | None"  # as `from __future__ import annotations` leaves it

    def other(share: float): ...

    def missing(share): ...

    assert [takes_share(found) for found in (typed, optional, text, other, missing, print)] == [True] * 3 + [False] * 3


def test_a_group_of_the_users_sets_keys_below_user(tmp_path):
    for name, p in (("strong", 0.5), ("weak", 0.1)):
        write_option(tmp_path / "augment" / f"{name}.yaml", text=f"# Flips with p={p}.\np: {p}\n")
    chosen = "# @package _global_\n# Mine.\ndefaults: [override /augment@user.augment: strong]\n"
    write_option(tmp_path / "experiment" / "mine.yaml", text=chosen)
    folders = [str(tmp_path)]
    for words, p in (
        (["experiment=mine"], 0.5),
        (["experiment=mine", "augment=weak"], 0.1),
        (["augment=strong"], 0.5),
        (["+augment=weak"], 0.1),
        (["augment=weak", "user.augment.p=0"], 0),
    ):
        config = compose(*words, output_dir="/tmp/own", folders=folders)
        assert config.user.augment.p == p and from_yaml(to_yaml(config)).user.augment.p == p
    (sent,) = parse_arguments(["augment=strong,weak"], folders=[conf_dir(), *folders], sweep=True)
    assert as_written(sent) == "augment=strong,weak" and as_written("my-aug@user.my-aug=x") == "my-aug=x"
    described = build_reference([conf_dir(), *folders])["augment"]
    assert described.options == {"strong": "Flips with p=0.5.", "weak": "Flips with p=0.1."}
    with pytest.raises(ConfigError, match="augment=none: there is no such option, only strong, weak"):
        compose("augment=none", output_dir="/tmp/own", folders=folders)
    for name, text, said in (
        (
            "broken",
            "a: [1,\n",
            "expected the node content, but found '<stream end>' in \".*/augment/broken.yaml\", line 2",
        ),
        ("twice", "a: 1\na: 2\n", 'found duplicate key a in ".*/augment/twice.yaml", line 2'),
        ("open", "p: ???\n", "user.augment.p: has no value; set it"),
        ("1e3", "p: 1\n", "augment=1e3: the option's name reads as a value, .*rename its file"),
    ):
        write_option(tmp_path / "augment" / f"{name}.yaml", text=text)
        with pytest.raises(ConfigError, match=said):
            compose(f"augment={name}", output_dir="/tmp/own", folders=folders)
    for text, said in (
        ("user: 3", "user: 3 takes the place of its keys"),
        ("model: conv", "model: conv takes .*override /model: conv`"),
        ("user:", ""),
    ):
        write_option(tmp_path / "experiment" / "mine.yaml", text=f"# @package _global_\n{text}\n")
        with pytest.raises(ConfigError, match=said) if said else nullcontext():
            compose("experiment=mine", output_dir="/tmp/own", folders=folders)
    write_option(tmp_path / "my-aug" / "listed.yaml", text="- 1\n")
    assert compose("my-aug=listed", "user.my-aug=[2]", output_dir="/tmp/own", folders=folders).user["my-aug"] == [2]
    write_option(tmp_path / "2fast" / "mine.yaml", text="p: 1\n")
    with pytest.raises(ConfigError, match="2fast: a group's name has .*; rename its folder"):
        compose("2fast=mine", output_dir="/tmp/own", folders=folders)
    with pytest.raises(ConfigError, match="keys of your own are below user: user.mine.alpha=0.1"):
        compose("+mine.alpha=0.1", output_dir="/tmp/own")
    write_option(tmp_path / "augment" / "wide.yaml", text="# @package _global_\ntrain: {steps: 3}\n")
    with pytest.raises(ConfigError, match="wide.yaml: `# @package` does not act in a group of your own"):
        compose("augment=weak", output_dir="/tmp/own", folders=folders)
    write_option(tmp_path / "train" / "mine.yaml", text="steps: 3\n")
    with pytest.raises(ConfigError, match="train: a section of ztk has the name of your group"):
        compose("augment=weak", output_dir="/tmp/own", folders=folders)


def write_option(path: Path, *, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_an_option_file_that_one_of_ztks_would_hide_is_refused(tmp_path):
    folder = tmp_path / "conf"
    (folder / "zero").mkdir(parents=True)
    (folder / "zero" / "stage3.yaml").write_text("# Mine.\nengine: ztk\nstage: 3\nbucket_size: 7\n")
    with pytest.raises(
        ConfigError, match=f"zero=stage3: ztk has an option of this name, .*{folder}/zero/stage3.yaml; rename your file"
    ):
        compose("zero=stage3", output_dir=tmp_path, folders=[str(folder)])
    (folder / "zero" / "stage3.yaml").rename(folder / "zero" / "mine.yaml")
    config = compose("zero=mine", output_dir=tmp_path, folders=[str(folder)])
    assert (config.zero.stage, config.zero.bucket_size) == (3, 7)
