"""Trained weights never vanish: the last step is saved, a run that was ended by a signal resumes, and the newest step answers."""

import json
import os
import signal
import sys
import weakref

import pytest

from tests.commands import run_command
from tests.slow.test_kill_runs import kill_often
from ztk.cli.jobs import Job
from ztk.cli.session import Session
from ztk.config import ConfigError, compose, save
from ztk.core.launch.processes import Child, run_children
from ztk.core.launch.signals import noted_signals
from ztk.report.status import Status

TINY = (
    "model=nano",
    "train.micro_batch_size=1",
    "data.seq_len=32",
    "launch.ranks=1",
    "launch.threads=1",
    "logger=disabled",
)


def test_the_last_step_is_saved_and_answers(tmp_path):
    place = "hydra.run.dir=run"
    done = run_command(*TINY, "train.steps=5", "checkpoint.every=2", "train.quick=true", place, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("run/checkpoints/step-*")) == ["step-000004", "step-000005"]
    words = (
        "task=generate",
        "inference.model=run",
        "sampling.max_tokens=4",
        "hydra.run.dir=answers",
        "launch.threads=1",
    )
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 0 and "weights of run/checkpoints/step-000005" in done.stdout.replace(f"{tmp_path}/", "")
    assert len(json.loads((tmp_path / "answers" / "completions.jsonl").read_text())["answers"][0]["tokens"]) == 4


def test_a_run_without_a_checkpoint_is_named_before_anything_starts(tmp_path):
    (tmp_path / "run").mkdir()
    save(compose(output_dir=tmp_path / "run"), path=tmp_path / "run" / "config.yaml")
    for key, task in (("inference.model", "generate"), ("checkpoint.resume", "pretrain"), ("warm_start.path", "sft")):
        done = run_command(f"task={task}", f"{key}=run", cwd=tmp_path)
        assert done.returncode == 2 and f"{key}=run: this run has no checkpoint" in done.stderr, done.stderr


def test_killed_runs_resume_to_the_digest_of_an_undisturbed_run(tmp_path):
    assert not kill_often("ranks", kills=2, folder=tmp_path, forks=True)


@pytest.mark.parametrize("resumes", [False, True], ids=["new run", "run that continues"])
def test_an_interrupt_before_the_ranks_start_prints_the_next_command(monkeypatch, capsys, tmp_path, resumes):
    session = Session()
    if resumes:
        (tmp_path / "summary.json").write_text("{}")

    def compose_and_run():
        session._jobs.append(Job(folder=tmp_path, overrides=(), status=Status.failed))
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert session.main(compose_and_run) == 130
    assert "interrupted before a run started: nothing has changed, start the command again" in capsys.readouterr().err


class Referred:
    """Its weak references have callbacks, as the import system's locks."""


def test_a_signal_that_python_ignored_ends_the_command_before_ranks_start(monkeypatch, tmp_path):
    started = tmp_path / "started"
    child = Child(rank=0, command=[sys.executable, "-c", f"open({str(started)!r}, 'w')"], environment={})

    def compose_and_run():
        referred = Referred()
        reference = weakref.ref(referred, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del referred
        assert reference() is None
        run_children([child])

    monkeypatch.setattr(sys, "argv", ["run.py"])
    with noted_signals():
        assert Session().main(compose_and_run) == 130
    assert not started.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("error", [AttributeError("a cleanup failed"), ConfigError(["data.seq_len=a: no number"])])
def test_an_error_that_a_signal_caused_is_an_interrupt(monkeypatch, capsys, number, code, error):
    def compose_and_run():
        try:
            os.kill(os.getpid(), number)
        finally:
            raise error

    before = signal.getsignal(signal.SIGINT)  # ignored if a shell has started the tests in the background
    monkeypatch.setattr(sys, "argv", ["run.py"])
    with noted_signals():
        if number == signal.SIGINT:
            assert Session().main(compose_and_run) == code
        else:
            with pytest.raises(SystemExit, match=str(code)):
                Session().main(compose_and_run)
    assert "interrupted before a run started" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
