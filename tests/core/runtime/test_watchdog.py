"""Ranks that wait for different collectives over a transport without label checks: both report the other's position."""

import contextlib
import io
import json
import logging
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


def watched(process: Process, *, name: str) -> Comm:
    store = dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(
        store, name=name, rank=process.rank, size=process.world_size, patience=PATIENCE, ends_process=False
    )
    transport = GlooTransport(group=dist.new_group(backend="gloo"))
    return Comm(transport, rank=process.rank, size=process.world_size, device=process.device, watchdog=watchdog)


def part_ways(process: Process) -> str:
    comm = watched(process, name="parting")
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
        comm = watched(process, name="lateness")
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
    options = {"name": "alone", "rank": 0, "size": 2, "patience": PATIENCE, "ends_process": False}
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


def test_a_rank_publishes_a_few_collectives_under_a_short_key(device):
    """Also those around the collective that it waits for, though the host has run thousands ahead of the device."""
    store, name = dist.HashStore(), f"group 0 of ranks {','.join(map(str, range(1024)))}"
    watchdog = Watchdog(store, name=name, rank=0, size=1024, patience=PATIENCE, ends_process=False)
    for number in range(1, 3001):
        entered = watchdog.enter(f"all_gather layers.{number}.mlp 16777216 x bfloat16")
        watchdog.leave(entered, is_over=lambda number=number: number < 2000)
    time.sleep(PATIENCE)
    watchdog.close()
    assert len(watchdog._key(0)) < 64
    text = store.get(watchdog._key(0)).decode()
    assert len(text) < 2048
    numbers = [number for number, _ in json.loads(text)]
    assert numbers == [*range(1992, 2001), *range(2993, 3001)]


def test_a_rank_that_ran_ahead_is_compared_at_the_number_of_the_one_that_waits():
    """The source of broadcasts leaves each of them before the other rank has entered one."""
    store, options = dist.HashStore(), {"size": 2, "patience": PATIENCE, "ends_process": False}
    source, waiting = (Watchdog(store, name="ahead", rank=rank, **options) for rank in range(2))
    for number in range(5):
        source.leave(source.enter(f"broadcast piece.{number}"))
    source.enter("all_gather end")
    waiting.enter("all_gather end")
    end = time.monotonic() + 30
    while waiting.mismatch is None and time.monotonic() < end:
        time.sleep(0.05)
    source.close()
    waiting.close()
    assert "rank 1 is at 'all_gather end', rank 0 at 'broadcast piece.0'" in str(waiting.mismatch)


@pytest.mark.parametrize("over", ["gloo", "shared memory"])
def test_a_flag_of_any_rank_reaches_all_by_one_collective(ranks, over):
    assert ranks(3).run(flags, over=over) == [[True, False, True]] * 3


def flags(process: Process, *, over: str) -> list[bool]:
    comm = process.comm if over == "shared memory" else watched(process, name="flags")
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
