"""Ranks that wait for different collectives over a transport without label checks: both report the other's position."""

import contextlib
import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, RankPool
from ztk.core.runtime import MemoryLedger, Process
from ztk.core.runtime.buffers import BufferPool
from ztk.core.runtime.comm import Comm, CommMismatch, node
from ztk.core.runtime.comm.gloo import GlooTransport
from ztk.core.runtime.comm.transport import Transport
from ztk.core.runtime.comm.watchdog import Watchdog
from ztk.core.runtime.streams import use_api

PATIENCE = 0.5


def watched(process: Process, *, number: int) -> Comm:
    options = {"number": number, "patience": PATIENCE, "ends_process": False}
    store = dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(store, rank=process.rank, ranks=range(process.world_size), **options)
    transport = GlooTransport(group=dist.new_group(backend="gloo"))
    return Comm(transport, rank=process.rank, size=process.world_size, device=process.device, watchdog=watchdog)


def part_ways(process: Process) -> str:
    comm = watched(process, number=1001)
    full = torch.zeros(8)
    comm.all_gather(full, label="blocks.1").wait()
    start = time.monotonic()
    try:
        if process.rank == 0:
            comm.reduce_scatter(full, out=full[:4], label="blocks.2").wait()
        else:
            comm.broadcast(full, source=0, label="blocks.3").wait()
    except CommMismatch as error:
        assert time.monotonic() - start < 10
        return str(error)
    return "nobody noticed"


def test_ranks_that_ran_different_modules_get_an_error():
    pool = RankPool(2)  # of its own: its threads stay caught in gloo
    try:
        texts = pool.run(part_ways)
    finally:
        pool.close()
    for text in texts:
        assert "reduce_scatter blocks.2" in text and "broadcast blocks.3" in text and "different modules" in text


def one_is_late(process: Process) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        comm = watched(process, number=1002)
        full = torch.zeros(8)
        comm.all_gather(full, label="first").wait()
        if process.rank == 1:
            time.sleep(6 * PATIENCE)
        comm.all_gather(full, label="second").wait()
        comm.close()
    return said.getvalue()


def test_a_rank_that_is_late_is_named_once_and_waited_for(ranks):
    waiting, late = ranks(2).run(one_is_late)
    assert "rank 1 has not arrived yet and was last at 'all_gather first" in waiting
    assert waiting.count("has not arrived yet") == 1
    assert late == ""


def stopped_rank(process: Process) -> str:
    """Over shared memory, which has no watchdog."""
    node.PATIENCE_SECONDS = PATIENCE
    messages = io.StringIO()
    handler = logging.StreamHandler(messages)
    node.logger.addHandler(handler)
    if process.rank == 1:
        time.sleep(6 * PATIENCE)
    process.comm.all_gather(torch.zeros(8), label="blocks.7").wait()
    node.logger.removeHandler(handler)
    return messages.getvalue()


def test_over_shared_memory_a_late_rank_is_named_once_and_waited_for(ranks):
    waiting, late = ranks(2).run(stopped_rank)
    assert "rank 0 waits at 'all_gather blocks.7" in waiting and "rank 1 has not arrived" in waiting
    assert waiting.count("has not arrived") == 1
    assert late == ""


def test_over_shared_memory_the_barrier_itself_raises(ranks):
    with pytest.raises(RankFailed, match="different modules or shapes"):
        ranks(2).run(over_shared_memory)


def over_shared_memory(process: Process) -> None:
    process.comm.all_gather(torch.zeros(8), label=f"blocks.{process.rank}").wait()


class Device(Transport):
    """A transport as NCCL's, and the `StreamApi` of a GPU that is far behind the host. asked: how often a collective or an event was asked
    whether it is over."""

    blocking = checks_labels = False

    def __init__(self) -> None:
        self.asked, self.captures, self.is_behind = 0, False, True

    def all_gather(self, full: torch.Tensor, *, label: str) -> SimpleNamespace:
        """Like torch's work object: it holds its tensors until it is deleted, also after a wait."""
        return SimpleNamespace(tensors=[full], wait=lambda: None, is_completed=self.query)

    def query(self) -> bool:
        self.asked += 1
        if self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return not self.is_behind

    def current(self, device: torch.device) -> "Device":
        return self

    def record_event(self) -> "Device":
        return self

    def has_streams(self, tensor: torch.Tensor) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.captures


