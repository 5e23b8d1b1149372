"""Saving: the contents of the folder after successes and failures."""

import errno
import importlib
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import Setup, reload, save_some, seed_all, train_steps
from tests.zero.models import Layout, batches
from ztk.checkpoint import Retention, SaveFailed, Saver, tensorfile

SETUP = Setup(layout=Layout(stage=3))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_retention_keeps_the_newest_and_every_nth(ranks, tmp_path):
    options = {"retention": Retention(keep=2, keep_every=3)}
    found = ranks(2).run(save_some, setup=SETUP, folder=str(tmp_path), steps=[1, 2, 3, 4, 5, 6], **options)[0]
    assert found == ["latest", "step-000003", "step-000005", "step-000006"]
    assert (tmp_path / "latest").read_text() == "step-000006\n"


def test_retention_keeps_the_best(ranks, tmp_path):
    assert ranks(1).run(save_with_metrics, folder=str(tmp_path))[0] == ["latest", "step-000002", "step-000004"]


def save_with_metrics(process, *, folder: str) -> list[str]:
    engine = SETUP.engine(process)
    saver = Saver(engine, folder=folder, retention=Retention(keep=1, keep_best=True))
    for step, metric in enumerate([3.0, 1.0, 2.0, 4.0]):
        train_steps(engine, start=step, stop=step + 1)
        saver.save(metric=metric)
    return names(Path(folder))


