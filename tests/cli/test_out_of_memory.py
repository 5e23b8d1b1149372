"""A run out of memory: it writes the rank's memory next to the plan, and its own error comes first."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from ztk import worker
from ztk.cli.out_of_memory import print_plan
from ztk.config import Machine, compose, save
from ztk.core.launch import forget_failure, memory_path, read_failure
from ztk.core.runtime import MemoryLedger, Tier
from ztk.core.runtime.out_of_memory import is_out_of_memory, memory_state

WORDS = ("model=nano", "data=synthetic", "data.seq_len=64", "launch.ranks=2", "zero=stage2")
ERRORS = (torch.OutOfMemoryError("tried to allocate 2.00 GiB"), ValueError("no"))


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """Makes a rank of a run fail with an error while a ledger exists. Returns the run's folder."""
    config = compose(*WORDS, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
    save(config, path=tmp_path / "config.yaml")
    monkeypatch.setattr(worker, "log_to", lambda path, appends: sys.stderr)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)

    def fail(error: Exception):
        def main(config):
            ledger = MemoryLedger()
            ledger.add(tier=Tier.device, category="only here", nbytes=123_000_000)
            raise error

        monkeypatch.setattr(worker, "import_task", lambda name: SimpleNamespace(main=main))
        assert worker.run_task(config, rank=0, end=worker.leave) is not None
        return tmp_path

    return fail


def test_held_memory_is_shown_next_to_the_plan(failed, capsys):
    folder = failed(ERRORS[0])
    assert json.loads(memory_path(folder, rank=0).read_text())["booked"]["device"]["only here"] >= 123_000_000
    capsys.readouterr()
    print_plan(folder, rank=0)
    shown = capsys.readouterr().err
    assert "out of memory on rank 0: the plan of the run compared with the rank's memory" in shown
    rows = {line.split("  ")[1].strip(): line.split() for line in shown.splitlines() if line.startswith("ztk:   ")}
    assert rows["only here"][-2:] == ["123", "MB"] and "parameters" in rows and "max resident" in rows
    assert "the plan has its peak in" in shown and (folder / "out_of_memory.txt").is_file()
    forget_failure(folder, rank=0)
    print_plan(folder, rank=0)
    assert not capsys.readouterr().err


def test_other_errors_leave_no_measurement(failed):
    assert not memory_path(failed(ERRORS[1]), rank=0).exists()


def test_the_first_error_is_never_hidden(failed, monkeypatch, capsys):
    def broken():
        raise RuntimeError("second")

    monkeypatch.setattr("ztk.core.runtime.out_of_memory.memory_state", broken)
    folder = failed(ERRORS[0])
    failure = read_failure(folder, rank=0)
    assert (
        failure is not None
        and failure.kind == "OutOfMemoryError"
        and "cannot list the memory it holds: second" in capsys.readouterr().err
    )
    memory_path(folder, rank=0).write_text("nothing")
    print_plan(folder, rank=0)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and shown[0].startswith("ztk: no plan to compare with: ")


@pytest.mark.parametrize(
    "error, is_it",
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("x"), False),
    ],
)
def test_errors_of_allocators(error, is_it):
    assert is_out_of_memory(error) is is_it


def test_an_allocator_really_says_so():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert memory_state().device["resident"] > 0
