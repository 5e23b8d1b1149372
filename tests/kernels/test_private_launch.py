"""The private names of torch and Triton: in one file, checked against the releases at hand, with a switch back to the public launch."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ztk.kernels
from ztk.kernels.launch import private

KERNELS = Path(ztk.kernels.__file__).parent
PRIVATE = re.compile(r"\btorch\._C\b|\btriton\.(runtime|compiler|backends)\b")


def test_private_names_are_in_one_file():
    found = {str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert found == {"launch/private.py"}


def test_the_releases_at_hand_have_every_name_and_are_tested():
    assert private._missing == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert private.is_short("", versions=private.VERSIONS, missing=[])


OLDEST = {"torch": "2.11.0+cu130", "triton": "3.6.0"}


@pytest.mark.parametrize(
    ("switch", "versions", "missing", "is_short"),
    [
        ("", OLDEST, [], True),
        ("", {"torch": "2.13.1", "triton": "3.9.2"}, [], True),
        ("public", OLDEST, [], False),
        ("public", {"torch": "2.14.0", "triton": "3.10.0"}, ["triton.x"], False),
        ("private", {"torch": "2.14.0", "triton": "3.10.0"}, [], True),
    ],
)
def test_the_switch_and_tested_releases_decide(switch, versions, missing, is_short):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert private.is_short(switch, versions=versions, missing=missing) is is_short


@pytest.mark.parametrize(
    ("versions", "missing"),
    [
        ({"torch": "2.14.0", "triton": "3.9.0"}, []),
        ({"torch": "2.12.0", "triton": "3.10.0"}, []),
        (OLDEST, ["triton.x"]),
    ],
)
def test_untested_releases_are_launched_publicly_with_a_warning(versions, missing):
    with pytest.warns(UserWarning, match="ZTK_LAUNCH=public to confirm"):
        assert not private.is_short("", versions=versions, missing=missing)


def test_wrong_values_of_the_switch_are_refused():
    with pytest.raises(ValueError, match="ZTK_LAUNCH=short is unknown: set it to public or private"):
        private.is_short("short", versions=OLDEST, missing=[])
    with pytest.raises(ValueError, match=r"torch 2.11.0\+cu130 and triton 3.6.0 have no triton.x"):
        private.is_short("private", versions=OLDEST, missing=["triton.x"])


def started(launch: str) -> dict:
    """The output of tests/kernels/started.py."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", private.SWITCH: launch}
    command = [sys.executable, "-m", "tests.kernels.started"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def short():
    return started("private")


def test_the_sizes_of_a_serving_step_compile_once(short):
    """A kernel of a decoding step has one program for any number of rows and blocks: a second one would be compiled while users wait."""
    kernels = {"draw_rows": 2, "paged_attention": 2, "moe_route": 3}
    assert len(short["programs"]) == 9
    assert short["programs"] == {op: kernels.get(op, 1) for op in short["programs"]}


def test_the_public_launch_equals_the_direct_launch(short):
    public = started("public")
    assert (public["is_short"], short["is_short"]) == (False, True)
    assert len(public["started"]) > 50
    assert public["started"] == short["started"]
