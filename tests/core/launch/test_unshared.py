"""Ranks of another launcher and the folder of rank 0: one that a rank does not see, one of every node, and one that refuses the run."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
TINY = ("model=nano", "train.micro_batch_size=1", "data.seq_len=32", "launch.threads=1", "logger=disabled")
LINE = (*TINY, "train.quick=true", "train.steps=2", "launch.device=cpu")


def run_ranks(
    folder: Path, *, words: tuple[str, ...] = (), own: Path | None = None, host: str = "", restarts: int = 0
) -> list[tuple[int, str]]:
    """Exit code and output of two ranks, as on two nodes. own: the folder that rank 1 has at the same path. host: name of its host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(CHECKOUT)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if restarts:
        place |= {"SLURM_RESTART_COUNT": str(restarts)}
    command = [sys.executable, str(CHECKOUT / "run.py"), *LINE, f"hydra.run.dir={folder}", *words]
    ranks = []
    for rank in range(2):
        steps = [f'mount --bind "{own}" "{folder}"'] * bool(own) + [f"hostname {host}"] * bool(host)
        enter = ["unshare", "--mount", "--uts", "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh"]
        ranks.append(
            subprocess.Popen(
                [*(enter if steps and rank else []), *command],
                cwd=folder.parent,
                env=os.environ | place | {"RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, printed, strict=True)]


@pytest.mark.parametrize(
    ("words", "restarts"),
    [((), 0), (("checkpoint.resume=auto",), 0), ((), 1)],
    ids=["plain", "resume=auto", "restart"],
)
def test_a_folder_that_a_node_does_not_see_is_refused_before_the_first_step(words, restarts, tmp_path):
    """B6: the final save failed after the whole training."""
    folder, own = folders(tmp_path)
    (code, text), (other, _) = run_ranks(folder, words=words, own=own, restarts=restarts)
    assert (code, other) == (2, 2), text
    assert "keep a folder per node with checkpoint.local=true" in text
    assert f"{folder}: rank 1 on {socket.gethostname()} does not see the run folder of rank 0" in text
    assert not (folder / "metrics.jsonl").exists() and not (folder / "checkpoints").exists()


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The run folder, and the folder of rank 1 at its path."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "--uts", "true"]).returncode:
        pytest.skip("this system makes no namespaces of mounts and host names here")
    made = tmp_path / "run", tmp_path / "own"
    for folder in made:
        folder.mkdir()
    return made


LOCAL = ("checkpoint.local=true", "checkpoint.every=1")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def digest(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["loss_digest"]


def done(ranks: list[tuple[int, str]]) -> str:
    """The output of rank 0."""
    assert [code for code, _ in ranks] == [0, 0], ranks
    return ranks[0][1]


def test_each_node_keeps_its_checkpoints_and_the_run_continues(tmp_path):
    """With tensor parallelism, where one rank alone saves the norms that both have. The last step is then made again."""
    folder, own = folders(tmp_path)
    words = (*LOCAL, "topology.tensor=2", "zero=stage1")
    done(run_ranks(folder, words=words, own=own))
    for number, place in enumerate((folder, own)):
        step = place / "checkpoints" / "step-000002"
        assert names(step) == {"manifest.json", "run.yaml", f"rank-0000{number}.safetensors"}
    assert not (own / "metrics.jsonl").exists() and not (own / "summary.json").exists()
    straight = digest(folder)
    for place in (folder, own):
        shutil.rmtree(place / "checkpoints" / "step-000002")
    (folder / "summary.json").unlink()
    text = done(run_ranks(folder, words=words, own=own))
    assert "continues after step 1" in text and digest(folder) == straight
    shutil.rmtree(own / "checkpoints" / "step-000002")
    (folder / "summary.json").unlink()
    text = done(run_ranks(folder, words=words, own=own))
    assert "continues after step 1" in text and digest(folder) == straight
    assert "no node has rank-00001.safetensors" in text and "has no such checkpoint" in text


def test_checkpoints_of_rank_0s_node_that_are_gone_do_not_start_the_run_again(tmp_path):
    folder, own = folders(tmp_path)
    done(run_ranks(folder, words=LOCAL, own=own))
    before = (own / "checkpoints" / "step-000002" / "manifest.json").read_bytes()
    shutil.rmtree(folder)
    folder.mkdir()
    (code, text), (other, _) = run_ranks(folder, words=LOCAL, own=own)
    assert (code, other) == (2, 2), text
    assert "has checkpoints of a run, and rank 0 on" in text and "checkpoint.resume=overwrite" in text
    assert (own / "checkpoints" / "step-000002" / "manifest.json").read_bytes() == before
    done(run_ranks(folder, words=(*LOCAL, "checkpoint.resume=overwrite"), own=own))
    manifests = [place / "checkpoints" / "step-000002" / "manifest.json" for place in (folder, own)]
    assert manifests[0].read_bytes() == manifests[1].read_bytes() != before
    assert names(folder / "checkpoints") == names(own / "checkpoints")


def test_a_shared_folder_is_refused_as_a_folder_per_node(tmp_path):
    folder, _ = folders(tmp_path)
    (code, text), (other, _) = run_ranks(folder, words=LOCAL, host="another")
    assert (code, other) == (2, 2), text
    assert "rank 1 on another sees the run folder of rank 0" in text and "leave checkpoint.local=true out" in text


def test_a_folder_that_refuses_the_run_ends_all_ranks_at_once(tmp_path):
    folder = tmp_path / "run"
    assert [code for code, _ in run_ranks(folder)] == [0, 0]
    started = time.monotonic()
    (code, text), (other, _) = run_ranks(folder, words=("optimizer.lr=0.5",))
    assert (code, other) == (2, 2) and "has another run of 2 steps (optimizer.lr=0.5 here, 0.003 there)" in text
    assert time.monotonic() - started < 50  # of 60 in which the other rank would give up
