"""Cores of each rank: next to its GPU, or an equal share. Memory follows, because Linux places a page on the node of the core that writes it
first."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ztk.core.policies.machine import gpu_addresses

SYSFS = Path("/sys")
_KEY = "launch.bind_cores=true"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """Physical cores that this process may use, each as its hardware threads. by_node: by the number of their NUMA node, in order."""

    by_node: dict[int, list[tuple[int, ...]]]

    @staticmethod
    def here(sysfs: Path = SYSFS) -> "Cores":
        """Reads the machine's nodes. Without NUMA nodes all cores are on node 0."""
        allowed, by_node = sorted(os.sched_getaffinity(0)), dict[int, list[tuple[int, ...]]]()
        nodes = {int(folder.name[4:]): folder for folder in (sysfs / "devices/system/node").glob("node[0-9]*")}
        lists = {number: _listed(nodes[number] / "cpulist") for number in sorted(nodes)} or {0: allowed}
        for number, cores in lists.items():
            own = defaultdict[int, list[int]](list)
            for core in (core for core in allowed if core in cores):
                threads = _listed(sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
                own[min(threads, default=core)].append(core)
            if own:
                by_node[number] = [tuple(own[first]) for first in sorted(own)]
        return Cores(by_node=by_node)


def cores_of_ranks(places: Sequence[int], *, on_gpus: bool, threads: int, sysfs: Path = SYSFS) -> list[tuple[int, ...]]:
    """The cores of each rank of this machine: an equal part of the physical cores of a NUMA node, with all their hardware threads.

    places: GPU of each rank, or any number without GPUs. A rank has its GPU's node. Where a GPU's node is not known, and without GPUs,
    ranks share all cores equally, in the order of nodes.

    Raises:
        ValueError: fewer physical cores than ranks, or fewer hardware threads than `threads`, which a rank starts.
    """
    found = Cores.here(sysfs)
    nodes = _nodes_of(places, sysfs=sysfs) if on_gpus else []
    if not nodes or any(node not in found.by_node for node in nodes):
        everything = [core for cores in found.by_node.values() for core in cores]
        shares = _shares(everything, ranks=len(places), where="this process may use")
    else:
        left = {
            node: iter(_shares(found.by_node[node], ranks=nodes.count(node), where=f"NUMA node {node} has"))
            for node in set(nodes)
        }
        shares = [next(left[node]) for node in nodes]
    for rank, cores in enumerate(shares):
        if len(cores) < threads:
            raise ValueError(
                f"{_KEY}: rank {rank} has {len(cores)} hardware threads, and launch.threads={threads}; use launch.threads={len(cores)}, or "
                "launch.bind_cores=false"
            )
    return shares


def _shares(cores: list[tuple[int, ...]], *, ranks: int, where: str) -> list[tuple[int, ...]]:
    each = len(cores) // ranks
    if not each:
        raise ValueError(
            f"{_KEY}: {where} {len(cores)} physical cores for {ranks} ranks; use launch.ranks={len(cores)}, or launch.bind_cores=false"
        )
    parts = (cores[rank * each : (rank + 1) * each] for rank in range(ranks))
    return [tuple(sorted(thread for core in part for thread in core)) for part in parts]


def _nodes_of(places: Sequence[int], *, sysfs: Path) -> list[int]:
    """The NUMA node of each GPU, -1 where the machine does not name one."""
    addresses = gpu_addresses()
    if any(place >= len(addresses) for place in places):
        return []
    files = (sysfs / "bus/pci/devices" / addresses[place] / "numa_node" for place in places)
    return [int(file.read_text()) if file.is_file() else -1 for file in files]


def _listed(file: Path) -> set[int]:
    """The numbers of a list such as `0-3,8`. Empty if there is no such file."""
    if not file.is_file():
        return set()
    ends = [part.partition("-") for part in file.read_text().strip().split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}
