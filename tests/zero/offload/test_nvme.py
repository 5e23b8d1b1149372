"""Properties of the disk tier alone: order, overlap, a bounded pool, exact counts."""

import functools
import mmap
import resource
import threading
import time

import pytest
import torch

from ztk.core.policies.offload import PAGE_BYTES as PAGE
from ztk.core.runtime.io import Direction, IoCounters
from ztk.core.runtime.memory import Tier
from ztk.zero.offload import NvmeStore, OffloadPolicy, PoolExhausted, StoreClosed
from ztk.zero.offload.io_engine import Urgency


def _slots(store, count, *, numel=1024, keep=False):
    allocate = functools.partial(store.allocate, shape=(numel,), dtype=torch.float32, category="optimizer", keep=keep)
    return [allocate(name=f"s{i}") for i in range(count)]


def _catch_in_a_write(store, *, slot, faults) -> None:
    """Keeps the store's only thread writing `slot` until `faults.hold_writes` is set."""
    faults.hold_writes.clear()
    store.put(slot, value=torch.ones(1024))
    while any(store._engine._queues.values()):  # until the thread has taken it
        time.sleep(0.001)


def test_a_fetch_waits_for_the_put_before_it(make_store, faults) -> None:
    store = make_store()
    (slot,) = _slots(store, 1, numel=4096)
    faults.hold_writes.clear()
    tensor = store.fetch(slot).wait().fill_(7)
    store.put(slot, value=tensor)
    again = store.fetch(slot)
    time.sleep(0.05)
    assert not again.transfer.done
    faults.hold_writes.set()
    assert bool((again.wait() == 7).all())


def test_what_is_being_written_is_read_from_memory(make_store, faults, counters) -> None:
    store = make_store()
    (slot,) = _slots(store, 1, numel=4096)
    faults.hold_writes.clear()
    for value in (1.0, 2.0):  # the second write waits for the first
        store.put(slot, value=torch.full((4096,), value))
        assert bool((store.fetch_into(slot, out=torch.zeros(4096)).wait() == value).all())
    faults.hold_writes.set()
    store.flush()
    assert counters.read_bytes == 0
    assert bool((store.fetch_into(slot, out=torch.zeros(4096)).wait() == 2).all())
    assert counters.read_bytes == 4 * PAGE


