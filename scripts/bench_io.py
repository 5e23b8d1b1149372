"""Compares the offload store's disk speed with fio and DeepSpeed's aio op on the same file.

    python scripts/bench_io.py FOLDER [--gib 1] [--rounds 5]

Every contender opens the store's file through /proc/PID/fd, because it has no name, and reads or writes all of it with O_DIRECT. They take
turns in every round, so that a shared disk affects them alike. fio runs in several shapes. Where the system has free huge pages it also runs
with them, like the store (`sysctl vm.nr_hugepages=80`: they double the speed). The ratio is to the median of fio's best shape. CPU seconds
include all threads of the transfer; fio reports its own without its start-up. DeepSpeed's row appears where `deepspeed.ops.aio` builds.
The script leaves no file on the disk.

fio reads into the same few blocks again and again. If they fit into the processor's cache (`psync 1M` uses 4 MiB), a virtual disk is up to a
sixth faster than for a reader that keeps the data. Two rows of plain threads show this effect: the same calls into 4 and into 128 MiB of
memory. A second ratio therefore compares with fio's best shape that fills at least 32 MiB.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import markdown, parser_of, rotated, timed
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.memory import MemoryLedger
from ztk.zero.offload import NvmeStore, OffloadPolicy
from ztk.zero.offload.pool import AlignedRegion

SLOT_BYTES = 32 << 20
DIRECTIONS = ("read", "write")
FIO_SHAPES = (  # engine, block, depth, jobs
    ("psync", "1M", 1, 4),
    ("psync", "8M", 1, 4),
    ("libaio", "1M", 32, 1),
    ("libaio", "8M", 8, 1),
    ("io_uring", "1M", 32, 1),
    ("io_uring", "8M", 8, 1),
)
FIO_MEMORY_BYTES = 64 << 20  # of fio's largest shape
CACHE_BYTES = 32 << 20  # last-level cache of the largest processor used so far
PLAIN_THREADS, PLAIN_BLOCK = 4, 1 << 20  # as fio's fastest reader


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass over the file."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A way to transfer the file: `run(direction)` reads or writes all of it once."""

    name: str
    memory_bytes: int  # buffers of its transfers
    run: Callable[[str], Pass]
    passes: dict[str, list[Pass]] = field(default_factory=lambda: {direction: [] for direction in DIRECTIONS})

    def speeds(self, direction: str, *, nbytes: int) -> list[float]:
        """GB/s per pass."""
        return [nbytes / 1e9 / done.seconds for done in self.passes[direction]]

    def speed(self, direction: str, *, nbytes: int) -> float:
        """The median GB/s."""
        return statistics.median(self.speeds(direction, nbytes=nbytes))


def main() -> None:
    options = _parse()
    policy = OffloadPolicy(
        optimizer="nvme", nvme_path=str(options.folder), buffer_bytes=SLOT_BYTES, buffer_count=4, threads=4
    )
    nbytes = int(options.gib * 2**30) // SLOT_BYTES * SLOT_BYTES
    with _store(policy, nbytes=nbytes) as (store, slots, path):
        contenders = [
            Contender(
                name="ztk store (default: 4 threads, 8 MiB)",
                memory_bytes=policy.buffer_count * SLOT_BYTES,
                run=StorePass(store=store, slots=slots),
            ),
            Contender(
                name="ztk store, unaligned memory",
                memory_bytes=2 * SLOT_BYTES,
                run=StorePass(store=store, slots=slots, skew=64),
            ),
            *(
                Contender(
                    name=f"plain threads psync 1M jobs {PLAIN_THREADS}, huge pages",
                    memory_bytes=memory_bytes,
                    run=PlainThreads(path, nbytes=nbytes, memory_bytes=memory_bytes),
                )
                for memory_bytes in (PLAIN_THREADS * PLAIN_BLOCK, policy.buffer_count * SLOT_BYTES)
            ),
            *_fio(path, nbytes=nbytes),
            *_deepspeed(path, nbytes=nbytes),
        ]
        for contender in contenders:  # the first write of a reserved block is slower and is not measured
            contender.run("write")
            contender.run("read")
        for round_number in range(options.rounds):
            for direction in DIRECTIONS:
                for contender in rotated(contenders, by=round_number):
                    contender.passes[direction].append(contender.run(direction))
    _print_table(contenders, nbytes=nbytes, rounds=options.rounds)


