"""A rank dies while ranks connect: the others fail at once, not at the timeout."""

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

RANKS, VICTIM, PATIENCE = 3, 1, 60.0


def connect(rank: int, moment: str, store: str, pipe) -> None:
    """One rank. Returns its error and the time of the error."""
    from ztk.core.runtime.comm.node import NodeGroup

    file_store = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=RANKS)
    if rank == VICTIM:
        plant(moment, struck=Path(f"{store}.struck"))
    try:
        NodeGroup(group=dist.group.WORLD, slab_bytes=4096, timeout_seconds=PATIENCE)
        pipe.send("connected")
    except Exception as error:
        pipe.send((type(error).__name__, str(error), time.time()))
    os._exit(0)


def plant(moment: str, *, struck: Path) -> None:
    """Kills the victim in a call; `moment` names the call and its number."""
    owner, name, number = {
        "before it listens": (os, "memfd_create", 1),
        "before it connects": (socket.socket, "connect", 1),
        "connected, not named": (socket.socket, "sendall", 1),
        "connected to one": (socket.socket, "connect", 2),
        "before it shares memory": (socket, "send_fds", 1),
    }[moment]
    kept, left = getattr(owner, name), [number]

    def deadly(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            struck.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return kept(*args, **kwargs)

    setattr(owner, name, deadly)


@pytest.mark.parametrize(
    "moment",
    ["before it listens", "before it connects", "connected, not named", "connected to one", "before it shares memory"],
)
def test_a_rank_killed_while_connecting_is_missed_at_once(tmp_path, moment):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ztk.parallel.apply"])
    pipes = []
    for rank in range(RANKS):
        mine, theirs = context.Pipe()
        context.Process(target=connect, args=(rank, moment, str(tmp_path / "store"), theirs), daemon=True).start()
        theirs.close()
        pipes.append(mine)
    told = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != VICTIM and pipe.poll(PATIENCE / 2)]
    struck = float((tmp_path / "store.struck").read_text())
    assert len(told) == RANKS - 1, "a rank waits for the one that was killed"
    for kind, text, ended in told:
        assert kind == "PeerLost" and ("connecting" in text or "sharing memory" in text), text
        assert ended - struck < 2
