"""Messages between two ranks: sizes, dtypes, both directions at once, past collectives, to ranks that are gone or elsewhere."""

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.core.runtime.test_comm import connect
from tests.ranks import RankFailed, RankPool
from ztk.core.runtime import CommMismatch, PeerLost, Process, Topology
from ztk.core.runtime.comm.gloo import GlooTransport

BIG = 3 << 20  # more than a socket holds: the sender must wait for the receiver


def tensor(rank: int, *, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) % 7 + rank).to(dtype)


def exchange(process, *, transport: str) -> dict:
    """Every rank exchanges messages with every other one at the same time."""
    comm, rank = connect(process, transport=transport), process.rank
    peers = [peer for peer in range(process.world_size) if peer != rank]
    cases = [(dtype, n) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool) for n in (1, 1000)]
    cases.append((torch.uint8, BIG))
    for dtype, numel in cases:
        outs = {peer: torch.zeros(numel, dtype=dtype) for peer in peers}
        works = [comm.send(tensor(rank, numel=numel, dtype=dtype), to=peer, label="case") for peer in peers]
        full = torch.full((128 * process.world_size,), float(rank))
        collective = comm.all_gather(full, label="beside")
        works += [comm.recv(outs[peer], source=peer, label="case") for peer in reversed(peers)]
        for work in works:
            work.wait()
        collective.wait()
        assert full.view(process.world_size, -1)[:, 0].tolist() == list(range(process.world_size))
        for peer in peers:
            assert torch.equal(outs[peer], tensor(peer, numel=numel, dtype=dtype))
    return {"bytes": comm.counters.bytes["send"], "calls": comm.counters.calls["send"]}


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_everybody_to_everybody(ranks, transport):
    expected = 3 * (sum(1001 * size for size in (4, 2, 8, 1)) + BIG)  # counted by the sender, to three peers
    for found in ranks(4).run(exchange, transport=transport):
        assert found == {"bytes": expected, "calls": 3 * 9}


def in_order(process) -> list[float]:
    comm, received = process.comm, torch.zeros(100)
    if process.rank == 0:
        works = [comm.send(torch.full((1,), float(i)), to=1, label=str(i)) for i in range(100)]
    else:
        works = [comm.recv(received[i : i + 1], source=0, label=str(i)) for i in range(100)]
    for work in works:
        work.wait()
    return received.tolist()


def test_messages_arrive_in_order(ranks):
    assert ranks(2).run(in_order)[1] == [float(i) for i in range(100)]


def at_odds(process) -> None:
    if process.rank == 0:
        process.comm.send(torch.zeros(4), to=1, label="activation 0.1").wait()
    else:
        process.comm.recv(torch.zeros(4), source=0, label="activation 0.2").wait()


def test_an_unexpected_message_is_named():
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match=rf"{CommMismatch.__name__}.*activation 0\.2.*sent 'activation 0\.1'"):
            pool.run(at_odds)
    finally:
        pool.close()


def lonely(process, *, sends: bool) -> float:
    """Rank 1 dies while rank 0 sends to it or waits for it."""
    if process.rank == 1:
        time.sleep(0.3)
        os._exit(1)
    start = time.perf_counter()
    with pytest.raises(PeerLost):
        if sends:
            process.comm.send(torch.zeros(BIG), to=1, label="x").wait()
        else:
            process.comm.recv(torch.zeros(4), source=1, label="x").wait()
    seconds = time.perf_counter() - start
    assert seconds < 5, seconds  # milliseconds after the death; a loaded machine may take longer to die
    raise RuntimeError("rank 0 was told")


@pytest.mark.parametrize("sends", [True, False])
def test_a_dead_peer_is_missed_at_once(sends):
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match="rank 0 was told"):
            pool.run(lonely, sends=sends)
    finally:
        pool.close()


def names_in_errors(process: Process) -> list[str]:
    """Of a mismatch in a group of two of the four ranks, of one between messages, and of a lost peer over gloo."""
    os.environ["ZTK_HOSTS"] = "a*2 b*2"
    texts, group = [], process.arrange(Topology(tensor=2)).mesh.comm("tp")
    for call in (
        lambda: group.all_gather(torch.zeros(2), label=f"own.{process.rank}"),
        lambda: (
            group.send(torch.zeros(1), to=1, label="x")
            if group.rank == 0
            else group.recv(torch.zeros(1), source=0, label="y")
        ),
    ):
        try:
            call().wait()
        except CommMismatch as error:
            texts.append(str(error))
    dist.barrier()  # a receiver that closes after the header leaves its sender a broken pipe
    group.close()
    transport = GlooTransport(group=dist.new_group(backend="gloo"))
    with mock.patch("torch.distributed.send", side_effect=RuntimeError("Connection closed by peer [10.0.0.2]:9")):
        try:
            transport.send(torch.zeros(1), to=2, label="activation")
        except PeerLost as error:
            texts.append(str(error))
    del os.environ["ZTK_HOSTS"]
    return texts


def test_errors_name_ranks_of_the_run_and_their_hosts(ranks):
    texts = ranks(4).run(names_in_errors)
    assert "rank 3 on b is at 'all_gather own.3 2 x float32', rank 2 on b at 'all_gather own.2" in texts[3][0]
    assert "rank 3 on b waits for 'y' of 4 bytes, rank 2 on b sent 'x'" in texts[3][1]
    assert texts[0][-1].startswith("activation, with rank 2 on b: Connection closed")