class StorePass:
    """The store as in a training step. With memory `skew` bytes off a page boundary, every block passes through a staging block."""

    def __init__(self, *, store: NvmeStore, slots: list, skew: int = 0) -> None:
        self._store, self._slots, self._skew = store, slots, skew
        memory = AlignedRegion(nbytes=2 * SLOT_BYTES + skew, pin=False).bytes[skew:].random_(256)
        self._halves = list(memory.view(2, SLOT_BYTES))

    def __call__(self, direction: str) -> Pass:
        return _timed(self._write if direction == "write" else self._read_into if self._skew else self._read)

    def _write(self) -> None:
        for i, slot in enumerate(self._slots):
            self._store.put(slot, value=self._halves[i % 2])
        self._store.flush()

    def _read(self) -> None:
        pending = [self._store.fetch(slot) for slot in self._slots]  # one read per buffer runs, the others queue
        for slot, transfer in zip(self._slots, pending, strict=True):
            transfer.wait()
            self._store.release(slot)

    def _read_into(self) -> None:
        for transfer in [self._store.fetch_into(s, out=self._halves[i % 2]) for i, s in enumerate(self._slots)]:
            transfer.wait()


class PlainThreads:
    """The calls of fio's psync engine into `memory_bytes` of memory: each thread moves its share of the file in blocks."""

    def __init__(self, path: str, *, nbytes: int, memory_bytes: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._share = nbytes // PLAIN_THREADS
        memory = AlignedRegion(nbytes=memory_bytes, pin=False).bytes.random_(256)
        self._blocks = [
            [memoryview(block.numpy()) for block in part] for part in memory.view(PLAIN_THREADS, -1, PLAIN_BLOCK)
        ]

    def __call__(self, direction: str) -> Pass:
        call = os.preadv if direction == "read" else os.pwritev
        with ThreadPoolExecutor(PLAIN_THREADS) as pool:
            return _timed(lambda: list(pool.map(partial(self._run, call=call), range(PLAIN_THREADS))))

    def _run(self, thread: int, *, call: Callable[..., int]) -> None:
        starts = range(thread * self._share, (thread + 1) * self._share, PLAIN_BLOCK)
        for start, block in zip(starts, cycle(self._blocks[thread]), strict=False):
            moved = call(self._file, [block], start)
            assert moved == PLAIN_BLOCK, f"moved {moved} of {PLAIN_BLOCK} bytes"


@contextmanager
def _store(policy: OffloadPolicy, *, nbytes: int) -> Iterator[tuple[NvmeStore, list, str]]:
    store = NvmeStore(policy, rank=0, ledger=MemoryLedger(), counters=IoCounters())
    try:
        store.reserve(nbytes=nbytes)
        slots = [
            store.allocate(name=str(i), shape=(SLOT_BYTES,), dtype=torch.uint8, category="optimizer")
            for i in range(nbytes // SLOT_BYTES)
        ]
        ours = Path(policy.nvme_path).resolve()
        links = {link: os.readlink(link) for link in Path(f"/proc/{os.getpid()}/fd").iterdir() if link.is_symlink()}
        (path,) = (str(link) for link, target in links.items() if target.startswith(f"{ours}/ztk-rank0-"))
        yield store, slots, path
    finally:
        store.close()


def _fio(path: str, *, nbytes: int) -> list[Contender]:
    if shutil.which("fio") is None:
        print("fio is not installed (Debian: apt-get install fio): no ratio")
        return []

    def run(direction: str, *, engine: str, block: str, depth: int, jobs: int, huge: bool) -> Pass:
        share = nbytes // jobs
        command = (
            f"fio --name=x --filename={path} --rw={direction} --direct=1 --ioengine={engine} --bs={block} "
            f"--iodepth={depth} --numjobs={jobs} --size={share} --offset_increment={share} --thread "
            "--group_reporting --fallocate=none --allow_file_create=0 --output-format=json"
            f"{' --iomem=shmhuge' if huge else ''}"
        )
        result = json.loads(subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout)
        (group,) = result["jobs"]
        moved = group[direction]
        assert moved["io_bytes"] == nbytes, f"fio moved {moved['io_bytes']} of {nbytes} bytes"
        cpu_seconds = (group["usr_cpu"] + group["sys_cpu"]) / 100 * group["job_runtime"] / 1000
        return Pass(seconds=nbytes / moved["bw_bytes"], cpu_seconds=cpu_seconds)

    contenders = []
    memories = (False, True) if _free_huge_bytes() >= FIO_MEMORY_BYTES else (False,)
    for (engine, block, depth, jobs), huge in product(FIO_SHAPES, memories):
        chosen = {"engine": engine, "block": block, "depth": depth, "jobs": jobs, "huge": huge}
        contenders.append(
            Contender(
                name=f"fio {engine} {block} depth {depth} jobs {jobs}{', huge pages' if huge else ''}",
                memory_bytes=(int(block[:-1]) << 20) * depth * jobs,
                run=lambda direction, chosen=chosen: run(direction, **chosen),
            )
        )
    return contenders


def _free_huge_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["HugePages_Free"]) * int(fields["Hugepagesize"].split()[0]) * 1024


def _deepspeed(path: str, *, nbytes: int) -> list[Contender]:
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load(verbose=False).aio_handle(8 << 20, 32, False, True, 1)
    except Exception as error:  # noqa: BLE001 - the table does without it, whatever the error of its build
        print(f"DeepSpeed's aio op is not available ({type(error).__name__}: {str(error).splitlines()[0]})")
        return []
    memory = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).random_(256)

    def move(direction: str) -> None:
        (handle.async_pread if direction == "read" else handle.async_pwrite)(memory, path, 0)
        handle.wait()

    def run(direction: str) -> Pass:
        return _timed(lambda: move(direction))

    return [Contender(name="DeepSpeed aio 8 MiB depth 32, locked memory", memory_bytes=nbytes, run=run)]


