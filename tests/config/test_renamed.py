"""Keys with a new name: the old one is accepted for one release, with a note."""

import pytest

from ztk.config import ConfigError, Machine, compose, from_yaml, rename_keys, to_yaml
from ztk.config.keys import read, run_keys
from ztk.config.renamed import renamed

RENAMED = renamed()

CPU = Machine(gpus=0, cores=2)
USES = {
    "zero.secondary_shards": (("zero=stage3",), "2", 2),
    "topology.sequence_norms": (("topology=tp2",), "true", True),
    "rollout.ahead": (("task=grpo",), "1", 1),
}


def test_every_renamed_key_is_tested_and_its_new_name_exists():
    assert set(USES) == set(RENAMED) and set(RENAMED.values()) <= set(run_keys())
    assert not set(RENAMED) & set(run_keys())


@pytest.mark.parametrize("old", RENAMED)
def test_the_old_name_has_the_effect_of_the_new_one(old, tmp_path):
    others, text, value = USES[old]
    config = compose(*others, f"{old}={text}", output_dir=tmp_path, machine=CPU)
    assert read(config, key=RENAMED[old]) == value
    assert config == compose(*others, f"{RENAMED[old]}={text}", output_dir=tmp_path, machine=CPU)
    (note,) = rename_keys([*others, f"{old}={text}"]).notes
    assert old in note and RENAMED[old] in note


@pytest.mark.parametrize("old", RENAMED)
def test_both_names_are_refused(old, tmp_path):
    others, text, _ = USES[old]
    with pytest.raises(ConfigError, match=f"{old}: is the old name of {RENAMED[old]}.*keep {RENAMED[old]}"):
        compose(*others, f"{old}={text}", f"{RENAMED[old]}={text}", output_dir=tmp_path, machine=CPU)


@pytest.mark.parametrize("old", RENAMED)
def test_a_recorded_configuration_of_an_earlier_release_is_read(old, tmp_path):
    others, text, _ = USES[old]
    config = compose(*others, f"{RENAMED[old]}={text}", output_dir=tmp_path, machine=CPU)
    name, new = old.partition(".")[2], RENAMED[old].partition(".")[2]
    earlier = to_yaml(config).replace(f"  {new}: ", f"  {name}: ")
    assert name in earlier and from_yaml(earlier) == config


def test_the_command_prints_the_note(monkeypatch, capsys):
    from ztk.cli.session import Session

    monkeypatch.setattr("sys.argv", ["run.py", "zero=stage3", "zero.secondary_shards=2"])
    assert Session().main(lambda: None) == 0
    assert "zero.secondary_shards is called zero.hpz_partition_size now" in capsys.readouterr().err
