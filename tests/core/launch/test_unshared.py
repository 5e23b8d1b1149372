"""Ranks of another launcher and the folder of rank 0: one that a rank does not see, and one that refuses the run."""

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
    folder: Path, *, words: tuple[str, ...] = (), hidden: bool = False, restarts: int = 0
) -> list[tuple[int, str]]:
    """Exit code and output of two ranks, as on two nodes. hidden: rank 1 has another folder at the same path."""
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
        own = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh"]
        ranks.append(
            subprocess.Popen(
                [*(own if hidden and rank else []), *command],
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
    folder = tmp_path / "run"
    folder.mkdir()
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("this system makes no mount namespaces here")
    (code, text), (other, _) = run_ranks(folder, words=words, hidden=True, restarts=restarts)
    assert (code, other) == (2, 2), text
    assert f"{folder}: rank 1 on {socket.gethostname()} does not see the run folder of rank 0" in text
    assert not (folder / "metrics.jsonl").exists() and not (folder / "checkpoints").exists()


def test_a_folder_that_refuses_the_run_ends_all_ranks_at_once(tmp_path):
    folder = tmp_path / "run"
    assert [code for code, _ in run_ranks(folder)] == [0, 0]
    started = time.monotonic()
    (code, text), (other, _) = run_ranks(folder, words=("optimizer.lr=0.5",))
    assert (code, other) == (2, 2) and "has another run of 2 steps (optimizer.lr=0.5 here, 0.003 there)" in text
    assert time.monotonic() - started < 50  # of 60 in which the other rank would give up
