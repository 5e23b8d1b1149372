"""`ztk.run` and `ztk.sweep` from Python: results, errors, and the end of ranks that a live kernel started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ztk
from ztk.cli.calls import command_words

RESEARCH = Path(__file__).parents[2] / "examples" / "research"
WAITING = 60
SMALL = (
    *("model=nano", "data=synthetic", "data.seq_len=32", "train.micro_batch_size=1", "logger=disabled"),
    *("launch.ranks=1", "train.quick=true"),
)


def test_keywords_are_words_of_the_command_line():
    words = command_words(("zero=stage3",), keys={"train.steps": 2, "offload": ["none", "cpu"], "train.quick": True})
    assert words == ["zero=stage3", "train.steps=2", "offload=none,cpu", "train.quick=true"]
    assert command_words((), keys={"precision.reduce_dtype": None}) == ["precision.reduce_dtype=null"]
    grid = {"optimizer.betas": [[0.9, 0.95], (0.8, 0.99)]}
    assert command_words((), keys=grid) == ["optimizer.betas=[0.9,0.95],[0.8,0.99]"]


@pytest.mark.parametrize("word", ["-m", "hydra.run.dir=here", "sweep.resume=there", "launch.debug=0", "launch=slurm"])
def test_words_that_are_no_overrides_are_refused(word):
    with pytest.raises(ValueError, match=word):
        command_words((word,), keys={})


def test_a_rank_starts_no_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="rank 1 that torchrun started"):
        command_words((), keys={})


def test_a_quick_sweep_returns_its_frames_goes_on_and_has_the_bits_of_runs_of_their_own(tmp_path, capfd):
    folder, words = tmp_path / "a folder's name", (*SMALL[:-2], "launch.ranks=2", "train.steps=2")
    found = ztk.sweep(*words, "sweep.quick=true", folder=folder, quiet=True, zero=["stage0", "stage3"])
    assert found.runs["status"].tolist() == ["done", "done"] and found.folder == folder
    assert found.runs["zero.stage"].tolist() == [0, 3] and len(found.history) == 4
    assert not any(capfd.readouterr())
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    ztk.sweep(*words, "sweep.quick=true", folder=folder, quiet=True, zero=["stage0", "stage3"])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")} == before

    alone = ztk.run(*words, "train.quick=true", "zero=stage3", folder=tmp_path / "alone", quiet=True)
    assert set(found.runs["loss_digest"]) == set(alone.runs["loss_digest"])
    numbers = ["step", "loss", "grad_norm"]
    last = found.history[found.history["run"] == found.runs["run"].iloc[1]]
    assert last[numbers].to_numpy().tolist() == alone.history[numbers].to_numpy().tolist()


def test_a_failure_names_its_cause(tmp_path):
    with pytest.raises(ValueError, match="zero=stage9: there is no such option"):
        ztk.run("zero=stage9", folder=tmp_path / "refused", quiet=True)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ztk.RunFailed, match="rank 0: ValueError: task.module=json: has no function main") as caught:
        ztk.run(*SMALL, "task.module=json", folder=tmp_path / "failed", quiet=True)
    assert caught.value.folder == tmp_path / "failed"
    with pytest.raises(ValueError, match="zero=stage9: there is no such option"):  # not the failure that the folder has
        ztk.run("zero=stage9", folder=tmp_path / "failed", quiet=True)


def test_a_refused_sweep_is_not_the_one_that_its_folder_has(tmp_path):
    options = {"folder": tmp_path, "quiet": True, "check": False, "optimizer.lr": [0.1, 0.2]}
    found = ztk.sweep(*SMALL, "topology.tensor=3", **options)
    assert found.runs["status"].tolist() == ["refused", "refused"]
    with pytest.raises(ValueError, match="zero=stage9: there is no such option"):
        ztk.sweep(*SMALL, "zero=stage9", **options)


def test_a_plan_is_of_the_run_of_the_same_words():
    words = [word for word in SMALL if word != "launch.ranks=1"]
    plan = ztk.plan_run(*words, "zero=stage2", "train.steps=2", **{"launch.ranks": 4})
    assert plan.world_size == 4 and plan.fits is None
    with pytest.raises(ValueError, match="task=eval: cannot be planned"):
        ztk.plan_run("task=eval")
    found = ztk.search_layouts(*SMALL, hardware="h100", quiet=True, **{"plan.traced": 1})
    assert len(found.rows()) == 1 and sum(found.dropped.values()) == found.layouts - 1


# A live kernel


@pytest.fixture
def kernel(tmp_path):
    """A Jupyter kernel in `tmp_path`: its manager and a client."""
    manager_module = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    paths = os.pathsep.join([str(Path(ztk.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    manager = manager_module.KernelManager()
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(cwd=str(tmp_path), env=os.environ | {"PYTHONPATH": paths})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=WAITING)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def waited(condition) -> bool:
    end = time.monotonic() + WAITING
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def reply_to(asked: str, *, client) -> dict:
    """Returns the reply to one request. A kernel that started slowly may also have answered several version requests."""
    while (message := client.get_shell_msg(timeout=WAITING))["parent_header"]["msg_id"] != asked:
        pass
    return message["content"]


def ranks_below(folder: Path) -> list[str]:
    """The processes whose command line names `folder`."""
    found = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line and "ztk." in line]


def test_calls_take_folders_of_own_options(tmp_path):
    (tmp_path / "more" / "user").mkdir(parents=True)
    (tmp_path / "more" / "user" / "narrow.yaml").write_text("width: 8\n")
    (tmp_path / "more" / "user" / "wide.yaml").write_text("width: 12\n")
    options = {
        "config_dir": [RESEARCH / "conf", tmp_path / "more"],
        "model": "conv",
        "loss": "smooth",
        "user": "narrow",
    }
    words = ("logger=disabled", "train.micro_batch_size=1", "data.seq_len=16", "train.steps=2")
    done = ztk.run(*words, "train.quick=true", folder=tmp_path / "run", quiet=True, **options)
    assert done.runs["parameters"].item() == ztk.plan_run(*words, **options).parameters
    grid = options | {"user": ["narrow", "wide"], "sweep.quick": True}
    found = ztk.sweep(*words, folder=tmp_path / "sweep", quiet=True, **grid)
    assert found.runs["user.width"].tolist() == [8, 12]
    with pytest.raises(ValueError, match="model=conv: there is no such option"):
        ztk.run(*words, folder=tmp_path / "without", quiet=True, model="conv")


def test_an_interrupt_ends_the_run_and_keeps_the_kernel_and_the_ranks_end_with_it(kernel, tmp_path):
    manager, client = kernel
    words = (*SMALL[:-2], "launch.ranks=2", "train.steps=100000")
    asked = client.execute(f"import ztk; ztk.run(*{words}, folder='first', quiet=True)")
    assert waited((tmp_path / "first" / "metrics.jsonl").exists)
    manager.interrupt_kernel()
    reply = reply_to(asked, client=client)
    assert reply["status"] == "error" and reply["ename"] == "KeyboardInterrupt"
    assert ztk.load(tmp_path / "first").runs["error"].tolist() == ["interrupted"]
    assert not ranks_below(tmp_path)

    client.execute(f"ztk.run(*{words}, folder='second', quiet=True)")
    assert waited((tmp_path / "second" / "metrics.jsonl").exists) and len(ranks_below(tmp_path)) == 3
    os.kill(manager.provisioner.pid, signal.SIGKILL)
    assert waited(lambda: not ranks_below(tmp_path))
