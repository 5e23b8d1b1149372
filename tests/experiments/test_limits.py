"""Runs that end before `train.steps`: at one step on all ranks, with a checkpoint and a reason, to go on from."""

from pathlib import Path
from types import SimpleNamespace

from tests.experiments.test_faults import folder_of, rows, run, summary_of
from ztk.core.runtime import Process
from ztk.experiments.limits import Limits

STAGE3 = ("zero=stage3", "data.path=text", "data.validation_fraction=0.2")


def write_text(folder: Path) -> None:
    (folder / "text").write_text("".join(f"line {number} of a text\n" for number in range(500)))


def answers(process: Process) -> list[bool]:
    """Of ranks whose clocks differ: rank 0 has just begun, the others an hour ago; then the other way round."""
    found = []
    for late in (process.rank != 0, process.rank == 0):
        train = SimpleNamespace(max_seconds=60.0, until_loss=2.0, steps=5)
        limits = Limits(train, engine=SimpleNamespace(process=process, comm=process.comm))
        limits._started -= 3600 if late else 0
        found.append(limits.is_over())
    assert limits.is_reached(2.0) and not limits.is_reached(2.1) and not limits.is_reached(float("nan"))
    return found


def test_ranks_agree_by_the_clock_of_the_first(ranks):
    assert ranks(2).run(answers) == [[False, True]] * 2


def test_a_time_limit_ends_with_a_checkpoint_from_which_the_run_goes_on(tmp_path):
    write_text(tmp_path)
    done = run(*STAGE3, "train.steps=100000", "train.max_seconds=0.5", "checkpoint.every=100000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder, summary = folder_of(tmp_path), summary_of(tmp_path)
    last = summary["steps"]
    assert (summary["status"], summary["ended_by"]) == ("done", "train.max_seconds=0.5") and 1 <= last < 100000
    assert max(rows(tmp_path)) == last
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == [f"step-{last:06d}"]
    again = ("checkpoint.resume=auto", f"hydra.run.dir={folder}", f"train.steps={last + 2}", "checkpoint.every=1")
    done = run(*STAGE3, *again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"continues after step {last} " in done.stdout
    summary = summary_of(tmp_path)
    assert (summary["ended_by"], summary["steps"]) == (f"train.steps={last + 2}", last + 2)
    assert sorted(rows(tmp_path)) == list(range(1, last + 3))


def test_a_held_out_loss_ends_the_run_once(tmp_path):
    write_text(tmp_path)
    words = (
        *STAGE3,
        "launch.ranks=1",
        "train.steps=50",
        "train.eval_every=3",
        "train.until_loss=100",
        "checkpoint.every=50",
    )
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder, summary = folder_of(tmp_path), summary_of(tmp_path)
    assert (summary["steps"], summary["ended_by"]) == (3, "train.until_loss=100")
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000003"]
    record = {name: (folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl")}
    done = run(*words, "checkpoint.resume=auto", f"hydra.run.dir={folder}", cwd=tmp_path)
    assert done.returncode == 0 and "as it was" in done.stdout, done.stderr
    assert record == {name: (folder / name).read_bytes() for name in record}
