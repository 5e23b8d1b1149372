"""The pool's memory: ranges by size first, buffers for the others, no memory handed out twice."""

import errno
import random
from pathlib import Path

import pytest
import torch

from ztk.core.policies.offload import PAGE_BYTES
from ztk.zero.offload import pool as pool_module
from ztk.zero.offload.pool import AlignedPool, AlignedRegion, Lease

PAGE = PAGE_BYTES


@pytest.fixture
def pool() -> AlignedPool:
    made = AlignedPool(
        num_buffers=3,
        buffer_bytes=8 * PAGE,
        rest_bytes=10 * PAGE,
        num_staging=1,
        staging_bytes=PAGE,
        new_region=lambda nbytes: AlignedRegion(nbytes=nbytes, pin=False),
    )
    yield made
    made.close()


def test_small_requests_leave_the_buffers_alone(pool):
    small = [pool.take(2 * PAGE) for _ in range(5)]
    assert not any(lease.is_buffer for lease in small)
    assert not pool.has_room(PAGE)
    large = [pool.take(8 * PAGE) for _ in range(3)]
    assert all(lease.is_buffer for lease in large)
    assert pool.take(PAGE) is None
    pool.give(small[2])
    assert pool.has_room(2 * PAGE) and not pool.has_room(3 * PAGE)


def test_what_is_taken_ahead_spares_some_of_the_rest_and_one_buffer(pool):
    first = pool.take_spare(4 * PAGE, leaving=4 * PAGE)
    assert not first.is_buffer
    others = [pool.take_spare(4 * PAGE, leaving=4 * PAGE) for _ in range(3)]
    assert [lease and lease.is_buffer for lease in others] == [True, True, None]
    assert pool.has_room(6 * PAGE) and pool.take(8 * PAGE).is_buffer


def test_adjoining_free_ranges_become_one(pool):
    leases = [pool.take(2 * PAGE) for _ in range(5)]
    for index in (0, 2, 4, 1, 3):
        pool.give(leases[index])
    assert pool.has_room(10 * PAGE)


def test_memory_is_never_given_out_twice(pool):
    chance, held = random.Random(0), []
    for _ in range(2000):
        lease = pool.take(chance.randint(1, 8) * PAGE) if chance.random() < 0.5 else None
        if lease is not None:
            assert all(lease.stop <= other.start or other.stop <= lease.start for other in held)
            pool.memory(lease).fill_(number_of(lease))
            held.append(lease)
        elif held:
            lease = held.pop(chance.randrange(len(held)))
            assert (pool.memory(lease) == number_of(lease)).all()
            pool.give(lease)
    for lease in held:
        pool.give(lease)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(lease)


def number_of(lease: Lease) -> int:
    return lease.start // PAGE % 251


class Driver:
    """CUDA's functions for page-locked memory. locked: at which addresses; mapped: whether memory was there when it was unlocked."""

    def __init__(self) -> None:
        self.locked: list[int] = []
        self.mapped: list[bool] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        self.mapped.append(any(int(start, 16) <= address < int(stop, 16) for start, stop in spans))
        return 0


def test_a_kernel_without_huge_pages_has_memory(monkeypatch):
    def refused(mapping: object, advice: int) -> None:
        raise OSError(errno.EINVAL, "no transparent huge pages")

    monkeypatch.setattr(pool_module, "_Mapping", type("Mapping", (pool_module._Mapping,), {"madvise": refused}))
    assert AlignedRegion(nbytes=5000, pin=False).bytes.sum() == 0


@pytest.mark.parametrize("closes", [True, False])
def test_memory_is_unlocked_before_it_goes(closes, monkeypatch):
    """Also for a store that was dropped: the driver refuses to lock memory that it regards as locked."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    region = AlignedRegion(nbytes=5000, pin=True)
    view = region.bytes[10:]
    assert driver.locked == [region.bytes.data_ptr()]
    if closes:
        region.close()
        region.close()
        assert not driver.locked
    del region
    assert bool(driver.locked) == (not closes)  # a tensor still views it
    del view
    assert not driver.locked and driver.mapped == [True]
