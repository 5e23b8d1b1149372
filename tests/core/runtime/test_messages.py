"""Messages between two ranks: sizes, dtypes, both directions at once, past collectives, to ranks that are gone or elsewhere."""

import os
import time

import pytest
import torch

from tests.core.runtime.test_comm import connect
from tests.ranks import RankFailed, RankPool
from ztk.core.runtime import CommMismatch, PeerLost

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
