"""Flags may stand anywhere on the command line."""

import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import ztk
from tests.commands import run_command
from ztk.config import ConfigError, compose
from ztk.config.arguments import (
    check_doubled,
    conf_dir,
    extra_folders,
    folder_of_run,
    parse_arguments,
    split_flags,
)


@pytest.mark.parametrize(
    "line, flags, overrides",
    [
        ("zero=stage3 -m", "-m", "zero=stage3"),
        ("zero=stage3 --multirun train.steps=2", "--multirun", "zero=stage3 train.steps=2"),
        ("a=1 --cfg job b=2 --resolve", "--cfg job --resolve", "a=1 b=2"),
        ("a=1 --config-dir mine b=2", "--config-dir mine", "a=1 b=2"),
        ("a=1 --info defaults-tree", "--info defaults-tree", "a=1"),
        ("--info a=1", "--info", "a=1"),
        ("-h", "-h", ""),
        ("", "", ""),
    ],
)
def test_flags_come_first(line, flags, overrides):
    assert split_flags(line.split()) == (flags.split(), overrides.split())


def test_folders_of_further_options():
    assert extra_folders(["--config-dir", "a", "-m", "--config-dir=b"]) == ["a", "b"]


@pytest.mark.parametrize(
    "line, fault",
    [
        ("zero=stage1 zero=stage3", "zero=stage1 and zero=stage3: zero has one value; keep one"),
        ("train.steps=5 zero=stage1 ++train.steps=6 train.steps=5", "train.steps=5 and train.steps=6"),
        ("hydra.run.dir=a hydra.run.dir=b", "hydra.run.dir=a and hydra.run.dir=b"),
        ("data.path=a=b data.path=a=c", "data.path=a=b and data.path=a=c"),
        ("--cfg job zero=stage1 --cfg=all", "--cfg=all and --cfg=job"),
    ],
)
def test_two_values_of_one_name_are_refused(line, fault):
    flags, overrides = split_flags(line.split())
    with pytest.raises(ConfigError, match=re.escape(fault)):
        check_doubled(overrides, flags=flags)


def test_one_value_twice_is_one_value():
    check_doubled(
        ["zero=stage2", "train.steps=5", "zero=stage2"], flags=["--config-dir", "a", "-m", "--config-dir", "a"]
    )


def test_folders_of_options_are_named_by_their_flag(tmp_path):
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "a" / "model" / "mine.yaml").write_text("dim: 64\n")
    (tmp_path / "b" / "model").mkdir(parents=True)
    (tmp_path / "b" / "model" / "mine.yaml").write_text("dim: 32\n")
    with pytest.raises(ConfigError, match="hydra.searchpath=.*: own options are found by --config-dir FOLDER"):
        ztk.plan_run(f"hydra.searchpath=[file://{tmp_path / 'a'}]", model="mine")
    with pytest.raises(
        ConfigError, match=r"model=mine: is in .*a/model/mine.yaml and in .*b/model/mine.yaml, and they"
    ):
        ztk.plan_run(model="mine", config_dir=[tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match="config_dir=.*/missing: there is no such folder"):
        ztk.plan_run(config_dir=tmp_path / "missing")
    refused = run_command("--config-dir", "missing", cwd=tmp_path)
    assert refused.returncode == 2 and "--config-dir=" in refused.stderr and "no such folder" in refused.stderr


def test_a_command_and_a_call_refuse_two_values(tmp_path):
    refused = run_command("zero=stage1", "zero=stage3", cwd=tmp_path)
    assert refused.returncode == 2 and "zero=stage1 and zero=stage3: zero has one value" in refused.stderr
    with pytest.raises(ValueError, match="zero=stage1 and zero=stage3"):
        ztk.plan_run("zero=stage1", zero="stage3")


@pytest.mark.parametrize(
    "name",
    [
        "plain/run",
        "a b,c",
        "x[1]",
        "é=1",
        "k{a}",
        "q'uote",
        'say "x"',
        "1e3",
        "007",
        "null",
        "pa(ren)",
        "#1",
        "back\\",
        "b\\'q",
    ],
)
def test_a_folder_has_the_name_that_the_line_gives(name, tmp_path):
    """Hydra reads a number, a list or nothing readable in some of them."""
    words = parse_arguments([f"hydra.run.dir={name}"], folders=[conf_dir()])
    assert folder_of_run(words) == name and parse_arguments(words, folders=[conf_dir()]) == words
    config = compose(output_dir=tmp_path / name)
    assert config.output_dir == str(tmp_path / name)


def test_an_unreadable_word_for_hydra_names_the_fix():
    with pytest.raises(ConfigError, match="hydra.job.name=a'b: not readable; put quotes around the value"):
        parse_arguments(["hydra.job.name=a'b"], folders=[conf_dir()])


@pytest.mark.parametrize("text", ["2026_11_30", "007", "1e3", "1_0.5", "true", "False", "-1", "inf", "nan", "12"])
def test_a_text_key_keeps_what_reads_as_a_number(text, tmp_path, monkeypatch):
    """Hydra reads the folder 2026_11_30 as 20261130. A folder, a list of texts, a list of folders, and a sweep."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / text).mkdir()
    (tmp_path / text / "mine.jsonl").write_text('{"prompt": "a="}\n')
    (tmp_path / "mine.py").write_text("def score(completions): return [0.0] * len(completions)\n")
    own = ("task=grpo", "reward.function=mine.py:score", "rollout.task=null", "warm_start.steps=0")
    config = compose(*own, f"data.path={text}", f"rollout.stop=[{text}, b]", output_dir=tmp_path / "run")
    assert config.rollout.stop == [text, "b"] and config.data.path == [str(tmp_path / text)]
    several = compose(*own, f"data.path=[{text},{text}/mine.jsonl]", output_dir=tmp_path / "run").data.path
    assert several == [str(tmp_path / text), str(tmp_path / text / "mine.jsonl")]
    (swept,) = parse_arguments([f"model.path={text},b"], folders=[conf_dir()], sweep=True)
    first, second = OverridesParser.create().parse_override(swept).value().list
    assert (getattr(first, "text", first), second) == (text, "b")  # quoted where Hydra reads something else


@pytest.mark.parametrize("value", ["it's.txt", "x[1].txt", "k{a}", 'say "x"', "a'b\"c\\", "a'\\"])
def test_the_word_that_an_error_names_is_the_shells(value):
    """The command line of a shell with the named word sets the text."""
    with pytest.raises(ConfigError) as raised:
        parse_arguments([f"model.path={value}"], folders=[conf_dir()])
    (word,) = shlex.split(str(raised.value).partition("as in ")[2])
    assert OverridesParser.create().parse_override(word).value() == value
