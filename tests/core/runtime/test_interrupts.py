"""Ranks find a signal after the same step, with an exchange every few steps."""

import os
import socket
import time

import pytest

from tests.ranks import RankPool, forkserver
from ztk.core.runtime import Process
from ztk.core.runtime.interrupts import _MOST_STEPS, _REMEMBERED, Interrupts


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def steps_of(
    process: Process, *, steps: int, signal_at: int | None, slow_at: int | None, agrees: bool
) -> tuple[int, int]:
    """Exchanges so far, and the step after which the signal of rank 1 was found, else 0."""
    with Interrupts(process, is_active=False, agrees=True) as interrupts:
        interrupts._agrees = agrees
        assert interrupts._comm is not None
        counters = interrupts._comm.counters
        for step in range(1, steps + 1):
            if step == slow_at and process.rank == 0:
                time.sleep(0.6)
            if step == signal_at and process.rank == 1:
                interrupts._number = 15
            if interrupts.agree(ends=False)[0]:
                return counters.calls["scalars"] - 3, step
        return counters.calls["scalars"], 0


def test_quick_steps_share_an_exchange(pool):
    results = pool.run(steps_of, steps=400, signal_at=None, slow_at=None, agrees=False)
    assert results[0] == results[1]
    assert results[0][0] <= _REMEMBERED + (400 - _REMEMBERED) / _MOST_STEPS + 10


def test_a_signal_is_found_after_the_same_step_on_all_ranks(pool):
    (_, step), (_, other) = pool.run(steps_of, steps=400, signal_at=201, slow_at=None, agrees=False)
    assert step == other
    assert 201 <= step < 201 + _MOST_STEPS


def test_a_slow_step_of_one_rank_is_followed_by_an_exchange_in_each_step(pool):
    quick = pool.run(steps_of, steps=200, signal_at=None, slow_at=None, agrees=False)
    slow = pool.run(steps_of, steps=200, signal_at=None, slow_at=120, agrees=False)
    assert slow[0] == slow[1]
    assert slow[0][0] >= quick[0][0] + 50  # on the other rank, too


def test_callbacks_that_may_end_a_run_need_an_exchange_in_each_step(pool):
    results = pool.run(steps_of, steps=100, signal_at=None, slow_at=None, agrees=True)
    assert results == [(100, 0)] * 2


def _enter_or_die(rank: int, port: int, answers) -> None:
    """A rank on a node of its own. Rank 1 ends before it enters."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    process = Process.start(device="cpu", timeout_seconds=60)
    process.comm.barrier()
    if rank == 1:
        os._exit(1)
    started = time.monotonic()
    try:
        with Interrupts(process):
            answers.put("entered")
    except Exception as error:
        answers.put((type(error).__name__, time.monotonic() - started))


def test_a_rank_that_failed_before_the_first_step_is_noticed_at_once():
    """On several nodes: the connections of this context would wait for it in the store, for `timeout_seconds`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = forkserver()
    answers = context.Queue()
    ranks = [context.Process(target=_enter_or_die, args=(rank, port, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        error, seconds = answers.get(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert error == "PeerLost"
    assert seconds < 20
