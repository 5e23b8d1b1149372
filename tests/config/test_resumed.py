"""`checkpoint.resume=RUN` takes the run's options; options on the command line replace them."""

import json
import re

import pytest

from tests.commands import run_command
from tests.config.test_config import CPU
from ztk.cli.interrupted import resume_line
from ztk.config import ConfigError, check_resumed, compose, differences, from_yaml, load, save, take_run_words, to_yaml

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
    with pytest.raises(ConfigError, match="names code, .* rollout.environment=.* or add trust=true"):
        take_run_words([f"checkpoint.resume={run}"])
    taken = take_run_words([f"checkpoint.resume={run}", "trust=true"]).taken
    assert any(word.startswith("rollout.environment=") and f"{tmp_path}/mine.py:Env" in word for word in taken)


NAMING = (
    "model._target_=torch.nn.Linear",
    "+callbacks.x._target_=mine.Log",
    "callbacks.x={_target_:mine.Log}",
    "optimizer.inner={a:[{_target_:os.system}]}",
    "user._schema_=mine.Options",
    "task.module=mine",
    "reward.function=mine.py:score",
    "reward.functions=[mine:score]",
    "reward.eval_functions=[mine:score]",
    "rollout.environment=mine:Env",
    "hydra.callbacks.x._target_=mine.Log",
    "hydra/launcher=joblib",
    "hydra.searchpath=[file:///tmp]",
    "experiment@callbacks.x=mine",
    "train.steps=${oc.env:STEPS}",
    "user.a=${oc.create:${user.b}}",
)


@pytest.mark.parametrize("word", NAMING)
def test_a_word_of_a_record_that_names_code_acts_if_the_line_repeats_it(run, word):
    file = run / "overrides.json"
    key, _, value = word.partition("=")
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    line = f"checkpoint.resume={run}"
    with pytest.raises(
        ConfigError, match=rf"{re.escape(f'{file}: names code')}.* runs none: {re.escape(word)}\. .*trust=true"
    ):
        take_run_words([line])
    assert word in take_run_words([line, "trust=true"]).taken
    for own in (word, f"{key.lstrip('+')}=other"):
        again = take_run_words([line, own])
        assert word not in again.taken and own in again.words
    assert take_run_words([line, "trust=true"]).words[-1] == line  # no word of a run


@pytest.mark.parametrize(
    "word", ["model=nano", "user.width=8", "augment@user.augment=strong", "reward.function=null", "~loss"]
)
def test_other_words_of_a_record_act(run, word):
    key, _, value = word.partition("=")
    (run / "overrides.json").write_text(json.dumps({key: value}))
    assert take_run_words([f"checkpoint.resume={run}"]).taken == (word,)


def test_an_option_file_that_takes_its_target_from_a_key_needs_this_key_on_the_line(run, tmp_path):
    (run / "overrides.json").write_text(json.dumps({"user.kind": "os.system", "train.steps": "3"}))
    (tmp_path / "conf" / "model").mkdir(parents=True)
    option = tmp_path / "conf" / "model" / "mine.yaml"
    option.write_text("_target_: mine.Net\nwidth: ${user.width}\n")
    folders, line = [str(tmp_path / "conf")], f"checkpoint.resume={run}"
    assert take_run_words([line], folders=folders).taken == ("user.kind=os.system", "train.steps=3")
    option.write_text("inner:\n  - _target_: ${user.kind}\n")
    with pytest.raises(ConfigError, match="runs none: user.kind=os.system. "):
        take_run_words([line], folders=folders)
    take_run_words([line, "user.kind=mine.Net"], folders=folders)


@pytest.mark.parametrize("word", ["trust=true", "trust=false"])
def test_trust_without_a_record_and_other_values_are_refused(run, word):
    with pytest.raises(ConfigError, match=f"{word} has no effect without checkpoint.resume=RUN or sweep.resume=FOLDER"):
        take_run_words([word, "model=nano"])
    with pytest.raises(ConfigError, match="trust=all: must be true or false"):
        take_run_words(["trust=all", f"checkpoint.resume={run}"])


def test_the_line_that_continues_a_run_repeats_its_code(run):
    (run / "overrides.json").write_text(json.dumps({"model": "nano", "callbacks.x._target_": "mine.Log"}))
    assert "callbacks.x._target_=mine.Log checkpoint.resume=" in resume_line(run)


def test_texts_with_dollars_are_kept_and_not_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("ZTK_SECRET", "4f1d7c")
    config = compose("model=nano", output_dir=tmp_path, machine=CPU)
    texts = ["${oc.env:ZTK_SECRET}", r"\${a}", r"\\${a}", "a$b", "\\"]
    config.data.path, config.user = texts, {"own": texts[0]}
    for read_back in (from_yaml(to_yaml(config)), _loaded(config, path=tmp_path / "config.yaml")):
        assert read_back.data.path == texts
        assert to_yaml(read_back) == to_yaml(config)


def _loaded(config, *, path):
    save(config, path=path)
    return load(path)


@pytest.mark.parametrize(
    "text", ["3", "[]", "model: 3", "a: b: c", "train: {steps: '${x}'}", "model: !!python/name:os.system"]
)
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/config.yaml: is no record of a run")):
        load(tmp_path / "config.yaml")


def test_callbacks_may_differ(run):
    """D3: a callback counted as other numbers."""
    words = (f"checkpoint.resume={run}", "callbacks.mine._target_=ztk.train.loop.Callback")
    config = compose(*words, output_dir=run.parent / "new", machine=CPU)
    check_resumed(config)
    assert differences(compose(*words[:1], output_dir=run, machine=CPU), now=config)  # another experiment


def test_a_folder_of_options_that_the_line_lacks_is_named(run):
    """D10: the run's option was unknown, without a hint."""
    recorded = json.loads((run / "overrides.json").read_text()) | {"model": "mine"}
    (run / "overrides.json").write_text(json.dumps(recorded))
    (run / "env.json").write_text(json.dumps({"command": "run.py --config-dir my/options model=mine zero=stage3"}))
    done = run_command(f"checkpoint.resume={run}", cwd=run.parent)
    assert done.returncode == 2 and "model=mine: there is no such option" in done.stderr
    assert f"{run} was started with --config-dir my/options: repeat it" in done.stderr, done.stderr


def test_a_checkpoint_is_compared_by_its_own_record(run):
    """The run's last start had another rate."""
    own = (run / "config.yaml").read_text()
    (run / "checkpoints" / "step-000002" / "run.yaml").write_text(own)
    (run / "config.yaml").write_text(own.replace("lr: 0.002", "lr: 0.5"))
    check_resumed(compose(f"checkpoint.resume={run}", output_dir=run.parent / "new", machine=CPU))
    changed = compose(f"checkpoint.resume={run}", "optimizer.lr=0.5", output_dir=run.parent / "new", machine=CPU)
    with pytest.raises(ConfigError, match=r"optimizer.lr=0.5: the checkpoint's run has optimizer.lr=0.002 .*run.yaml"):
        check_resumed(changed)


def test_overwrite_is_no_folder(tmp_path, monkeypatch):
    """Started in a run folder, it would take that run's options."""
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "overrides.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = compose("model=nano", "checkpoint.resume=overwrite", output_dir=tmp_path / "run", machine=CPU)
    assert config.overwrites and config.checkpoint.resume is None