def test_bad_retention_is_refused():
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        Retention(keep=0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_saved_again_replaces_the_older(ranks, tmp_path, asynchronous):
    """As after a resume from an earlier checkpoint; later steps of the abandoned branch are removed by age."""
    options = {"setup": SETUP, "folder": str(tmp_path), "retention": Retention(keep=3), "asynchronous": asynchronous}
    assert "step-000009" in ranks(2).run(save_some, steps=[1, 2, 9], **options)[0]
    found = ranks(2).run(save_some, steps=[1, 2], **options)[0]
    assert found == ["latest", "step-000001.2", "step-000002.2", "step-000009"]
    assert (tmp_path / "latest").read_text() == "step-000002.2\n"


def test_leftovers_of_a_killed_save_are_removed_by_the_next(ranks, tmp_path):
    (tmp_path / "step-000007.tmp-00ff").mkdir()
    (tmp_path / "step-000007.tmp-00ff" / "rank-00000.safetensors").touch()
    (tmp_path / "latest.tmp-00ff").touch()
    (tmp_path / "notes.tmp-mine").touch()
    found = ranks(1).run(save_some, setup=SETUP, folder=str(tmp_path), steps=[1])[0]
    assert found == ["latest", "notes.tmp-mine", "step-000001"]


def test_a_second_writer_of_a_folder_is_refused_and_removes_nothing(ranks, tmp_path):
    """The second writer would remove the first one's temporary folder."""
    text, during, after = ranks(1).run(save_beside_another, folder=str(tmp_path))[0]
    assert "another run or engine is saving checkpoints" in text
    assert during == ["latest", "step-000001", "step-000002.tmp-00ff"]
    assert after == ["latest", "step-000001"]


def save_beside_another(process, *, folder: str) -> tuple[str, list[str], list[str]]:
    importlib.import_module("ztk.checkpoint.save").PATIENCE_SECONDS = 0.1
    engine = SETUP.engine(process)
    train_steps(engine, start=0, stop=1)
    with Saver(engine, folder=folder) as first:
        first.save()
        (Path(folder) / "step-000002.tmp-00ff").mkdir()
        with pytest.raises(SaveFailed) as refused:
            Saver(engine, folder=folder).save()
        during = names(Path(folder))
    Saver(engine, folder=folder).save()  # the first has ended
    return str(refused.value), during, [name.removesuffix(".2") for name in names(Path(folder))]


def test_files_are_the_same_for_every_tier(ranks, tmp_path):
    """Bytes written are bytes of state; a rank's file does not depend on tier and stage."""
    contents = []
    for layout in (Layout(stage=0), Layout(stage=3, offload="nvme"), Layout(stage=2, offload="cpu")):
        folder = tmp_path / layout.id
        ranks(2).run(save_some, setup=Setup(layout=layout), folder=str(folder), steps=[2])
        contents.append([(folder / "step-000002" / f"rank-0000{rank}.safetensors").read_bytes() for rank in range(2)])
    state = 12 * ranks(1).run(count_parameters)[0]
    for files in contents[1:]:
        assert [len(file) for file in files] == [len(file) for file in contents[0]]
    total = sum(map(len, contents[0]))
    headers = sum(8 + int.from_bytes(file[:8], "little") for file in contents[0])
    # The random number generators' states: torch's 5,056 bytes, and 625 numbers of up to 12 characters of Python's and of numpy's.
    assert state < total - headers < state + 2 * (5_056 + 2 * 8_192)


def count_parameters(process) -> int:
    return SETUP.engine(process).zero.num_parameters


def test_any_safetensors_reader_opens_the_files(ranks, tmp_path):
    from safetensors import safe_open

    ranks(2).run(save_some, setup=SETUP, folder=str(tmp_path), steps=[1])
    with safe_open(tmp_path / "step-000001" / "rank-00001.safetensors", framework="pt") as file:
        keys = [key for key in file.keys() if key.startswith("master/")]  # noqa: SIM118 - not a dict
        assert keys and all(file.get_tensor(key).dtype == torch.float32 for key in keys)


def test_a_save_between_micro_batches_is_refused(ranks):
    assert "after micro-batch 1 of 2" in ranks(1).run(save_between)[0]


def save_between(process) -> str:
    engine = Setup(accumulation_steps=2).engine(process)
    engine.backward(engine(next(batches(1, rank=0, world=1))))
    engine.step()
    with pytest.raises(ValueError) as caught:
        Saver(engine, folder="/nowhere").save()
    return str(caught.value)


def test_values_that_json_lacks_are_refused(ranks, tmp_path):
    assert "data_state" in ranks(1).run(save_odd_value, folder=str(tmp_path))[0]


def save_odd_value(process, *, folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        Saver(SETUP.engine(process), folder=folder).save(data_state={"x": float("nan")})
    return str(caught.value)


# Faults


def save_with_fault(
    process, *, setup: Setup, folder: str, fault: str, asynchronous: bool
) -> tuple[str, float, list[str]]:
    """A good save, a failing one and a good one. Returns the failing save's error, its duration and its leftovers."""
    engine = setup.engine(process)
    with Saver(engine, folder=folder, asynchronous=asynchronous) as saver:
        train_steps(engine, start=0, stop=1)
        saver.save()
        saver.wait()
        train_steps(engine, start=1, stop=2)
        start = time.perf_counter()
        with _faulty(fault, rank=process.rank):
            text = ""
            try:
                saver.save()
                saver.wait()
            except SaveFailed as error:
                text = str(error)
        seconds, left = time.perf_counter() - start, names(Path(folder))
        process.comm.barrier()
        train_steps(engine, start=2, stop=3)
        saver.save()
        saver.wait()
    return text, seconds, left


class _faulty:
    """write: the second write to rank 1's file fails as on a full disk. sync: rank 1's fsync fails. commit, pointer: rank 0's renames do."""

    def __init__(self, fault: str, *, rank: int) -> None:
        self._fault, self._rank, self._calls = fault, rank, 0
        self._saved = (os.pwrite, os.fsync, os.rename, os.replace)

    def __enter__(self) -> None:
        match self._fault, self._rank:
            case "write", 1:
                os.pwrite = self._failing(os.pwrite, after=1, code=errno.ENOSPC)
            case "sync", 1:
                os.fsync = self._failing(os.fsync, after=0, code=errno.EIO)
            case "commit", 0:
                os.rename = self._failing(os.rename, after=0, code=errno.EROFS)
            case "pointer", 0:
                os.replace = self._failing(os.replace, after=0, code=errno.EDQUOT)

    def _failing(self, call, *, after: int, code: int):
        def failing(*args):
            self._calls += 1
            if self._calls > after:
                raise OSError(code, os.strerror(code))
            return call(*args)

        return failing

    def __exit__(self, *exception) -> None:
        os.pwrite, os.fsync, os.rename, os.replace = self._saved


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", ["write", "sync", "commit", "pointer"])
@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_a_failed_save_raises_on_all_ranks_and_harms_nothing(ranks, tmp_path, fault, asynchronous, offload):
    setup = Setup(layout=Layout(stage=3, offload=offload))
    results = ranks(2).run(save_with_fault, setup=setup, folder=str(tmp_path), fault=fault, asynchronous=asynchronous)
    words = {"write": "No space left", "sync": "Input/output error", "commit": "Read-only", "pointer": "quota"}
    expected = words[fault]
    for text, seconds, left in results:
        assert expected in text and "step 2 was not saved" in text and "step-000001" in text, text
        assert seconds < 5 and left == ["latest", "step-000001"]
    assert names(tmp_path) == ["latest", "step-000001", "step-000003"]
    ranks(2).run(reload, setup=setup, folder=str(tmp_path))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB; skipped where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("options", ["size=256k", "ro"])
def test_a_really_full_or_read_only_disk(ranks, small_disk, options):
    if options == "ro":
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    results = ranks(2).run(save_expecting_failure, folder=str(small_disk))
    expected = "Read-only file system" if options == "ro" else "No space left on device"
    for text in results:
        assert expected in text, text
    assert names(small_disk) == []


def save_expecting_failure(process, *, folder: str) -> str:
    with pytest.raises(SaveFailed) as caught:
        Saver(SETUP.engine(process), folder=folder).save()
    return str(caught.value)


def test_a_path_through_a_file(ranks, tmp_path):
    (tmp_path / "file").touch()
    for text in ranks(2).run(save_expecting_failure, folder=str(tmp_path / "file" / "checkpoints")):
        assert "file" in text and "Not a directory" in text, text


def test_training_continues_during_a_slow_save(ranks, tmp_path):
    """An asynchronous save contains the state at its call, even with a slow disk."""
    for stall, behind, total, steps in ranks(2).run(save_slowly, folder=str(tmp_path)):
        assert behind and steps >= 2
        assert stall < 0.5 * total
    straight = ranks(2).run(save_some, setup=SETUP, folder=str(tmp_path / "sync"), steps=[3])
    assert straight
    one = ranks(2).run(reload, setup=SETUP, folder=str(tmp_path / "slow"))[0]
    two = ranks(2).run(reload, setup=SETUP, folder=str(tmp_path / "sync"))[0]
    assert one.states == two.states


def save_slowly(process, *, folder: str) -> tuple[float, bool, float, int]:
    seed_all(process, seed=5)
    engine = SETUP.engine(process)
    train_steps(engine, start=0, stop=3)
    fast = tensorfile.write_at

    def slow(*args, **kwargs):
        time.sleep(0.02)
        fast(*args, **kwargs)

    tensorfile.write_at = slow
    try:
        with Saver(engine, folder=f"{folder}/slow", asynchronous=True) as saver:
            saver.save()
            stall, behind = saver.stall_seconds, saver.is_busy
            steps = 0
            while steps < 2:
                train_steps(engine, start=3 + steps, stop=4 + steps)
                steps += 1
            report = saver.wait()
    finally:
        tensorfile.write_at = fast
    assert report.stall_seconds <= stall
    return stall, behind, report.seconds, steps


def test_states_on_nvme_are_read_behind_training_and_the_update_waits(ranks, tmp_path):
    """The save copies nothing: forward and backward continue at once, and the next update does not change the saved state."""
    for seconds_to_save, seconds_to_backward, waited, total in ranks(2).run(save_nvme, folder=str(tmp_path / "slow")):
        assert seconds_to_save + seconds_to_backward < 0.5 * waited and waited < total
    setup = Setup(layout=Layout(stage=3, offload="nvme"))
    ranks(2).run(save_some, setup=setup, folder=str(tmp_path / "sync"), steps=[3])
    one, two = (ranks(2).run(reload, setup=setup, folder=str(tmp_path / name))[0] for name in ("slow", "sync"))
    assert one.states == two.states and one.weights == two.weights


def save_nvme(process, *, folder: str) -> tuple[float, float, float, float]:
    """Seconds: of the call, of a forward and backward, of the update that waits, and until the checkpoint is complete."""
    seed_all(process, seed=5)
    engine = Setup(layout=Layout(stage=3, offload="nvme")).engine(process)
    train_steps(engine, start=0, stop=3)
    fast = tensorfile.write_at

    def slow(*args, **kwargs):
        time.sleep(0.06)  # the save lasts over a second: much longer than a forward and backward on a busy machine
        fast(*args, **kwargs)

    tensorfile.write_at = slow
    try:
        with Saver(engine, folder=folder, asynchronous=True) as saver:
            start = time.perf_counter()
            saver.save()
            saved = time.perf_counter()
            engine.backward(engine(next(batches(1, rank=process.rank, world=process.world_size))))
            backward = time.perf_counter()
            engine.step()
            updated = time.perf_counter()
            train_steps(engine, start=4, stop=5)
            report = saver.wait()
    finally:
        tensorfile.write_at = fast
    assert saver.stall_seconds >= report.stall_seconds > 0.5 * (updated - backward)  # the wait counts as stall
    return saved - start, backward - saved, updated - backward, report.seconds
