"""A command in a folder that has a run already: every cell of the table in docs/checkpoints.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "checkpoints.md"
TINY = ("model=nano", "train.micro_batch_size=1", "data.seq_len=32", "launch.ranks=1", "launch.threads=1")
LINE = (*TINY, "logger=disabled", "train.quick=true", "train.steps=4", "checkpoint.every=2", "hydra.run.dir=run")
MODES = {
    "plain": ((), {}),
    "`resume=auto`": (("checkpoint.resume=auto",), {}),
    "restart": ((), {"SLURM_RESTART_COUNT": "1"}),
    "second job": ((), {}),
}
_HOLDER = """
import sys
from ztk.report.owner import RunOwner
with RunOwner(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def table() -> list[tuple[str, str, str]]:
    """(folder, mode, outcome) of every cell."""
    text = PAGE.read_text().partition("## A folder that has a run already")[2].partition("\n## ")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n") if "|" in line]
    assert head[1:] == list(MODES)
    return [(row[0], mode, outcome) for row in rows for mode, outcome in zip(head[1:], row[1:], strict=True)]


CELLS = [cell for cell in table() if cell[0] != "another folder on every node"]  # tests/core/launch/test_unshared.py


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of four steps with checkpoints of steps 2 and 4."""
    place = tmp_path_factory.mktemp("finished")
    done = run_command(*LINE, cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "run"


def make(name: str, *, folder: Path, finished: Path) -> None:
    if name == "nothing":
        return
    shutil.copytree(finished, folder)
    for record in (folder / "config.yaml", *folder.glob("checkpoints/*/run.yaml")):
        record.write_text(record.read_text().replace(str(finished), str(folder)))
    if name == "a run of another configuration":
        for record in (folder / "config.yaml", *folder.glob("checkpoints/*/run.yaml")):
            record.write_text(re.sub(r"\n  lr: [\d.]+", "\n  lr: 0.5", record.read_text()))
    if "newest checkpoint was removed" in name:
        shutil.rmtree(folder / "checkpoints" / "step-000004")
    if name.startswith("a run that died"):
        (folder / "summary.json").unlink()
        rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(rows[:3]) + rows[3][:20])  # the last line is cut
        shutil.rmtree(folder / "checkpoints" / "step-000004")
        (folder / "checkpoints" / "latest").write_text("step-000002\n")
        dead = {"pid": 2**22 + 1, "process_start": "1", "host": os.uname().nodename, "started": 1.0, "time": 2.0}
        (folder / "heartbeat.json").write_text(json.dumps(dead))
        (folder / "run.lock").write_text(json.dumps(dead))  # as kill -9 leaves it
    if "before its first checkpoint" in name:
        shutil.rmtree(folder / "checkpoints")


def mounted(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this system mounts nothing here: {done.stderr.strip()}")


def fill(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
        while filler.write(b"0" * 4096) == 4096:
            pass
        raise OSError("the last write was cut")


def content(folder: Path) -> dict[str, bytes]:
    names = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("run.lock", "filler")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


@pytest.mark.parametrize("name, mode, outcome", CELLS, ids=[f"{name} - {mode}" for name, mode, _ in CELLS])
def test_a_cell(name, mode, outcome, tmp_path, finished):
    folder, holder = tmp_path / "run", None
    is_mounted = name in ("no right to write", "a full disk")
    if name == "a full disk":
        folder.mkdir()
        mounted("-t", "tmpfs", "-o", "size=16m", "none", str(folder))
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        fill(folder)
    else:
        make(name, folder=folder, finished=finished)
    if name == "no right to write":
        mounted("--bind", str(folder), str(folder))
        mounted("-o", "remount,ro,bind", str(folder))
    try:
        if "is running" in name or (mode == "second job" and not is_mounted):
            words = [sys.executable, "-c", _HOLDER, str(folder)]
            place = os.environ | {"PYTHONPATH": str(CHECKOUT)}
            holder = subprocess.Popen(words, env=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before = content(folder)
        words, environment = MODES[mode]
        done = run_command(*LINE, *words, cwd=tmp_path, environment=environment)
        after = content(folder)
    finally:
        if holder is not None:
            holder.communicate("")
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)
    check(outcome, done=done, name=name, before=before, after=after, finished=finished, holder=holder)
    assert not (folder / "run.lock").exists()


def check(outcome, *, done, name, before, after, finished, holder) -> None:
    assert "Traceback" not in done.stderr, done.stderr
    if outcome in ("done", "refused"):
        assert done.returncode == (0 if outcome == "done" else 2), done.stderr
        assert before == after
        if outcome == "done":
            assert "done after 4 steps, nothing is left to do" in done.stderr
        elif holder is not None:
            assert f"process {holder.pid} on {os.uname().nodename} writes into this folder since" in done.stderr
        elif name == "a run of another configuration":
            assert "optimizer.lr=0.003" in done.stderr and "0.5" in done.stderr
        else:
            texts = {"no right to write": "Read-only file system", "a full disk": "No space left on device"}
            assert texts.get(name, "no checkpoint to continue from") in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in after["metrics.jsonl"].splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    digest = json.loads((finished / "summary.json").read_text())["loss_digest"]
    assert json.loads(after["summary.json"])["loss_digest"] == digest
    assert ("continues after step 2" in done.stdout) == (outcome == "continues")
    if outcome == "continues":
        newest = "checkpoints/step-000002/manifest.json"
        assert after[newest] == before[newest]


def test_overwriting_replaces_the_run_and_keeps_other_files(tmp_path, finished):
    folder = tmp_path / "run"
    make("a finished run", folder=folder, finished=finished)
    (folder / "notes.txt").write_text("mine")
    words = ("optimizer.lr=0.01", "checkpoint.resume=overwrite", "train.steps=2")
    line = [word for word in LINE if not word.startswith("train.steps")]
    done = run_command(*line, *words, cwd=tmp_path)
    assert done.returncode == 0 and "the run of 4 steps in it was removed" in done.stderr, done.stderr
    assert [path.name for path in folder.glob("checkpoints/step-*")] == ["step-000002"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert (folder / "notes.txt").read_text() == "mine"
    # A requeued job continues its own run and does not remove it again.
    again = run_command(*line, *words, cwd=tmp_path, environment={"SLURM_RESTART_COUNT": "1"})
    assert again.returncode == 0 and "done after 2 steps" in again.stderr, again.stderr


def test_a_run_that_began_from_another_continues_from_its_own_checkpoint(tmp_path, finished):
    line = [word for word in LINE if not word.startswith(("train.steps", "hydra.run.dir"))]
    words = (*line, "train.steps=8", f"checkpoint.resume={finished}", "hydra.run.dir=run")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 0 and "continues after step 4 " in done.stdout, done.stderr
    folder = tmp_path / "run"
    shutil.rmtree(folder / "checkpoints" / "step-000008")
    (folder / "summary.json").unlink()
    again = run_command(*words, cwd=tmp_path)
    assert again.returncode == 0 and f"continues after step 6 from {folder}" in again.stdout, again.stderr
    assert [json.loads(row)["step"] for row in (folder / "metrics.jsonl").read_text().splitlines()] == [5, 6, 7, 8]
    other = run_command(*line, "train.steps=8", "hydra.run.dir=run", cwd=tmp_path)
    assert other.returncode == 2 and f"checkpoint.resume=null here, {finished} there" in other.stderr, other.stderr


def test_a_run_is_compared_with_its_checkpoint_not_with_the_last_start(tmp_path, finished):
    """B1: a start under another configuration has replaced config.yaml, as earlier versions allowed."""
    folder = tmp_path / "run"
    make("a finished run", folder=folder, finished=finished)
    config = folder / "config.yaml"
    config.write_text(re.sub(r"\n  lr: [\d.]+", "\n  lr: 0.5", config.read_text()))
    line = [word for word in LINE if not word.startswith("train.steps")]
    words = (*line, "train.steps=5", "checkpoint.resume=auto", "optimizer.lr=0.5")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 2 and "the checkpoint's run has optimizer.lr=0.003" in done.stderr, done.stderr


def test_an_older_checkpoint_of_another_configuration_does_not_replace_a_damaged_one(tmp_path, finished):
    """As after `checkpoint.allow_changes=true`: the newest checkpoint has this configuration, the one before has another."""
    folder = tmp_path / "run"
    make("a finished run", folder=folder, finished=finished)
    older, newest = (folder / "checkpoints" / f"step-00000{step}" for step in (2, 4))
    record = older / "run.yaml"
    record.write_text(re.sub(r"\n  lr: [\d.]+", "\n  lr: 0.5", record.read_text()))
    (newest / "rank-00000.safetensors").unlink()
    words = (*(word for word in LINE if not word.startswith("train.steps")), "train.steps=6", "checkpoint.resume=auto")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode and f"{older} is the newest complete checkpoint" in done.stderr, done.stderr
    assert "the checkpoint's run has optimizer.lr=0.5" in done.stderr
    done = run_command(*words, "checkpoint.allow_changes=true", cwd=tmp_path)
    assert done.returncode == 0 and f"continues after step 2 from {older}" in done.stdout, done.stderr


def test_answers_are_refused_in_the_folder_of_a_run(tmp_path, finished):
    folder = tmp_path / "run"
    make("a finished run", folder=folder, finished=finished)
    before = content(folder)
    words = ("task=generate", "inference.model=run", "sampling.max_tokens=2", "launch.threads=1")
    done = run_command(*words, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2 and "has another run of 4 steps" in done.stderr, done.stderr
    assert content(folder) == before
    for code, count in ((0, 2), (0, 2), (2, 3)):  # the same answers again, and others
        words = (*words[:2], f"sampling.max_tokens={count}", *words[3:])
        done = run_command(*words, "hydra.run.dir=answers", cwd=tmp_path)
        assert done.returncode == code, done.stderr


def test_a_requeued_job_finds_its_folder(tmp_path):
    job = {"SLURM_JOB_ID": "4711"}
    line = [word for word in LINE if not word.startswith("hydra.run.dir")]
    assert run_command(*line, cwd=tmp_path, environment=job).returncode == 0
    (folder,) = {path.parent for path in tmp_path.rglob("summary.json")}
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    (folder / "summary.json").unlink()
    done = run_command(*line, cwd=tmp_path, environment=job | {"SLURM_RESTART_COUNT": "1"})
    assert done.returncode == 0 and f"continues after step 2 from {folder}" in done.stdout, done.stderr
    assert {path.parent for path in tmp_path.rglob("summary.json")} == {folder}
    # Another command of the same job has a folder of its own.
    other = run_command(*line, "train.seed=1", cwd=tmp_path, environment=job | {"SLURM_RESTART_COUNT": "1"})
    assert other.returncode == 0 and len(list(tmp_path.rglob("summary.json"))) == 2, other.stderr


@pytest.mark.parametrize("place", [(), ("hydra.sweep.dir=points",)], ids=["dated", "named"])
def test_a_requeued_sweep_goes_on_in_its_folder(place, tmp_path):
    job = {"SLURM_JOB_ID": "4711"}
    line = [word for word in LINE if not word.startswith("hydra.run.dir")]
    words = ("-m", *line, "train.steps=2", "checkpoint.every=1", "train.seed=0,1", *place)
    words = [word for word in words if word not in ("train.steps=4", "checkpoint.every=2")]
    assert run_command(*words, cwd=tmp_path, environment=job).returncode == 0
    first, second = sorted(path.parent for path in tmp_path.rglob("summary.json"))
    shutil.rmtree(second / "checkpoints" / "step-000002")
    (second / "summary.json").unlink()
    done = (first / "summary.json").read_bytes()
    again = run_command(*words, cwd=tmp_path, environment=job | {"SLURM_RESTART_COUNT": "1"})
    assert again.returncode == 0 and "continues after step 1" in again.stdout, again.stdout + again.stderr
    assert sorted(path.parent for path in tmp_path.rglob("summary.json")) == [first, second]
    assert (first / "summary.json").read_bytes() == done
