"""`deepspeed.comm`: torch's collectives under its names, and the log of them."""

import time

import pytest
import torch

import ztk.deepspeed as deepspeed
from tests.deepspeed.scripts import build, config, loop
from ztk.core.runtime import Process
from ztk.deepspeed.collectives import comm
from ztk.deepspeed.collectives.log import bandwidth, size_text, table


def test_bandwidths_equal_nccl_tests():
    """1 MB in 1 ms on 4 ranks: 8 Gbit/s for a message; an all-reduce moves twice 3/4 of it over every link, a gather 3 of the 4 parts."""

    def rates(operation):
        found = bandwidth(operation, nbytes=10**6, seconds=1e-3, ranks=4)
        return round(found.algbw, 6), round(found.busbw, 6)

    assert rates("broadcast") == (8.0, 8.0)
    assert rates("all_reduce") == (16.0, 12.0)
    assert rates("all_gather_into_tensor") == rates("reduce_scatter_tensor") == (32.0, 24.0)
    assert rates("all_to_all_single") == (8.0, 6.0)
    assert bandwidth("send", nbytes=1, seconds=0.0, ranks=4).algbw == 0.0


def test_numbers_of_the_table():
    assert [size_text(n) for n in (0, 512, 1536, 3 * 2**20)] == ["0B", "512 B", "1.5 KB", "3.0 MB"]


def collectives(process: Process) -> dict[str, object]:
    """The result of every function on this rank, returned or written into its argument."""
    comm.init_distributed(dist_backend="gloo")
    rank, size = comm.get_rank(), comm.get_world_size()
    own, found = torch.full((2,), float(rank + 1)), {"rank": (rank, size, comm.get_local_rank())}

    def new(*shape):
        return torch.zeros(*shape)

    comm.all_reduce(total := own.clone())
    comm.all_reduce(most := own.clone(), op=comm.ReduceOp.MAX)
    comm.broadcast(sent := own.clone(), src=1)
    comm.all_gather(parts := [new(2) for _ in range(size)], own)
    comm.all_gather_into_tensor(flat := new(4), own)
    comm.allgather_fn(same := new(4), own)
    comm.reduce_scatter_tensor(slice_ := new(1), own)
    comm.reduce_scatter(listed := new(1), list(own.chunk(2)))
    comm.all_to_all_single(exchanged := new(2), own)
    comm.reduce(first := own.clone(), dst=0)
    comm.inference_all_reduce(inferred := own.clone())
    work = comm.all_reduce_coalesced(both := [own.clone(), 2 * own], async_op=True)
    work.wait()
    comm.all_gather_coalesced(gathered := [new(4)], [own])
    comm.gather(own, rows := [new(2), new(2)] if rank == 0 else None, dst=0)
    comm.scatter(given := new(2), [own, 3 * own] if rank == 0 else None, src=0)
    objects: list = [None, None]
    comm.all_gather_object(objects, {"rank": rank})
    comm.broadcast_object_list(named := [f"of {rank}"], src=1)
    received = new(2)
    if rank == 0:
        comm.send(own, dst=1)
        comm.recv(received, src=1)
    else:
        comm.recv(received, src=0)
        comm.send(own, dst=0)
    swapped = new(2)
    for request in comm.batch_isend_irecv(
        [comm.P2POp(comm.isend, own, 1 - rank), comm.P2POp(comm.irecv, swapped, 1 - rank)]
    ):
        request.wait()
    comm.barrier()
    mesh = comm.initialize_mesh_device((1, 2), ("a", "b"))
    found |= {
        "sums": [total, most, inferred, *both],
        "moved": [sent, torch.cat(parts), flat, same, slice_, listed, exchanged, gathered[0], given, received, swapped],
        "at rank 0": [first, *rows] if rank == 0 else None,
        "objects": (objects, named, comm.get_all_ranks_from_group(), comm.get_global_rank(None, 1), mesh.mesh.tolist()),
    }
    return {
        key: [list(map(float, t)) for t in value] if key in ("sums", "moved") else value for key, value in found.items()
    }


def test_collectives(ranks):
    found = ranks(2).run(collectives)
    for rank, one in enumerate(found):
        other = [2.0 - rank] * 2
        assert one["rank"][:2] == (rank, 2)
        assert one["sums"] == [[3, 3], [2, 2], [3, 3], [3, 3], [6, 6]]
        mine, all_four = [3.0], [1.0, 1.0, 2.0, 2.0]
        exchanged = [1.0, 2.0]
        assert one["moved"] == [
            *([2.0, 2.0], all_four, all_four, all_four, mine, mine, exchanged, all_four),
            *([1.0, 1.0] if rank == 0 else [3.0, 3.0], other, other),
        ]
        objects = ([{"rank": 0}, {"rank": 1}], ["of 1"], [0, 1], 1, [[0, 1]])
        assert one["objects"] == objects
    assert [t.tolist() for t in found[0]["at rank 0"]] == [[3, 3], [1, 1], [2, 2]] and found[1]["at rank 0"] is None