@pytest.fixture
def device() -> Iterator[Device]:
    with use_api(found := Device()):
        yield found


@pytest.fixture
def comm(device) -> Iterator[Comm]:
    options = {"number": 0, "rank": 0, "ranks": range(2), "patience": PATIENCE, "ends_process": False}
    found = Comm(device, rank=0, size=2, device=torch.device("cpu"), watchdog=Watchdog(dist.HashStore(), **options))
    yield found
    found._watchdog.close()


def test_a_buffer_is_free_when_the_stream_has_waited_though_the_device_is_behind(comm, device):
    pool = BufferPool(device=torch.device("cpu"), ledger=MemoryLedger(), category="gathered")
    places = set()
    for number in range(5):
        buffer = pool.acquire(64, dtype=torch.float32)
        places.add(buffer.data_ptr())
        comm.all_gather(buffer, label=f"blocks.{number}").wait()
        pool.release(buffer, may_be_viewed=True)
    assert len(places) == 1
    assert len(comm._watchdog._open) == 5  # all of them are watched until the device has come so far
    device.is_behind = False
    comm.all_gather(torch.zeros(2), label="last")
    assert len(comm._watchdog._open) == 1


class CountingStore:
    """A store that counts requests, as one that many ranks reach over a network."""

    def __init__(self) -> None:
        self.store, self.requests, self.lock = dist.HashStore(), 0, threading.Lock()

    def __getattr__(self, name: str):
        with self.lock:
            self.requests += 1
        return getattr(self.store, name)

    @property
    def bytes(self) -> int:
        """Of the answers and of the request."""
        keys = [f"ztk/watchdog/0/0/{name}" for name in (*range(64), "request")]
        return sum(len(key) + len(self.store.get(key)) for key in keys if self.store.check([key]))


def stalled(store: CountingStore, *, ranks: int, patience: float = PATIENCE) -> list[Watchdog]:
    """The watchdogs of ranks that all wait except for the last one, on hosts that run thousands of collectives ahead of the device."""
    given = {"number": 0, "ranks": range(ranks), "patience": patience, "ends_process": False}
    made = [Watchdog(store, rank=rank, **given) for rank in range(ranks)]
    for number in range(1, 3001):  # by turns, so that the waits begin together
        for watchdog in made if number < 1000 else made[:-1]:
            entered = watchdog.enter(f"all_gather layers.{number}.mlp 16777216 x bfloat16")
            watchdog.leave(entered, is_over=lambda number=number: number < 2000)
    return made


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_labels_are_stored_only_while_a_rank_waits_long():
    store = CountingStore()
    watchdog = Watchdog(store, number=0, rank=0, ranks=range(2), patience=PATIENCE, ends_process=False)
    for number in range(100):
        watchdog.leave(watchdog.enter(f"all_gather layers.{number}"))
    wait_for(lambda: store.requests > 8)
    watchdog.close()
    assert store.bytes == 0


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_stall_costs_each_rank_a_few_requests_and_under_2_kb(caplog, ranks):
    store, patience = CountingStore(), ranks / 8  # all threads of one process answer within it
    with caplog.at_level(logging.WARNING):
        watchdogs = stalled(store, ranks=ranks, patience=patience)
        wait_for(lambda: len(caplog.records) == ranks - 1)
        stored, before, start = store.bytes, store.requests, time.monotonic()
        time.sleep(2 * patience)
        looks = (time.monotonic() - start) * 4 / patience + 1
    assert store.requests - before <= 5 * ranks * looks  # each rank looks; the one that asked reads the answers of all
    for watchdog in watchdogs:
        watchdog.close()
    assert 500 * ranks < stored < 2048 * ranks
    (text,) = {record.getMessage() for record in caplog.records}  # of the rank that asked, in the log of all that wait
    assert f"rank {ranks - 1} has not arrived yet and was last at 'all_gather layers.999.mlp" in text
    assert f"group 0 of ranks 0 to {ranks - 1}: rank " in text


