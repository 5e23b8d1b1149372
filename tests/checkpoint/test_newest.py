"""An unattended restart continues from the newest complete checkpoint and reports the damaged ones."""

import shutil
import warnings
from pathlib import Path

import pytest

from tests.checkpoint.runs import Setup, canonical, digest, reload, save_some
from tests.zero.models import Layout
from ztk.checkpoint import load_newest

SETUP = Setup(layout=Layout(stage=3, offload="cpu"))


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(save_some, setup=SETUP, folder=str(folder), steps=[1, 2])
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def flip(path: Path) -> None:
    """The last byte is one of the state's."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_a_complete_one_is_loaded_without_a_warning(ranks, copy):
    found = ranks(2).run(newest, folder=str(copy))
    assert [(name, faults, told) for name, faults, told, _ in found] == [("step-000002", (), [])] * 2


@pytest.mark.parametrize("spoil", [flip, cut, Path.unlink])
@pytest.mark.parametrize("file", ["rank-00001.safetensors", "manifest.json"])
def test_a_damaged_one_is_skipped_and_named(ranks, copy, saved, file, spoil):
    spoiled = copy / "step-000002" / file
    spoil(spoiled)
    (name, faults, told, states), other = ranks(2).run(newest, folder=str(copy))
    assert name == "step-000001" and len(faults) == 1 and str(spoiled) in faults[0]
    assert len(told) == 1 and str(spoiled) in told[0] and str(copy / name) in told[0]
    assert other == (name, faults, [], states)
    assert states == ranks(2).run(reload, setup=SETUP, folder=str(saved / name))[0].states


def test_a_pointer_to_a_missing_checkpoint_is_reported(ranks, copy):
    (copy / "latest").write_text("step-000009\n")
    name, faults, told, _ = ranks(2).run(newest, folder=str(copy))[0]
    assert name == "step-000002" and "step-000009" in faults[0] and "step-000009" in told[0]


def test_without_a_complete_checkpoint_nothing_starts(ranks, copy, tmp_path):
    for step in (1, 2):
        flip(copy / f"step-00000{step}" / "rank-00000.safetensors")
    texts = ranks(2).run(newest_error, folder=str(copy), setup=SETUP)
    assert texts[0] == texts[1]
    assert all(f"step-00000{step}/rank-00000.safetensors" in texts[0] for step in (1, 2)) and "start again" in texts[0]
    assert ranks(2).run(newest_error, folder=str(tmp_path / "none"), setup=SETUP) == ["nothing"] * 2


def test_an_older_one_is_not_tried_after_another_optimizer(ranks, copy):
    texts = ranks(2).run(newest_error, folder=str(copy), setup=Setup(optimizer="sgd"))
    assert "another optimizer" in texts[0] and "no complete checkpoint" not in texts[0]


def newest(process, *, folder: str) -> tuple[str, tuple[str, ...], list[str], str]:
    """Loads the newest checkpoint. Returns its name, the faults, this rank's warnings, and a hash of all states."""
    engine = SETUP.engine(process)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_newest(engine, folder=folder)
    told = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert engine.global_steps == report.step
    return report.path.name, report.passed_over, told, digest(canonical(engine))


def newest_error(process, *, folder: str, setup: Setup) -> str:
    try:
        return "nothing" if load_newest(setup.engine(process), folder=folder) is None else "loaded"
    except ValueError as error:
        return str(error)
