"""Layers streamed from a disk are read at the disk's rate, give the planned tokens per second, and need the same memory for any model.

A randomly initialised Llama with 16 layers, and one with 64, in a folder on the disk: `TMPDIR=FOLDER` names it (5 GB, freed at the end).
Every measurement is a process with the same limit, so that the peak of resident memory is its own:

- the counted bytes equal the passes times the plan's bytes per pass;
- layers are read while computing at 95 % or more of the plain read rate. That rate is the faster of fio (if installed) and direct reads of
  8 MiB by 4 threads into huge pages, on the same file and in turns with the engine. Checked if the plan has two buffers or more and reads for
  longer than it computes;
- tokens/s are within 15 % of the plan;
- the resident memory of the larger model is within 5 % of the smaller one's.

`scripts/bench_streaming.py` compares with Accelerate and DeepSpeed.
"""

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from scripts.bench import status_bytes
from scripts.bench_streaming import DIM, HEADS, INNER, LENGTH, VOCABULARY, prompts
from tests.ranks import forkserver
from ztk.inference import Generator, InferencePolicy, SamplingParams, open_packed, pack
from ztk.inference.describe import Description, Subject
from ztk.inference.packed import LAYERS
from ztk.zero.offload import DiskFile, OffloadPolicy
from ztk.zero.offload.pool import AlignedRegion

MEMORY = 600_000_000  # bytes for layers, caches and activations
THREADS, BLOCK = 4, 8 << 20
ROUNDS, TOKENS, FIO_SECONDS = 3, 12, 3
READ, PLAN, FLAT = 0.95, 0.15, 0.05


