"""Ranks of several nodes run the same code, or the run ends before its first step."""

import importlib
import re
import sys
from types import SimpleNamespace

import pytest

from ztk.core.runtime.sources import check_clocks, check_sources, sources


class Broadcast:
    """The collectives of a rank, with another rank 0."""

    def __init__(self, change: dict[str, str]) -> None:
        self.change = change

    def broadcast_object(self, obj, *, label: str):
        host, own = obj
        return "node0", own | self.change


def process_of(change: dict[str, str], *, local_world_size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(rank=1, world_size=2, local_world_size=local_world_size, comm=Broadcast(change))


@pytest.fixture
def own_module(tmp_path, monkeypatch) -> str:
    """A module of the user's, imported."""
    (tmp_path / "mymodel.py").write_text("width = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("mymodel")
    yield "mymodel"
    del sys.modules["mymodel"]


def test_equal_code_and_modules_of_one_rank_alone_are_accepted(own_module):
    assert own_module in sources()
    check_sources(process_of({}))
    check_sources(process_of({"only.on.rank0": "1234"}))


@pytest.mark.parametrize("name", ["mymodel", "ztk.core.runtime.sources"])
def test_other_code_on_a_node_is_named(own_module, name):
    with pytest.raises(ValueError, match=f"rank 1 on .* runs other code than rank 0 on node0: {name}; install"):
        check_sources(process_of({name: "1234"}))
    check_sources(process_of({name: "1234"}, local_world_size=2))  # one node has one set of files


def test_another_version_on_a_node_is_named():
    version = re.escape(sources()["version of torch"])
    with pytest.raises(ValueError, match=f"version of torch {version} for 2.0.0"):
        check_sources(process_of({"version of torch": "2.0.0"}))


class Clocks:
    """The collectives of rank 0, with the clock of another node."""

    def __init__(self, ahead: float) -> None:
        self.ahead, self.waited = ahead, False

    def barrier(self) -> None:
        self.waited = True

    def collect_objects(self, obj, *, label: str):
        assert self.waited, "a rank that arrives late looks like a clock that is ahead"
        now, host = obj
        return [(now, host), (now + self.ahead, "node1")]


@pytest.mark.parametrize(
    ("ahead", "text"), [(60.0, "node1 is 60 s ahead"), (-7.0, "7 s ahead of the clock of node1"), (3.0, "")]
)
def test_clocks_that_differ_are_reported(caplog, ahead, text):
    check_clocks(SimpleNamespace(rank=0, world_size=2, local_world_size=1, comm=Clocks(ahead)))
    assert text in caplog.text and bool(caplog.text) == bool(text)
    check_clocks(SimpleNamespace(rank=0, world_size=2, local_world_size=2, comm=None))  # one node has one clock