def test_what_is_kept_never_reaches_the_disk(make_store, faults, counters) -> None:
    """Kept slots take half of the room outside the three buffers, here two slots; the third is written as before."""
    store = make_store(buffer_count=3 + 4)
    slots = _slots(store, 3, numel=4096, keep=True)
    for value, slot in enumerate(slots):
        store.put(slot, value=torch.full((4096,), float(value)))
    for value, slot in enumerate(slots):
        assert bool((store.fetch_into(slot, out=torch.empty(4096)).wait() == value).all())
        assert bool((store.fetch(slot).wait() == value).all())
        store.release(slot)
        assert bool((store.fetch(slot).wait() == value).all()), "a release forgets nothing"
        store.put(slot, value=store.fetch(slot).wait().add_(1))
        assert bool((store.fetch(slot).wait() == value + 1).all())
    store.flush()
    assert {offset // (4 * PAGE) for _, offset in faults.log} == {2}
    assert counters.write_bytes == 2 * 4 * PAGE


def test_what_is_forgotten_makes_room_when_its_transfers_have_ended(make_store, faults) -> None:
    store = make_store(buffer_count=3 + 2, threads=1)
    (kept,), (other,) = _slots(store, 1, numel=4096, keep=True), _slots(store, 1)
    _catch_in_a_write(store, slot=other, faults=faults)
    copy = store.put(kept, value=torch.ones(4096))
    store.forget(kept)
    assert not store._pool.has_room(2 * 4 * PAGE), "the copy still has to be made"
    faults.hold_writes.set()
    copy.wait()
    assert store._pool.has_room(2 * 4 * PAGE)
    store.flush()
    assert {offset // (4 * PAGE) for _, offset in faults.log} == {1}
    store.put(kept, value=torch.full((4096,), 2.0))
    assert bool((store.fetch(kept).wait() == 2).all()), "and again"


def test_prefetches_leave_room_for_kept_slots(make_store) -> None:
    """Of four slots' room two are left to kept ones, if there are so many; of the three buffers one."""
    store = make_store(buffer_count=3 + 4)
    states, (gradient,) = _slots(store, 7, numel=4096), _slots(store, 1, numel=4096, keep=True)

    def ahead() -> int:
        return sum(store.fetch_ahead(slot) is not None and len(store.fetch(slot).wait()) == 4096 for slot in states)

    assert store.has_room(states[0])
    assert ahead() == 3 + 2
    assert not store.has_room(states[6])
    store.put(gradient, value=torch.ones(4096)).wait()
    assert ahead() == 3 + 2, "those that are here"
    store.forget(gradient)
    assert ahead() == 3 + 2, "for the next one"
    for slot in states:
        store.release(slot)
    _slots(store, 5, numel=4096, keep=True)
    assert ahead() == 2 + 2


def test_updates_go_on_with_all_but_one_buffer_read_ahead(make_store) -> None:
    """The smallest pool, gradients on the disk too: each slot's gradient passes through the one buffer that was spared."""
    store = make_store(buffer_count=3)
    states, gradients = _slots(store, 6, numel=4096), _slots(store, 6, numel=4096)
    for number, gradient in enumerate(gradients):
        store.put(gradient, value=torch.full((4096,), float(number)))
    for _ in range(3):
        store.flush()
        ahead = [pending for slot in states if (pending := store.fetch_ahead(slot)) is not None]
        assert len(ahead) == 2
        for state, gradient in zip(states, gradients, strict=True):
            here = store.fetch(gradient).wait()
            store.put(state, value=store.fetch(state).wait().add_(here))
            store.release(gradient)
    for number, state in enumerate(states):
        assert bool((store.fetch(state).wait() == 3 * number).all())
        store.release(state)


def test_a_put_waits_for_reads_and_puts_before_it(make_store, faults) -> None:
    store = make_store(threads=4)
    (slot,) = _slots(store, 1, numel=4096)
    faults.read_delay = faults.write_delay = 0.01
    for value in range(4):
        store.put(slot, value=torch.full((4096,), float(value)))  # releases the earlier fetches
        last = store.fetch(slot)
    assert bool((last.wait() == 3).all())
    assert [way for way, _ in faults.log] == (["write"] * 4 + ["read"] * 4) * 4


def test_reads_go_before_writes_that_wait(make_store, faults) -> None:
    """One thread, caught in a write: behind it parameters come first, then states, then the other writes."""
    store = make_store(threads=1)
    slots = _slots(store, 5)
    _catch_in_a_write(store, slot=slots[0], faults=faults)
    for slot in slots[1:3]:
        store.put(slot, value=torch.ones(1024))
    states, parameters = store.fetch(slots[3]), store.fetch_into(slots[4], out=torch.zeros(1024))
    faults.hold_writes.set()
    store.flush()
    states.wait(), parameters.wait()
    assert [way for way, _ in faults.log] == ["write", "read", "read", "write", "write"]
    assert [offset // PAGE for way, offset in faults.log if way == "read"] == [4, 3]


def test_a_write_that_somebody_waits_for_goes_before_reads_ahead(make_store, faults) -> None:
    store = make_store(threads=1)
    slots = _slots(store, 5)
    _catch_in_a_write(store, slot=slots[0], faults=faults)
    store.put(slots[1], value=torch.ones(1024))
    gradient = store.put(slots[2], value=torch.ones(1024))
    states = store.fetch(slots[3])
    waiting = threading.Thread(target=gradient.wait)
    waiting.start()
    for _ in range(1000):  # until it waits
        if store._engine._queues[Urgency.awaited]:
            break
        time.sleep(0.001)
    faults.hold_writes.set()
    store.flush()
    states.wait(), waiting.join()
    assert faults.log == [("write", 0), ("write", 2 * PAGE), ("read", 3 * PAGE), ("write", PAGE)]


def test_a_slot_is_read_while_one_is_updated_and_one_is_written(make_store, faults) -> None:
    store = make_store(threads=2)
    slots = _slots(store, 3)
    offsets = [PAGE * number for number in range(3)]
    first, second = (store.fetch(slot).wait() for slot in slots[:2])
    faults.log.clear()
    faults.hold_writes.clear()
    store.put(slots[0], value=first)  # returns, and the write waits
    third = store.fetch(slots[2])
    second.add_(1)
    until = time.monotonic() + 10
    while not faults.log and time.monotonic() < until:  # no wait for the read
        time.sleep(0.001)
    assert faults.log == [("read", offsets[2])]
    faults.hold_writes.set()
    third.wait()
    store.put(slots[1], value=second)
    store.flush()
    assert sorted(faults.log[1:]) == [("write", offsets[0]), ("write", offsets[1])]


def test_a_fetch_without_a_buffer_starts_when_a_write_ends(make_store, faults) -> None:
    store = make_store()
    slots = _slots(store, 4)
    tensors = [store.fetch(slot).wait() for slot in slots[:3]]
    faults.hold_writes.clear()
    store.put(slots[0], value=tensors[0])
    fourth = store.fetch(slots[3])
    assert fourth.buffer is None
    threading.Timer(0.05, faults.hold_writes.set).start()
    assert not fourth.wait().any()


def test_an_exhausted_pool_is_an_error_not_a_hang(make_store) -> None:
    store = make_store()
    slots = _slots(store, 5)
    for slot in slots:  # buffers have returned before
        store.put(slot, value=store.fetch(slot).wait())
    held = [store.fetch(slot).wait() for slot in slots[:3]]
    queued = store.fetch(slots[3])
    with pytest.raises(PoolExhausted, match=r"pool's 3 buffers.*offload\.buffer_count"):
        queued.wait()
    store.put(slots[3], value=torch.ones(1024)).wait()  # needs no buffer, and drops the queued fetch
    with pytest.raises(StoreClosed):
        queued.wait()
    assert bool((store.fetch_into(slots[3], out=torch.zeros(1024)).wait() == 1).all())
    later = store.fetch(slots[4])
    store.put(slots[0], value=held[0])
    assert not later.wait().any()


def test_release_at_any_time_returns_the_buffer(make_store, faults) -> None:
    store = make_store()
    slots = _slots(store, 5)
    faults.read_delay = 0.02
    for _ in range(3):
        for slot in slots:  # three running, two queued
            store.fetch(slot)
        for slot in slots:
            store.release(slot)
            store.release(slot)
    for slot in slots:
        assert not store.fetch(slot).wait().any()
        store.release(slot)


def test_fetch_twice_is_one_fetch(make_store, counters) -> None:
    store = make_store()
    (slot,) = _slots(store, 1)
    assert store.fetch(slot).wait().data_ptr() == store.fetch(slot).wait().data_ptr()
    assert counters.read_bytes == PAGE


def test_a_slot_larger_than_a_buffer_names_the_key(make_store) -> None:
    store = make_store()
    (slot,) = _slots(store, 1, numel=4097)
    with pytest.raises(ValueError, match=r"offload\.buffer_bytes=20480"):
        store.fetch(slot)
    store.put(slot, value=torch.arange(4097.0))
    assert torch.equal(store.fetch_into(slot, out=torch.empty(4097)).wait(), torch.arange(4097.0))


def test_counters_are_exact(make_store, counters, faults) -> None:
    store = make_store()
    slots = _slots(store, 3, numel=1025)
    faults.read_delay = faults.write_delay = 0.01
    start = time.perf_counter()
    for slot in slots:
        store.put(slot, value=torch.ones(1025))
    store.flush()
    write_elapsed = time.perf_counter() - start
    assert (counters.write_bytes, counters.write_payload_bytes) == (3 * 2 * PAGE, 3 * 4100)
    assert (counters.read_bytes, counters.read_seconds) == (0, 0.0)
    start = time.perf_counter()
    for slot in slots:
        store.fetch_into(slot, out=torch.empty(1025)).wait()
    read_elapsed = time.perf_counter() - start
    assert (counters.read_bytes, counters.read_payload_bytes) == (3 * 2 * PAGE, 3 * 4100)
    # six calls of 10 ms over two threads: at least 30 ms busy, and never more than the clock on the wall
    assert 0.029 < counters.write_seconds <= write_elapsed and 0.029 < counters.read_seconds <= read_elapsed
    assert counters.busy_seconds == pytest.approx(counters.read_seconds + counters.write_seconds)


def test_overlapping_transfers_count_their_union() -> None:
    counters = IoCounters()
    read = counters.moving(Direction.read, nbytes=1, payload_bytes=1)
    write = counters.moving(Direction.write, nbytes=1, payload_bytes=1)
    start = time.perf_counter()
    with read:
        time.sleep(0.01)
        with write:
            time.sleep(0.01)
    elapsed = time.perf_counter() - start
    assert counters.busy_seconds == pytest.approx(counters.read_seconds)
    assert 0.01 <= counters.write_seconds < counters.read_seconds <= elapsed


def test_a_failed_transfer_counts_no_bytes() -> None:
    counters = IoCounters()
    with pytest.raises(OSError), counters.moving(Direction.read, nbytes=1, payload_bytes=1):
        raise OSError
    assert counters.read_bytes == 0


def test_the_pool_is_all_the_memory(tmp_path, ledger) -> None:
    """64 MiB of slots through a pool of 4 MiB: the resident memory grows by the pool, not by the slots."""
    policy = OffloadPolicy(
        optimizer="nvme", nvme_path=str(tmp_path), buffer_count=3, buffer_bytes=1 << 20, block_bytes=1 << 18, threads=4
    )
    store = NvmeStore(policy, rank=0, ledger=ledger, counters=IoCounters())
    slots = _slots(store, 64, numel=1 << 18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        ahead = store.fetch(slots[0])
        for i, slot in enumerate(slots):
            tensor = ahead.wait().add_(1)
            ahead = store.fetch(slots[(i + 1) % 64])
            store.put(slot, value=tensor)
        store.release(slots[0])
    store.flush()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown <= policy.pool_bytes + (4 << 20), f"resident memory grew by {grown} bytes"
    assert ledger.peak(Tier.host) == policy.pool_bytes and ledger.peak(Tier.nvme) == 64 << 20
    assert bool((store.fetch(slots[5]).wait() == 2).all())
    store.close()


def test_fetched_memory_is_page_aligned(make_store) -> None:
    store = make_store()
    for slot in _slots(store, 3, numel=5):
        assert store.fetch(slot).wait().data_ptr() % mmap.PAGESIZE == 0


def test_close_ends_pending_transfers(make_store, faults) -> None:
    store = make_store()
    slots = _slots(store, 5, numel=4096)
    faults.write_delay = faults.read_delay = 0.01
    writes = [store.put(slot, value=torch.ones(4096)) for slot in slots]
    reads = [store.fetch(slot) for slot in slots]
    store.close()
    for pending in (writes[-1], *reads):
        with pytest.raises(StoreClosed):
            pending.wait()