class Drawn(Mapping):
    """Parameters of a native decoder, drawn on access."""

    def __init__(self, *, layers: int) -> None:
        block = {
            **{f"attention.{name}": (DIM, DIM) for name in ("query", "key", "value", "out")},
            **{"mlp.gate": (INNER, DIM), "mlp.up": (INNER, DIM), "mlp.down": (DIM, INNER)},
            **{"attention_norm": (DIM,), "mlp_norm": (DIM,)},
        }
        self._shapes = {
            f"blocks.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in block.items()
        }
        self._shapes |= {"embedding.weight": (VOCABULARY, DIM), "head.weight": (VOCABULARY, DIM), "norm.weight": (DIM,)}

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + sum(map(ord, name)))) * 0.02

    def __iter__(self):
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def write_model(folder: Path, *, layers: int) -> Path:
    angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS)))
    sizes = {"vocab_size": VOCABULARY, "dim": DIM, "layers": layers, "heads": HEADS, "kv_heads": HEADS}
    heads = {"head_dim": DIM // HEADS, "rotary_dims": DIM // HEADS, "max_len": LENGTH}
    description = Description(family="native", activation="silu", is_tied=False, **sizes, **heads)
    subject = Subject(description=description, tables=[(angles.cos(), angles.sin())])
    pack(folder, subject=subject, state=Drawn(layers=layers), weights="stored")
    return folder


def measure(
    folder: Path, *, scratch: Path, memory: int = MEMORY, sequences: int | None = None, tokens: int = TOKENS
) -> dict[str, float]:
    """Reads and answers in rounds. Returns medians, the plan's numbers and the peak of resident memory."""
    torch.set_num_threads(1)
    place = OffloadPolicy(parameters="nvme", nvme_path=str(scratch), threads=THREADS, block_bytes=BLOCK)
    policy = InferencePolicy(weights="stored", memory_bytes=memory, max_sequences=sequences, offload=place)
    packed = open_packed(folder)
    # For `direct_rate`; counts into the base memory.
    ring = AlignedRegion(nbytes=4 * THREADS * BLOCK, pin=False).bytes.fill_(1)
    base = status_bytes("VmRSS")
    generator = Generator(packed, policy=policy)
    plan = generator.plan
    assert plan is not None, "no layer is streamed"
    rates, fio, direct, speeds, moved = [], [], [], [], 0
    for number in range(ROUNDS):
        fio.append(fio_rate(packed.path / LAYERS))
        direct.append(direct_rate(packed.path / LAYERS, memory=ring.view(-1, BLOCK)))
        for prompt in prompts(plan.sequences):
            generator.submit(prompt, sampling=SamplingParams(max_tokens=tokens + 2, temperature=0.0, seed=number))
        while len(generator.step()) < plan.sequences:
            pass  # prompts
        before, started, drawn = generator.streamed_bytes, time.perf_counter(), 0
        for _ in range(tokens):
            drawn += len(generator.step())
        seconds = time.perf_counter() - started
        moved = generator.streamed_bytes - before
        rates.append(tokens * plan.pass_bytes / seconds)
        speeds.append(drawn / seconds)
        while generator.has_work:
            generator.step()
    return {
        "tokens_per_second": statistics.median(speeds),
        "planned_tokens_per_second": plan.tokens_per_second,
        "sequences": plan.sequences,
        "bytes_exact": moved == tokens * plan.pass_bytes,
        "read_rate": statistics.median(rates),
        "fio_rate": statistics.median(fio),
        "direct_rate": statistics.median(direct),
        # With one buffer, reading and computing alternate: the disk waits.
        "is_read_bound": plan.read_seconds > plan.compute_seconds and plan.buffers > 1,
        "resident_bytes": status_bytes("VmHWM") - base,
    }


def fio_rate(path: Path) -> float:
    """Bytes per second of fio without concurrent computing; 0 if fio is not installed."""
    if not shutil.which("fio"):
        return 0.0
    command = f"fio --name=read --filename={path} --rw=read --direct=1 --readonly --bs={BLOCK} --ioengine=psync "
    command += f"--numjobs={THREADS} --group_reporting --time_based --runtime={FIO_SECONDS} --offset_increment=25% "
    done = subprocess.run(
        f"{command} --size=25% --output-format=json".split(), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]


def direct_rate(path: Path, *, memory: torch.Tensor) -> float:
    """Bytes per second of direct reads into `memory` in huge pages, without concurrent computing."""
    disk = DiskFile.existing(path, direct=True)
    offsets = list(range(0, path.stat().st_size - BLOCK, BLOCK))[: (1 << 30) // BLOCK]
    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda at: disk.read(memory[at // BLOCK % len(memory)], offset=at), offsets))
    seconds = time.perf_counter() - started
    disk.close()
    return len(offsets) * BLOCK / seconds


def _measure(pipe: Connection, options: dict) -> None:
    pipe.send(measure(**options))


def measured_in_a_process(**options) -> dict[str, float]:
    mine, theirs = forkserver().Pipe()
    process = forkserver().Process(target=_measure, args=(theirs, options))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        process.join()


def test_layers_are_read_at_the_rate_of_the_disk_into_bounded_memory(tmp_path, show):
    found = {}
    for layers in (16, 64):
        folder = write_model(tmp_path / f"{layers}", layers=layers)
        found[layers] = own = measured_in_a_process(folder=folder, scratch=tmp_path)
        shutil.rmtree(folder)
        read = own["read_rate"] / max(own["fio_rate"], own["direct_rate"])
        plan = own["tokens_per_second"] / own["planned_tokens_per_second"]
        show(
            f"{layers} layers: {own['read_rate'] / 1e9:.2f} GB/s read while computing, alone by fio {own['fio_rate'] / 1e9:.2f}, "
            f"into huge pages {own['direct_rate'] / 1e9:.2f}: {read:.3f}; {own['sequences']} sequences, "
            f"{own['tokens_per_second']:.2f} tokens/s, planned {own['planned_tokens_per_second']:.2f}: {plan:.3f}; "
            f"{own['resident_bytes'] / 1e6:.0f} MB resident of {MEMORY / 1e6:.0f} allowed"
        )
        assert own["bytes_exact"]
        assert read >= READ or not own["is_read_bound"]
        assert abs(plan - 1) <= PLAN
    assert found[64]["resident_bytes"] <= (1 + FLAT) * found[16]["resident_bytes"]
