"""`--help GROUP`: every group, option, key, default and meaning, from the schema and the option files."""

import subprocess
import sys
from pathlib import Path

import pytest

from ztk.cli.help import requested_help
from ztk.config import ConfigError, build_reference, conf_dir
from ztk.config.arguments import options_of
from ztk.config.keys import line_keys

CHECKOUT = Path(__file__).parents[2]
REFERENCE = build_reference([conf_dir()])


def words(text: str) -> str:
    """Without line breaks and columns, which depend on the terminal."""
    return " ".join(text.split())


def test_every_group_option_and_key_has_a_meaning():
    options = options_of([conf_dir()])
    assert {group: sorted(found.options) for group, found in REFERENCE.items() if found.options} == options
    keys = [key for group in REFERENCE.values() for key in group.keys]
    assert sorted(key.name for key in keys) == sorted(line_keys())
    unsaid = [key.name for key in keys if not (key.meaning and key.takes and key.default)]
    unsaid += [
        f"{name}={option}" for name, group in REFERENCE.items() for option in group.options if not group.options[option]
    ]
    assert not unsaid and all(group.meaning for group in REFERENCE.values())


def test_defaults_come_from_the_option_files():
    defaults = {key.name: key.default for group in REFERENCE.values() for key in group.keys}
    assert defaults["train.steps"] == "300; 150 with task=dpo, task=grpo, task=ppo"
    assert defaults["advantage.baseline"] == (
        "mean with algorithm=cispo, algorithm=dapo, algorithm=dr_grpo, algorithm=grpo, algorithm=gspo; critic with algorithm=ppo; "
        "leave_one_out with algorithm=rloo"
    )
    assert defaults["zero.stage"] == "0; 1 with stage1; 2 with stage2; 3 with stage3"
    assert defaults["offload.threads"] == "4"
    assert defaults["logger.every"] == "as train.log_every"
    assert defaults["offload.pin_memory"] == "null"  # no option sets it


def test_a_group_is_shown_completely():
    text = words(requested_help(["--help", "zero"]))
    assert text.startswith("zero: Which of optimizer states") and "zero=OPTION, stage0 unless chosen" in text
    for name, group in REFERENCE.items():
        shown = words(requested_help([name, "--help"]))
        for option, meaning in group.options.items():
            assert f"{option} {words(meaning)}" in shown
        for key in group.keys:
            assert f"{key.name} {words(key.meaning)} takes {key.takes} default {key.default}" in shown


def test_one_key_is_shown_alone():
    text = words(requested_help(["-h", "offload.buffer_bytes"]))
    assert text.startswith("offload.buffer_bytes bytes of one buffer")
    assert "takes a whole number, a multiple of 4096, or null" in text
    assert text.endswith("default 33554432 only with offload=nvme in a run that trains")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (["--help", "zeros"], "did you mean"),
        (["--help", "zero.stages"], "did you mean zero.stage"),
        (["--help", "zero", "train.steps=3"], "leave out train.steps=3"),
    ],
)
def test_what_cannot_be_shown_is_refused(line, fault):
    with pytest.raises(ConfigError, match=fault):
        requested_help(line)


def test_other_command_lines_ask_for_no_group():
    assert requested_help(["zero=stage3", "--help"]) is None and requested_help(["--help"]) is None
    assert requested_help(["zero", "train.steps=3"]) is None


def test_run_py_prints_it(tmp_path):
    command = [sys.executable, str(CHECKOUT / "run.py"), "--help", "zero"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and words(done.stdout) == words(requested_help(["--help", "zero"]))
    assert not list(tmp_path.iterdir())