def test_a_rank_answers_with_the_collectives_around_the_one_that_it_waits_for():
    store = CountingStore()
    watchdogs = stalled(store, ranks=3)
    wait_for(lambda: sum(store.store.check([f"ztk/watchdog/0/0/{rank}"]) for rank in range(3)) == 2)
    for watchdog in watchdogs:
        watchdog.close()
    answers = [
        json.loads(store.store.get(f"ztk/watchdog/0/0/{rank}"))[1]
        for rank in range(3)
        if store.store.check([f"ztk/watchdog/0/0/{rank}"])
    ]
    assert [*range(1992, 2001), *range(2993, 3001)] in [[number for number, _ in labels] for labels in answers]


def test_a_rank_that_ran_ahead_is_compared_at_the_number_of_the_one_that_waits():
    """The source of broadcasts leaves each of them before the other rank has entered one."""
    store, options = dist.HashStore(), {"number": 0, "ranks": range(2), "patience": PATIENCE, "ends_process": False}
    source, waiting = (Watchdog(store, rank=rank, **options) for rank in range(2))
    for number in range(5):
        source.leave(source.enter(f"broadcast piece.{number}"))
    source.enter("all_gather end")
    waiting.enter("all_gather end")
    wait_for(lambda: waiting.mismatch is not None and source.mismatch is not None)
    source.close()
    waiting.close()
    assert "rank 0 is at 'broadcast piece.0', rank 1 at 'all_gather end'" in str(waiting.mismatch)
    assert str(source.mismatch) == str(waiting.mismatch)


def test_messages_name_hosts_and_count_the_ranks_on_each_side(monkeypatch):
    monkeypatch.setenv("ZTK_HOSTS", "node-a*4 node-b*4")
    store, options = (
        dist.HashStore(),
        {"number": 7, "ranks": range(1, 8, 2), "patience": PATIENCE, "ends_process": False},
    )
    watchdogs = [Watchdog(store, rank=rank, **options) for rank in range(4)]
    for rank, watchdog in enumerate(watchdogs):
        watchdog.enter("all_reduce a" if rank == 2 else "all_reduce b")
    wait_for(lambda: all(watchdog.mismatch is not None for watchdog in watchdogs))
    for watchdog in watchdogs:
        watchdog.close()
    expected = "group 7 of ranks 1 to 7 in steps of 2: rank 1 on node-a (and 2 more) is at 'all_reduce b', rank 5 on node-b at 'all_reduce a'"
    assert expected in str(watchdogs[0].mismatch)


def test_a_stopped_process_is_told_from_a_late_one(caplog):
    """It gives no answer to the rank that waits."""
    waiting = Watchdog(dist.HashStore(), number=0, rank=0, ranks=range(2), patience=PATIENCE, ends_process=False)
    with caplog.at_level(logging.WARNING):
        waiting.enter("all_gather end")
        wait_for(lambda: caplog.records)
    waiting.close()
    assert "rank 1 does not answer: its process is stopped" in caplog.text


@pytest.mark.parametrize("over", ["gloo", "shared memory"])
def test_a_flag_of_any_rank_reaches_all_by_one_collective(ranks, over):
    assert ranks(3).run(flags, over=over) == [[True, False, True]] * 3


def flags(process: Process, *, over: str) -> list[bool]:
    comm = process.comm if over == "shared memory" else watched(process, number=1003)
    found = [comm.any(process.rank in ranks, label="flag") for ranks in ((1,), (), (0, 2))]
    assert comm.counters.bytes["scalars"] >= 12
    if over == "gloo":
        comm.close()
    return found


def test_a_collective_of_a_graph_asks_no_event(comm, device):
    comm.all_gather(torch.zeros(2), label="before").wait()
    device.asked, device.captures = 0, True
    for number in range(3):
        comm.all_gather(torch.zeros(2), label=f"recorded {number}").wait()
    time.sleep(PATIENCE)  # the thread looks four times in it
    assert not device.asked
    device.captures = False
    comm.all_gather(torch.zeros(2), label="after")
    assert device.asked and [entered.label.split()[1] for entered in comm._watchdog._open] == ["before", "after"]
