"""The wheel without the checkout: in a fresh environment, the command `ztk` behaves like `python run.py`."""

import inspect
import json
import sys
from pathlib import Path

import pytest

import ztk
import ztk.deepspeed
from tests.commands import run_command
from tests.wheel import CHECKOUT, install_wheel, start

RUN = (
    "zero=stage3",
    "offload=nvme",
    "train.steps=5",
    "train.micro_batch_size=2",
    "data.seq_len=32",
    "train.eval_every=0",
)
RUN += ("train.eval_batches=1", "logger=disabled", "hydra.run.dir=run", "launch.ranks=1", "launch.threads=1")
OWN_PROGRAM = """
import conf, scripts, tests
from experiments import own
from ztk.experiments import policies
def main(config):
    print("a program of one's own,", own.NAME, conf.NAME, scripts.NAME, tests.NAME, policies.zero_policy(config))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The `bin` folder of an environment with only the wheel."""
    found = install_wheel(tmp_path_factory.mktemp("wheel"))
    (site_packages,) = found.parent.glob("lib/python*/site-packages")
    assert {path.name for path in (site_packages / "ztk" / "experiments").glob("*.py")} == {
        path.name for path in (CHECKOUT / "experiments").glob("*.py")
    }
    assert (site_packages / "ztk" / "py.typed").is_file()  # type checkers read ztk's annotations only then
    assert not list(site_packages.rglob("results")) and not (site_packages / "experiments").exists()
    return found


def test_it_trains_as_the_checkout_does(installed, tmp_path):
    found = {}
    for name in ("ztk", "run.py"):
        place = tmp_path / name
        place.mkdir()
        done = start(installed / "ztk", *RUN, cwd=place) if name == "ztk" else run_command(*RUN, cwd=place)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads((place / "run" / "summary.json").read_text())
    assert found["ztk"]["steps"] == 5 and found["ztk"]["status"] == "done"
    assert found["ztk"]["loss_digest"] == found["run.py"]["loss_digest"]
    # tests/commands.py leaves these out.
    assert len(found["ztk"]["sample"]) > len(found["run.py"]["sample"]) and (tmp_path / "ztk/run/run.png").is_file()


@pytest.mark.parametrize("command", ["ztk", "run.py"])
def test_a_users_packages_win_over_folders_of_the_checkout(command, installed, tmp_path):
    for name in ("experiments", "conf", "scripts", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"NAME = 'my {name}'\n")
    (tmp_path / "experiments" / "own.py").write_text("NAME = 'my own'\n")
    (tmp_path / "experiments" / "pretrain.py").write_text(OWN_PROGRAM)  # a name that ztk has, too
    words = ("task.module=experiments.pretrain", "launch.ranks=1", "zero=stage1", "hydra.run.dir=run")
    program = (installed / "ztk",) if command == "ztk" else (sys.executable, CHECKOUT / "run.py")
    done = start(*program, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a program of one's own, my own my conf my scripts my tests ZeroPolicy(stage=1" in done.stdout


def test_its_help_and_exit_codes_equal_run_pys(installed, tmp_path):
    for line, code in ((("--help",), 0), (("zero=stage9",), 2)):
        told = [start(*c, *line, cwd=tmp_path) for c in ((installed / "ztk",), (sys.executable, CHECKOUT / "run.py"))]
        assert [done.returncode for done in told] == [code, code]
        assert told[0].stdout == told[1].stdout and told[0].stderr == told[1].stderr
    assert "zero: ddp, fsdp2, stage0" in start(installed / "python", "-m", "ztk", "--help", cwd=tmp_path).stdout


def _members(name: str) -> list[str]:
    """Public members of a public class of ztk that its own classes define."""
    cls = getattr(ztk, name)
    own = [one for one in cls.__mro__ if one.__module__.startswith("ztk.")] if inspect.isclass(cls) else []
    return sorted(
        {member for one in own for member in (*vars(one), *one.__annotations__) if not member.startswith("_")}
    )


def _check_types(code: str, *, installed: Path, folder: Path) -> list[str]:
    """A line for each finding of pyrefly's strict check of a user's file, revealed types included."""
    (folder / "user.py").write_text(code)
    options = ("--preset", "strict", "--min-severity", "info", "--output-format", "min-text")
    command = (sys.executable, "-m", "pyrefly", "check", "--python-interpreter-path", installed / "python", *options)
    done = start(*command, "user.py", cwd=folder)
    return [line.strip() for line in done.stdout.splitlines() if "user.py:" in line]


def test_a_type_checker_finds_a_type_for_every_public_name(installed, tmp_path):
    code = ["import typing", "import ztk", "import ztk.deepspeed"]
    code += [f"typing.reveal_type(ztk.deepspeed.{name})" for name in ztk.deepspeed.__all__]
    for name in ztk.__all__:
        code.append(f"typing.reveal_type(ztk.{name})")
        if members := _members(name):
            code += [f"typing.reveal_type(ztk.{name}.__init__)", f"def of_{name}(x: ztk.{name}) -> None:"]
            code += [f"    typing.reveal_type(x.{member})" for member in members]
    found = _check_types("\n".join(code), installed=installed, folder=tmp_path)
    assert len(found) == sum("reveal_type" in line for line in code)
    faults = [line for line in found if not line.startswith("INFO") or "Unknown" in line or ": object [" in line]
    assert not faults, "\n".join(faults)


def test_a_type_checker_reports_a_misspelt_name_and_key(installed, tmp_path):
    code = "import ztk\nztk.paralelize\nztk.ZeroPolicy(stages=3)\n"
    found = _check_types(code, installed=installed, folder=tmp_path)
    assert [line.split(":")[:2] for line in found] == [["ERROR user.py", "2"], ["ERROR user.py", "3"]], found