def _print_table(contenders: list[Contender], *, nbytes: int, rounds: int) -> None:
    print(f"\n{nbytes / 2**30:.2f} GiB, {rounds} interleaved rounds, GB/s min/median/max\n")
    columns = ("GB/s", "of fio's best", f"of its best by {CACHE_BYTES >> 20} MiB and more", "CPU s/GB")
    header = ["contender", "MiB", *(word for name in DIRECTIONS for word in (f"{name} {columns[0]}", *columns[1:]))]
    rows = []
    fio = [contender for contender in contenders if contender.name.startswith("fio")]
    for contender in contenders:
        cells = [contender.name, f"{contender.memory_bytes >> 20}"]
        for direction in DIRECTIONS:
            speeds, middle = contender.speeds(direction, nbytes=nbytes), contender.speed(direction, nbytes=nbytes)
            cells.append(f"{min(speeds):.2f}/{middle:.2f}/{max(speeds):.2f}")
            for least_bytes in (0, CACHE_BYTES):
                rivals = [one.speed(direction, nbytes=nbytes) for one in fio if one.memory_bytes >= least_bytes]
                cells.append(f"{middle / max(rivals, default=math.nan):.2f}")
            cpu_seconds = statistics.median(done.cpu_seconds for done in contender.passes[direction])
            cells.append(f"{cpu_seconds / (nbytes / 1e9):.3f}")
        rows.append(cells)
    print(markdown(header, rows))


def _timed(move: Callable[[], None]) -> Pass:
    seconds, cpu_seconds = timed(move)
    return Pass(seconds=seconds, cpu_seconds=cpu_seconds)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="folder on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file (default 1)")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
