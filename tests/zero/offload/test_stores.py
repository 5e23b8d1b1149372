"""Both stores against a model in memory: same calls, same bytes, whatever the order and the sizes."""

import random
import threading

import pytest
import torch

from ztk.core.policies.offload import PAGE_BYTES as PAGE
from ztk.core.runtime.memory import Tier
from ztk.zero.offload import HostStore, OffloadPolicy

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)


@pytest.fixture(params=["host", "nvme", "nvme_buffered", "nvme_keeping"])
def store(request, make_store, ledger):
    if request.param == "host":
        store = HostStore(OffloadPolicy(optimizer="cpu"), ledger=ledger)
        yield store
        store.close()
    else:
        yield make_store(
            direct_io=request.param != "nvme_buffered", buffer_count=9 if request.param == "nvme_keeping" else 3
        )


def test_a_new_slot_reads_as_zeros(store) -> None:
    slot = store.allocate(name="a", shape=(3, 341), dtype=torch.float32, category="optimizer")
    fetched = store.fetch(slot).wait()
    assert fetched.shape == (3, 341) and fetched.dtype == torch.float32 and not fetched.any()
    store.release(slot)
    out = torch.ones(3, 341)
    assert store.fetch_into(slot, out=out).wait() is out and not out.any()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (1024,), (1025,), (2, 0, 3), (4095,)])
def test_every_size_returns(store, shape) -> None:
    slot = store.allocate(name="a", shape=shape, dtype=torch.float32, category="optimizer")
    value = torch.randn(shape)
    fetched = store.fetch(slot).wait()
    fetched.copy_(value)
    store.put(slot, value=fetched)
    assert torch.equal(store.fetch(slot).wait(), value)
    store.release(slot)
    store.put(slot, value=value + 1)
    out = torch.empty(shape)
    store.fetch_into(slot, out=out).wait()
    assert torch.equal(out, value + 1)


@pytest.mark.parametrize("seed", range(6))
def test_random_interleavings_equal_a_model(store, seed) -> None:
    """Up to 3 slots fetched at a time (the pool), puts and reads of others in flight, a flush now and then."""
    choose = random.Random(seed)
    slots, expected, fetched = [], [], {}
    for i in range(12):
        numel, dtype = choose.choice([1, 7, 512, 1024, 1500, 2048]), choose.choice(DTYPES)
        keep = choose.random() < 0.5
        slots.append(store.allocate(name=f"s{i}", shape=(numel,), dtype=dtype, category="optimizer", keep=keep))
        expected.append(torch.zeros(numel, dtype=dtype))
    reads = []
    for _ in range(150):
        i = choose.randrange(len(slots))
        action = choose.choice(["fetch", "update", "replace", "forget", "release", "read", "flush"])
        if action == "fetch" and len(fetched) < 3:
            fetched[i] = store.fetch(slots[i])
        elif action == "update" and fetched:
            i = choose.choice(list(fetched))
            tensor = fetched.pop(i).wait()
            assert torch.equal(tensor, expected[i])
            tensor.add_(choose.randrange(5))
            expected[i] = tensor.clone()
            store.put(slots[i], value=tensor)
        elif action == "replace" and i not in fetched:
            expected[i] = torch.randint(0, 100, expected[i].shape).to(expected[i].dtype)
            store.put(slots[i], value=expected[i])
        elif action == "forget":
            if choose.random() < 0.5 and i in fetched:
                fetched[i].wait()
            fetched.pop(i, None)
            store.forget(slots[i])
            expected[i] = torch.randint(0, 100, expected[i].shape).to(expected[i].dtype)
            store.put(slots[i], value=expected[i])
        elif action == "release" and fetched:
            i = choose.choice(list(fetched))
            fetched.pop(i)
            store.release(slots[i])
        elif action == "read":
            reads.append((store.fetch_into(slots[i], out=torch.empty_like(expected[i])), expected[i].clone()))
        elif action == "flush":
            store.flush()
    for pending, value in reads:
        assert torch.equal(pending.wait(), value)
    for i in fetched:
        store.release(slots[i])
    for slot, value in zip(slots, expected, strict=True):
        assert torch.equal(store.fetch(slot).wait(), value)
        store.release(slot)


def test_fetch_into_and_put_accept_any_place_in_memory(store) -> None:
    """Aligned memory is written to the disk directly, other memory block by block. Slots may be larger than a buffer."""
    slot = store.allocate(name="a", shape=(10_001,), dtype=torch.float32, category="optimizer")
    memory = torch.zeros(10_001 + 2 * PAGE)
    skew = (-memory.data_ptr() % PAGE) // 4  # elements to the next page
    for start in (skew, skew + 1, skew + 16):
        value = memory[start : start + 10_001].normal_()
        store.put(slot, value=value).wait()
        out = torch.empty(10_001 + 2 * PAGE)
        skew_out = (-out.data_ptr() % PAGE) // 4
        out.fill_(-1)
        store.fetch_into(slot, out=out[skew_out + 1 : skew_out + 10_002]).wait()
        assert torch.equal(out[skew_out + 1 : skew_out + 10_002], value)
        assert out[skew_out] == -1 and out[skew_out + 10_002] == -1


def test_wrong_tensors_are_refused_by_name(store) -> None:
    slot = store.allocate(name="block.0", shape=(8, 8), dtype=torch.float32, category="optimizer")
    for wrong in (torch.zeros(63), torch.zeros(8, 8, dtype=torch.float16), torch.zeros(8, 16)[:, ::2]):
        with pytest.raises(ValueError, match=r"block\.0"):
            store.put(slot, value=wrong)
        with pytest.raises(ValueError, match=r"block\.0"):
            store.fetch_into(slot, out=wrong)


def test_two_threads_work_on_their_own_slots(store) -> None:
    errors = []

    def work(number: int) -> None:
        try:
            slots = [
                store.allocate(name=f"{number}.{i}", shape=(1500,), dtype=torch.float32, category="optimizer")
                for i in range(6)
            ]
            for step in range(20):
                for i, slot in enumerate(slots):
                    out = torch.empty(1500)
                    store.fetch_into(slot, out=out).wait()
                    assert bool((out == step * (number * 10 + i)).all())
                    store.put(slot, value=out + number * 10 + i)
            store.flush()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_the_ledger_balances(ledger, make_store) -> None:
    host = HostStore(OffloadPolicy(optimizer="cpu"), ledger=ledger)
    host.allocate(name="a", shape=(1000,), dtype=torch.bfloat16, category="parameters")
    assert ledger.by_category(Tier.host) == {"parameters": 2000}
    host.close()
    nvme = make_store()
    nvme.allocate(name="a", shape=(1025,), dtype=torch.float32, category="optimizer")
    nvme.allocate(name="b", shape=(1,), dtype=torch.bfloat16, category="parameters")
    assert ledger.by_category(Tier.nvme) == {"optimizer": 2 * PAGE, "parameters": PAGE}
    assert ledger.by_category(Tier.host) == {"buffers": 3 * 4 * PAGE + 2 * PAGE}
    nvme.close()
    nvme.close()
    assert ledger.current(Tier.host) == ledger.current(Tier.nvme) == 0
