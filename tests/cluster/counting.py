"""Counts and bytes of a start as the number of ranks grows, each rank on a host of its own: python -m tests.cluster.counting 4 16 64

Forks N ranks of this process, which join through a store as torchrun's do, divide layers over two ranks each, and check for interrupts. Prints
a table with the line to 1,024 ranks; gloo's addresses grow with the square of the ranks, so bytes have a parabola.
"""

import json
import os
import resource
import socket
import sys
import tempfile
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

import ztk  # noqa: F401  # before the fork: a rank imports nothing
from ztk.core.runtime import Process, Topology
from ztk.core.runtime.interrupts import Interrupts

WORLD = 1024
CHECKS = 5
SOFT_LIMIT = 256  # of open files, as small for 64 ranks as the usual one is for 1,024


def count(world: int) -> dict[str, float]:
    """The counts of rank 0, and the largest number of descriptors, in a world of this many ranks.

    Raises RuntimeError if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="ztk-counting-") as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        children = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, world=world, port=port, folder=Path(folder))
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        if any(codes):
            raise RuntimeError(f"{world} ranks ended with {codes}")
        ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
    return {name: max(own[name] for own in ranks) for name in ranks[0]}


def _be_rank(rank: int, *, world: int, port: int, folder: Path) -> None:
    try:
        found = _counts(rank, world=world, port=port)
        (folder / str(rank)).write_text(json.dumps(found))
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
    os._exit(1)


def _counts(rank: int, *, world: int, port: int) -> dict[str, float]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    calls, before, new_group = [0], _descriptors(), dist.new_group

    def counted(*arguments, **options):
        calls[0] += 1
        return new_group(*arguments, **options)

    dist.new_group = counted
    process = Process.start(device="cpu", timeout_seconds=300).arrange(Topology(tensor=2))
    with Interrupts(process) as interrupts:
        assert interrupts._comm is not None
        made, counters = calls[0], interrupts._comm.counters
        before_checks = counters.calls["scalars"]
        for _ in range(CHECKS):
            interrupts.are_pending()
        collectives = (counters.calls["scalars"] - before_checks) / CHECKS
        process.comm.barrier()
        descriptors = _descriptors() - before
        keys = nbytes = 0
        if rank == 0:
            store = dist.distributed_c10d._get_default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            names = store.list_keys()
            keys, nbytes = len(names), sum(len(name) + len(store.get(name)) for name in names)
        process.comm.barrier()
    return {
        "new_group calls per rank": made,
        "descriptors per rank": descriptors,
        "store keys": keys,
        "store bytes": nbytes,
        "collectives per interrupt check": collectives,
    }


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def extended(found: dict[int, float], *, at: int = WORLD) -> float:
    """The value at `at` of the polynomial through `found`, world -> value: a line through two worlds, a parabola through three."""
    return sum(
        value * prod((at - other) / (world - other) for other in found if other != world)
        for world, value in found.items()
    )


def main() -> None:
    """Prints a table for the worlds of the command line."""
    worlds = [int(word) for word in sys.argv[1:]]
    found = {world: count(world) for world in worlds}
    print(f"| ranks | {' | '.join(map(str, worlds))} | {WORLD:,}, extended |")
    print("| --- |" + " --- |" * (len(worlds) + 1))
    for name in found[worlds[0]]:
        values = {world: own[name] for world, own in found.items()}
        print(f"| {name} | {' | '.join(f'{value:,.0f}' for value in values.values())} | {extended(values):,.0f} |")


if __name__ == "__main__":
    main()
