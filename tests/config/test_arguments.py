"""Flags may stand anywhere on the command line."""

import pytest

from ztk.config.arguments import extra_folders, split_flags


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
