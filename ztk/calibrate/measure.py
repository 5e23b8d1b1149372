"""Measures compute rates and bandwidths per rank while all ranks of the machine are busy, as they are during a run."""

import gc
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ztk.calibrate.curves import DTYPES, eager_latency, measure_curves
from ztk.calibrate.steps import curves_of_steps, operation_latency
from ztk.calibrate.timing import seconds_of_call
from ztk.core.policies.hardware import Hardware
from ztk.core.runtime import Process
from ztk.core.runtime.system_memory import machine_memory, memory_limit, process_memory
from ztk.nn.linear import linear
from ztk.zero.offload.disk import DiskFile
from ztk.zero.offload.pool import AlignedRegion
from ztk.zero.offload.probe import probe_folder

IO_THREADS, IO_BLOCK, IO_BYTES = 4, 8 << 20, 256 << 20
SMALL_MESSAGE, LARGE_MESSAGE = 1 << 10, 1 << 23  # elements of float32

# How each number is measured; written as `sources` of the file.
METHODS = {
    "capacity_bytes": "memory of a device; on a CPU a rank's share of main memory",
    "reserve_bytes": "device memory of a rank before its first tensor: context, NCCL, libraries",
    "host_capacity_bytes": "main memory, or the limit of the control group",
    "host_reserve_bytes": "resident memory of the ranks before their first tensors",
    "bf16_rate": "products of square matrices as the model's layers compute them",
    "fp16_rate": "products of square matrices as the model's layers compute them",
    "fp32_rate": "products of square matrices as the model's layers compute them",
    "memory_bandwidth": "a copy in device memory, bytes read and written",
    "host_bandwidth": "a sum of arrays in main memory, bytes read and written",
    "pcie_bandwidth": "copies between device and pinned main memory, the slower direction; on a CPU a copy in main memory",
    "disk_read_bandwidth": "direct reads of a file of 256 MiB per rank, 8 MiB each, 4 threads",
    "disk_write_bandwidth": "direct writes of a file of 256 MiB per rank, 8 MiB each, 4 threads",
    "link_latency": "an all-gather of 4 KiB per rank",
    "link_bandwidth": "an all-gather of 32 MiB per rank, less the latency",
    "ranks_per_node": "the ranks that measured at the same time",
    "operation_latency": "steps of a tiny model, per operation of their plans; on a CPU tiny operations of torch",
    "curves": "on a CPU: products, attention, ztk's and torch's operations on rows, AdamW's updates and collectives at several sizes, scaled "
    "by one factor so that they add up to the steps of a model of 2 million parameters; the time of Python per gradient, per disk request "
    "and per operation that selective recomputation intercepts, from the remaining time of these steps",
}


def measure(process: Process, *, folder: str | os.PathLike) -> dict[str, Any]:
    """Measures this rank and returns the fields of `Hardware` except name and network.

    A collective call: all ranks measure the same quantity at the same time.

    folder: a folder on the disk to measure.

    Raises:
        ValueError: the disk of `folder` has no direct I/O.
    """
    probe_folder(folder, direct=True)
    device, found = process.device, _memory(process)
    for name, dtype in DTYPES.items():
        found[f"{name}_rate"] = _matrix_rate(process, dtype=dtype)
    found |= _bandwidths(process)
    found |= _disk(process, folder=Path(folder))
    found |= _links(process)
    found["ranks_per_node"] = process.local_world_size
    if device.type == "cpu":
        latency = found["operation_latency"] = eager_latency(process)
        found["curves"] = measure_curves(process, latency=latency)
        found["curves"] = curves_of_steps(process, hardware=Hardware(name="here", **found), folder=str(folder))
    else:
        found["operation_latency"] = operation_latency(process, hardware=Hardware(name="here", **found))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def combine(ranks: Sequence[dict[str, Any]], *, source: str) -> Hardware:
    """Combines the ranks' numbers into one `Hardware`, which has the slowest rate and the smallest capacity of each kind."""
    largest = ("reserve_bytes", "host_reserve_bytes", "link_latency", "operation_latency", "ranks_per_node")
    plain = [key for key in ranks[0] if key != "curves"]
    numbers: dict[str, Any] = {key: (max if key in largest else min)(rank[key] for rank in ranks) for key in plain}
    if "curves" in ranks[0]:
        numbers["curves"] = {
            kind: [max(points) for points in zip(*(rank["curves"][kind] for rank in ranks), strict=True)]
            for kind in ranks[0]["curves"]
        }
    for key in ("capacity_bytes", "reserve_bytes", "host_capacity_bytes", "host_reserve_bytes", "ranks_per_node"):
        numbers[key] = int(numbers[key])
    return Hardware(name="here", source=source, **numbers)


