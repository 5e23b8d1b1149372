"""Every transport against arithmetic: sizes below, at and above a slot, three dtypes, in place and not."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, RankPool
from ztk.core.runtime.comm import Comm, nccl
from ztk.core.runtime.comm.gloo import GlooTransport
from ztk.core.runtime.comm.nccl import NcclTransport
from ztk.core.runtime.comm.shared_memory import SharedMemoryTransport
from ztk.core.runtime.comm.transport import SingleRankTransport, sum_in_rank_order

SLOT_BYTES = 1 << 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def connect(process, *, transport: str) -> Comm:
    """A second set of connections with small slots, so that small tensors take several chunks."""
    if transport == "gloo":
        made = GlooTransport(group=dist.new_group(backend="gloo"))
    elif transport == "nccl, on the host":  # which a group of GPUs moves by gloo
        made = NcclTransport(group=dist.new_group(backend="gloo"))
    else:
        made = SharedMemoryTransport(group=dist.group.WORLD, timeout_seconds=20, slot_bytes=SLOT_BYTES)
    return Comm(made, rank=process.rank, size=process.world_size, device=process.device)


def part(rank: int, *, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that every sum is exact in every dtype."""
    return (torch.arange(numel).remainder(5) + rank).to(dtype)


def exercise(process, *, transport: str) -> None:
    comm, rank, world = connect(process, transport=transport), process.rank, process.world_size
    own = "x" * (rank * SLOT_BYTES)
    assert comm.collect_objects(own, label="test") == (
        [SLOT_BYTES * "x" * r for r in range(world)] if not rank else None
    )
    assert comm.distribute_objects(range(7, 7 + world) if not rank else None, label="test") == 7 + rank
    for dtype in DTYPES:
        for n in (128, SLOT_BYTES // dtype.itemsize, 3 * SLOT_BYTES + 128):
            everyone = [part(r, numel=n * world, dtype=dtype) for r in range(world)]
            total = torch.stack([p.float() for p in everyone]).sum(0).to(dtype)
            own = slice(rank * n, (rank + 1) * n)

            full = everyone[rank].clone()
            comm.all_reduce(full, label="test").wait()
            assert torch.equal(full, total)

            out = torch.full((n,), float("nan"), dtype=dtype)
            comm.reduce_scatter(everyone[rank], out=out, label="test").wait()
            assert torch.equal(out, total[own])

            full = everyone[rank].clone()
            comm.reduce_scatter(full, out=full[own], label="test").wait()  # in place
            assert torch.equal(full[own], total[own])

            full = torch.full((n * world,), float("nan"), dtype=dtype)
            full[own] = part(rank, numel=n, dtype=dtype)
            comm.all_gather(full, label="test").wait()
            assert torch.equal(full, torch.cat([part(r, numel=n, dtype=dtype) for r in range(world)]))

            exercise_buffer(comm, everyone=everyone, total=total)

            out = torch.full((n * world,), float("nan"), dtype=dtype)
            comm.all_to_all(everyone[rank], out=out, label="test").wait()
            assert torch.equal(out, torch.cat([everyone[r][own] for r in range(world)]))

            send = [(rank + 2 * r) % 3 * n // 4 for r in range(world)]  # some ranks send nothing, others three chunks
            receive = [(r + 2 * rank) % 3 * n // 4 for r in range(world)]
            rows = [part(10 * rank + r, numel=4 * size, dtype=dtype).view(-1, 4) for r, size in enumerate(send)]
            out = torch.full((sum(receive), 4), float("nan"), dtype=dtype)
            comm.all_to_all_rows(torch.cat(rows), out=out, send=send, receive=receive, label="test").wait()
            came = [part(10 * r + rank, numel=4 * size, dtype=dtype).view(-1, 4) for r, size in enumerate(receive)]
            assert torch.equal(out, torch.cat(came))

            message = everyone[rank].clone()
            comm.broadcast(message, source=world - 1, label="test").wait()
            obj = {"rows": list(range(n))}  # the largest takes two broadcasts
            assert comm.broadcast_object(obj if rank == 0 else None, label="test") == obj
            assert torch.equal(message, everyone[world - 1])
    gathered = comm.gather_scalars(torch.tensor([rank, 0.5]), label="test")
    assert gathered.tolist() == [[r, 0.5] for r in range(world)]


def exercise_buffer(comm: Comm, *, everyone: list[torch.Tensor], total: torch.Tensor) -> None:
    """`empty` may be called any number of times; its memory is freed with the tensor."""
    full, rank = comm.empty(total.numel(), dtype=total.dtype, label="test"), comm.rank
    own, shards = full.chunk(comm.size)[rank], total.chunk(comm.size)
    for _ in range(2):
        full.copy_(everyone[rank])
        comm.all_reduce(full, label="test").wait()
        assert torch.equal(full, total)

        full.copy_(everyone[rank])
        out = torch.full_like(own, float("nan"))
        comm.reduce_scatter(full, out=out, label="test").wait()
        assert torch.equal(out, shards[rank]) and torch.equal(full, everyone[rank])
        comm.reduce_scatter(full, out=own, label="test").wait()
        assert torch.equal(own, shards[rank])
        comm.all_gather(full, label="test").wait()
        assert torch.equal(full, total)
    comm.all_gather(full[: 128 * comm.size], label="part").wait()  # not the full buffer
    del full, own, out
    until = time.monotonic() + 10
    while getattr(
        comm._transport, "_shared", {}
    ):  # the communicating thread drops its last call a moment after it is done
        assert time.monotonic() < until


@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "nccl, on the host"])
@pytest.mark.parametrize("world", [2, 4])
def test_collectives(ranks, world, transport):
    ranks(world).run(exercise, transport=transport)


def counted(process) -> dict:
    comm = process.comm
    comm.counters.reset()
    full = torch.zeros(256 * process.world_size)
    comm.all_gather(full, label="test").wait()
    comm.reduce_scatter(full, out=full[:256], label="test").wait()
    comm.all_reduce(full, label="test").wait()
    return {"bytes": dict(comm.counters.bytes), "calls": dict(comm.counters.calls)}


def test_counters_follow_the_zero_paper(ranks):
    """A gather or reduce-scatter counts the full tensor, an all-reduce twice."""
    n = 256 * 2 * 4
    for found in ranks(2).run(counted):
        assert found["bytes"] == {"all_gather": n, "reduce_scatter": n, "all_reduce": 2 * n}
        assert found["calls"] == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


def overlapping(process) -> None:
    """Handles may be waited for in any order, and twice."""
    world, rank = process.world_size, process.rank
    tensors = [part(rank, numel=512 * world, dtype=torch.float32) for _ in range(8)]
    works = [process.comm.all_reduce(tensor, label=str(i)) for i, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
        work.wait()
    total = sum(part(r, numel=512 * world, dtype=torch.float32) for r in range(world))
    assert all(torch.equal(tensor, total) for tensor in tensors)


def test_handles(ranks):
    ranks(4).run(overlapping)


def in_a_hurry(process) -> None:
    """Each rank overwrites its buffer as soon as a collective returns, while the last rank may still sum or copy."""
    comm, world, rank = process.comm, process.world_size, process.rank
    full = comm.empty(1024 * world, dtype=torch.float32, label="test")
    total = sum(part(r, numel=1024 * world, dtype=torch.float32) for r in range(world))
    own = slice(rank * 1024, (rank + 1) * 1024)
    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            node = comm._transport._node
            patch.setattr(node, "barrier", followed_by_a_pause(node.barrier))
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            full.copy_(total if kind == "all_gather" else part(rank, numel=1024 * world, dtype=torch.float32))
            options = {"out": full[own]} if kind == "reduce_scatter" else {}
            getattr(comm, kind)(full, label="test", **options).wait()
            result = full.clone()
            full.fill_(float("nan"))
            comm.barrier()
            assert torch.equal(result[own], total[own])
            assert kind == "reduce_scatter" or torch.equal(result, total)


def followed_by_a_pause(function):
    """`function`, then time for the other ranks to continue."""

    def wrapper(*args, **kwargs):
        function(*args, **kwargs)
        time.sleep(0.05)

    return wrapper


def test_no_rank_writes_before_all_have_read(ranks):
    ranks(2).run(in_a_hurry)
    ranks(4).run(in_a_hurry)


def disagreeing(process, *, how: str) -> None:
    comm = process.comm
    if how == "memory":  # the engine makes its buffers alike on all ranks
        shared = comm.empty(256, dtype=torch.float32, label="x")
        comm.all_gather(shared if process.rank else torch.zeros(256), label="x").wait()
    elif how == "size":
        comm.all_gather(torch.zeros(256 * (1 + process.rank)), label="x").wait()
    else:
        comm.all_gather(torch.zeros(256), label=f"module {process.rank}").wait()


@pytest.mark.parametrize("how", ["size", "label", "memory"])
def test_ranks_that_disagree_get_an_error(how):
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match=r"CommMismatch: rank \d is at"):
            pool.run(disagreeing, how=how)
    finally:
        pool.close()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_sums_round_once(count):
    """16-bit sums of more than two ranks are exact to one rounding, and do not depend on where the result goes."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1000, generator=generator).bfloat16() for _ in range(count)]
    exact = torch.stack([p.double() for p in parts])
    ordered = exact[0].float()
    for p in exact[1:]:
        ordered = ordered + p.float()
    for place in range(count):
        copies = [p.clone() for p in parts]
        sum_in_rank_order(copies, out=copies[place])
        assert torch.equal(copies[place], ordered.bfloat16())


class Slow:
    """Something a collective has to wait for."""

    is_immediate = False
    waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_a_world_of_one_does_not_wait_when_it_only_looks_ahead():
    comm, slow = Comm(SingleRankTransport(), rank=0, size=1, device=torch.device("cpu")), Slow()
    work = comm.all_gather(torch.zeros(128), label="test", after=slow)
    assert slow.waited == 0
    work.wait()
    work.wait()
    assert slow.waited == 1


def test_nccl_sums_activations_in_one_collective_and_gradients_in_shards(monkeypatch):
    """Counts a transport's calls, without NCCL."""
    called = []
    for module, name in ((dist, "all_reduce"), (nccl, "reduce_scatter_single"), (nccl, "all_gather_single")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: called.append(name) or mock.Mock())
    group = mock.Mock()
    group.rank.return_value, group.size.return_value = 0, 2
    comm = Comm(NcclTransport(group=group), rank=0, size=2, device=torch.device("cpu"))
    comm.all_reduce(torch.ones(4), label="gradients")
    assert called == ["reduce_scatter_single", "all_gather_single"]
    called.clear()
    comm.all_reduce(torch.ones(4), label="activations", in_shard_order=False)
    assert called == ["all_reduce"]