def logged(process: Process) -> dict[str, object]:
    """The log of each combination of switches."""
    comm.init_distributed()
    tensor, found = torch.ones(1000), {}

    def work(**kwargs):
        comm.reset_log()
        comm.all_reduce(tensor.clone(), **kwargs)
        comm.all_reduce(tensor.clone(), async_op=True).wait()
        comm.barrier()
        comm.all_gather_into_tensor(torch.zeros(2000), tensor)
        return comm.get_logged_comm_ops(), comm.get_comm_operation_count()

    found["off"] = work(prof=True), comm.has_comm_data()
    comm.configure(enabled=True)
    found["all"] = work()
    comm.configure(prof_all=False, prof_ops=["barrier"])
    found["named"] = work()
    comm.configure(prof_ops=[])
    found["this one"] = work(prof=True, log_name="mine")
    comm.configure(deepspeed_config={"comms_logger": {"enabled": True, "prof_all": True, "debug": True}})
    found["debug"] = work()
    comm.configure(debug=False)
    comm.reset_log()
    for _ in range(3):
        time.sleep(0.05 * process.rank)  # rank 0 waits for rank 1
        comm.all_reduce(tensor.clone())
    if process.rank == 0:
        comm.comms_logger.append("alone", operation="send", nbytes=8, seconds=1.0, ranks=2)
    found["summary"] = comm.log_summary(show_straggler=True, return_dict=True)
    comm.configure(enabled=False)
    comm.reset_log()
    return found


def test_the_log_follows_the_switches(ranks):
    first, second = ranks(2).run(logged)
    assert first["off"] == (([], 0), False)
    assert first["all"] == (["all_reduce", "barrier", "all_gather_into_tensor"], 4)
    assert first["named"] == (["barrier"], 1) and first["this one"] == (["mine"], 1)
    assert first["debug"][0][0] == "all_reduce | [Caller Func: work]"
    summary = first["summary"]
    (metrics,) = summary["summary"]["all_reduce"].values()
    assert metrics["count"] == 3 and metrics["msg_size_bytes"] == 4000
    mean = metrics["avg_latency_ms"]
    # 2 s / t and half of it over the link of each of two ranks. A mean of rates is no smaller than the rate of the mean.
    assert metrics["tput_avg_gbps"] >= 8e-6 * 2 * 4000 / mean * (1 - 1e-9)
    assert metrics["busbw_avg_gbps"] == pytest.approx(metrics["tput_avg_gbps"] / 2)
    assert summary["metadata"]["world_size"] == 2 and "alone" not in summary["straggler_analysis"]
    waited = [one["summary"]["straggler_analysis"]["all_reduce"][4000]["total_straggler_ms"] for one in (first, second)]
    assert waited[0] > 100 > waited[1]  # 3 x 50 ms, minus the ranks' distance before
    lines = table(summary).splitlines()
    assert lines[0].split()[:3] == ["Comm.", "Op", "Message"] and "Breakdown with straggler effect" in lines


def of_engine(process: Process) -> dict[str, object]:
    """The engine's own collectives in the log, and its counters."""
    engine, *_ = deepspeed.initialize(model=build(), config=config(stage=3, comms_logger={"enabled": True}))
    comm.reset_log()
    engine.engine.comm.counters.reset()
    loop(process, engine, steps=3)
    found = {
        name: (sum(len(c.seconds) for c in sizes.values()), sum(len(c.seconds) * size for size, c in sizes.items()))
        for name, sizes in comm.comms_logger.records.items()
    }
    counters = engine.engine.comm.counters
    calls, nbytes = dict(counters.calls), dict(counters.bytes)
    engine.destroy()
    comm.configure(enabled=False)
    return {"log": found, "calls": calls, "bytes": nbytes}


def test_the_engines_collectives_are_logged(ranks):
    """As many, and as many bytes, as the engine counts; a rank's part of a gather is half of the buffer."""
    for found in ranks(2).run(of_engine):
        log, calls, nbytes = found["log"], found["calls"], found["bytes"]
        assert log["all_gather_into_tensor"] == (calls["all_gather"], nbytes["all_gather"] // 2)
        assert log["reduce_scatter_tensor"] == (calls["reduce_scatter"], nbytes["reduce_scatter"] // 2)
        assert calls["reduce_scatter"] > 0 and calls["all_gather"] > calls["reduce_scatter"]