def _memory(process: Process) -> dict[str, float]:
    """Measures memory. Must run before anything else is allocated."""
    gc.collect()
    if process.device.type == "cuda":
        process.comm.barrier()  # the first collective initializes NCCL
    resident, ranks = process_memory()["VmRSS"], process.local_world_size
    host = {"host_capacity_bytes": _main_memory(), "host_reserve_bytes": resident * ranks}
    if process.device.type != "cuda":
        return host | {"capacity_bytes": host["host_capacity_bytes"] // ranks, "reserve_bytes": resident}
    free, total = torch.cuda.mem_get_info(process.device)
    return host | {"capacity_bytes": total, "reserve_bytes": total - free - torch.cuda.memory_reserved(process.device)}


def _main_memory() -> int:
    total, limit = machine_memory()["MemTotal"], memory_limit()
    return total if limit is None else min(total, limit)


def _matrix_rate(process: Process, *, dtype: torch.dtype) -> float:
    size = 8192 if process.device.type == "cuda" else 1024
    x, weight = (torch.randn(size, size, device=process.device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of_call(process, run=lambda: linear(x, weight=weight))


def _bandwidths(process: Process) -> dict[str, float]:
    """Measures memory and host bandwidths in bytes per second."""
    device = process.device
    on_gpu = device.type == "cuda"
    source, target = (torch.ones(1 << (28 if on_gpu else 24), device=device) for _ in range(2))
    memory = 2 * source.nbytes / seconds_of_call(process, run=lambda: target.copy_(source))
    host = [torch.ones(1 << 24) for _ in range(3)]
    found = {
        "memory_bandwidth": memory,
        "host_bandwidth": 3
        * host[0].nbytes
        / seconds_of_call(process, run=lambda: torch.add(host[0], host[1], out=host[2])),
        "pcie_bandwidth": memory / 2,
    }
    if on_gpu:
        pinned, part = torch.ones(1 << 26, pin_memory=True), source[: 1 << 26]
        there = seconds_of_call(process, run=lambda: part.copy_(pinned, non_blocking=True))
        back = seconds_of_call(process, run=lambda: pinned.copy_(part, non_blocking=True))
        found["pcie_bandwidth"] = part.nbytes / max(there, back)
    return found


def _disk(process: Process, *, folder: Path) -> dict[str, float]:
    region = AlignedRegion(nbytes=IO_THREADS * IO_BLOCK, pin=False)
    blocks = region.bytes.split(IO_BLOCK)
    disk = DiskFile(folder / f"ztk-calibrate-{uuid.uuid4().hex}", direct=True)
    try:
        with ThreadPoolExecutor(IO_THREADS) as pool:

            def each(move: Callable[..., None]) -> None:
                def part(thread: int) -> None:
                    for start in range(thread * IO_BLOCK, IO_BYTES, IO_THREADS * IO_BLOCK):
                        move(blocks[thread], offset=start)

                list(pool.map(part, range(IO_THREADS)))

            disk.preallocate(offset=0, nbytes=IO_BYTES)
            write = seconds_of_call(process, run=lambda: each(disk.write), rounds=3)
            read = seconds_of_call(process, run=lambda: each(disk.read), rounds=3)
    finally:
        disk.close()
        region.close()
    return {"disk_read_bandwidth": IO_BYTES / read, "disk_write_bandwidth": IO_BYTES / write}


def _links(process: Process) -> dict[str, float]:
    """Measures latency and bandwidth between ranks. A single rank has no communication: its links get the memory's bandwidth."""
    comm, seconds = process.comm, []
    for elements in (SMALL_MESSAGE, LARGE_MESSAGE):
        full = torch.ones(elements * comm.size, device=process.device)
        seconds.append(
            seconds_of_call(process, run=lambda full=full: comm.all_gather(full, label="calibration").wait())
        )
    latency, large = seconds
    sent = 4 * LARGE_MESSAGE * max(1, comm.size - 1)
    return {"link_latency": latency, "link_bandwidth": sent / max(large - latency, 1e-9)}
