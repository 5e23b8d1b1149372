"""`deepspeed.comm`: torch's collectives under its names."""

import torch

from ztk.core.runtime import Process
from ztk.deepspeed.collectives import comm


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
