"""What one rank can compute and move while all ranks of the machine do the same: that is what a rank gets in a run."""

import gc
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.nn import Decoder, DecoderConfig
from ztk.nn.linear import linear
from ztk.offload.disk import DiskFile
from ztk.offload.pool import AlignedRegion
from ztk.offload.probe import probe_folder
from ztk.planner.tracker import is_work
from ztk.policies.hardware import Hardware
from ztk.runtime import Process

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDS = 5
ROUND_SECONDS = 0.2
IO_THREADS, IO_BLOCK, IO_BYTES = 4, 8 << 20, 256 << 20
SMALL_MESSAGE, LARGE_MESSAGE = 1 << 10, 1 << 23  # elements of float32
TINY = {"vocab_size": 16, "dim": 8, "layers": 4, "heads": 1, "kv_heads": 1, "hidden_dim": 16, "max_seq_len": 8}
_MEMORY, _LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")

# How each number is found, for `sources` of the file.
METHODS = {
    "capacity_bytes": "memory of a device; on a CPU a rank's share of main memory",
    "reserve_bytes": "what a rank takes before it holds any tensor: context, NCCL, libraries",
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
    "operation_latency": "operations of a model of a few numbers, forward and backward",
}


def measure(process: Process, *, folder: str | os.PathLike) -> dict[str, float]:
    """This rank's numbers: fields of `Hardware` without name and network. A collective call: every rank measures the same thing at the
    same time. folder: on the disk that is measured.

    Raises:
        ValueError: the folder is on no disk with direct I/O.
    """
    probe_folder(folder, direct=True)
    device, found = process.device, _memory(process)
    for name, dtype in DTYPES.items():
        found[f"{name}_rate"] = _matrix_rate(process, dtype=dtype)
    found |= _bandwidths(process)
    found |= _disk(process, folder=Path(folder))
    found |= _links(process)
    found["operation_latency"] = _operation_latency(process)
    found["ranks_per_node"] = process.local_world_size
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def combine(ranks: Sequence[dict[str, float]], *, source: str, name: str = "here") -> Hardware:
    """One description of all ranks: the slowest and the smallest of each number."""
    largest = ("reserve_bytes", "link_latency", "operation_latency", "ranks_per_node")
    numbers = {key: (max if key in largest else min)(rank[key] for rank in ranks) for key in ranks[0]}
    for key in ("capacity_bytes", "reserve_bytes", "ranks_per_node"):
        numbers[key] = int(numbers[key])
    return Hardware(name=name, source=source, **numbers)


def _memory(process: Process) -> dict[str, float]:
    """Before anything else is measured."""
    gc.collect()
    if process.device.type != "cuda":
        return {"capacity_bytes": _main_memory() // process.local_world_size, "reserve_bytes": _resident()}
    process.comm.barrier()  # connects NCCL
    free, total = torch.cuda.mem_get_info(process.device)
    return {"capacity_bytes": total, "reserve_bytes": total - free - torch.cuda.memory_reserved(process.device)}


def _main_memory() -> int:
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    total = next(1024 * int(words[1]) for words in lines if words[0] == "MemTotal:")
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    return total if limit == "max" else min(total, int(limit))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _matrix_rate(process: Process, *, dtype: torch.dtype) -> float:
    size = 8192 if process.device.type == "cuda" else 1024
    x, weight = (torch.randn(size, size, device=process.device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(process, run=lambda: linear(x, weight=weight))


def _bandwidths(process: Process) -> dict[str, float]:
    """Bytes per second."""
    device = process.device
    on_gpu = device.type == "cuda"
    source, target = (torch.ones(1 << (28 if on_gpu else 24), device=device) for _ in range(2))
    memory = 2 * source.nbytes / _seconds(process, run=lambda: target.copy_(source))
    host = [torch.ones(1 << 24) for _ in range(3)]
    found = {
        "memory_bandwidth": memory,
        "host_bandwidth": 3 * host[0].nbytes / _seconds(process, run=lambda: torch.add(host[0], host[1], out=host[2])),
        "pcie_bandwidth": memory / 2,
    }
    if on_gpu:
        pinned, part = torch.ones(1 << 26, pin_memory=True), source[: 1 << 26]
        there = _seconds(process, run=lambda: part.copy_(pinned, non_blocking=True))
        back = _seconds(process, run=lambda: pinned.copy_(part, non_blocking=True))
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
            write = _seconds(process, run=lambda: each(disk.write), rounds=3)
            read = _seconds(process, run=lambda: each(disk.read), rounds=3)
    finally:
        disk.close()
        region.close()
    return {"disk_read_bandwidth": IO_BYTES / read, "disk_write_bandwidth": IO_BYTES / write}


def _links(process: Process) -> dict[str, float]:
    """A rank alone sends nothing: its links are as fast as its memory."""
    comm, seconds = process.comm, []
    for elements in (SMALL_MESSAGE, LARGE_MESSAGE):
        full = torch.ones(elements * comm.size, device=process.device)
        seconds.append(_seconds(process, run=lambda full=full: comm.all_gather(full, label="calibration").wait()))
    latency, large = seconds
    sent = 4 * LARGE_MESSAGE * max(1, comm.size - 1)
    return {"link_latency": latency, "link_bandwidth": sent / max(large - latency, 1e-9)}


def _operation_latency(process: Process) -> float:
    """Of a model that has next to nothing to compute: what remains is Python, autograd and the start of kernels."""
    model = Decoder(DecoderConfig(**TINY)).to(process.device)
    model.materialise_buffers(process.device)
    tokens = torch.zeros(1, TINY["max_seq_len"], dtype=torch.int64, device=process.device)

    def step() -> None:
        model(tokens, tokens).backward()
        model.zero_grad()

    with _Counter() as counter:
        step()
    return _seconds(process, run=step) / counter.operations


class _Counter(TorchDispatchMode):
    """Operations that are work to a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += is_work(func)
        return func(*args, **(kwargs or {}))


def _seconds(process: Process, *, run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Of one call: the median over rounds of several calls, which all ranks begin together. How many calls a round has, rank 0 decides."""
    run()
    (first,) = _timed(process, run=run, calls=1, rounds=1)
    calls = process.comm.gather_numbers([max(1, int(ROUND_SECONDS / max(first, 1e-6)))], label="calls")[0][0]
    return statistics.median(_timed(process, run=run, calls=min(int(calls), 10_000), rounds=rounds))


def _timed(process: Process, *, run: Callable[[], object], calls: int, rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        process.comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if process.device.type == "cuda":
            torch.cuda.synchronize(process.device)
        yield (time.perf_counter() - start) / calls
