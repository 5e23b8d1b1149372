"""Compares streamed layers with the disk, the plan and Accelerate's disk offload.

    python scripts/check_streaming.py FOLDER                       FOLDER is on the disk; needs 5 GB there and frees them
    python scripts/check_streaming.py FOLDER --weights int8 --layers 24 --accelerate

Packs a randomly initialised Llama with `--layers` layers, and one with four times as many, into FOLDER. Every measurement is a process with the
same `--memory`, so that the peak of resident memory is its own. Exit code 1 if one of these does not hold:

- the counted bytes equal the passes times the plan's bytes per pass;
- layers are read while computing at 95 % or more of the plain read rate. That rate is the faster of fio (if installed) and direct reads of
  8 MiB by 4 threads into huge pages, on the same file and in turns with the engine. Checked if the plan has two buffers or more and reads for
  longer than it computes;
- tokens/s are within 15 % of the plan;
- the resident memory of the larger model is within 5 % of the smaller one's.

With --accelerate, transformers' `generate` answers the same prompts greedily over Accelerate's disk offload, and the ratio is printed. It
reads through the page cache, which is emptied before every token, as if the model were larger than memory. With --deepspeed PYTHON,
DeepSpeed's stage 3 with parameters on NVMe answers them too, in its own environment (see `streaming_deepspeed.py`).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from streaming_deepspeed import rate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ztk.inference import Generator, InferencePolicy, SamplingParams, open_packed, pack
from ztk.inference.describe import Description, Subject
from ztk.inference.packed import LAYERS
from ztk.zero.offload import DiskFile, OffloadPolicy
from ztk.zero.offload.pool import AlignedRegion

DIM, HEADS, INNER, VOCABULARY, LENGTH = 1024, 16, 2816, 8000, 256
SIZES = {  # with transformers' names
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
}
THREADS, BLOCK = 4, 8 << 20
ROUNDS = 3
FIO_SECONDS = 3
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


def subject(layers: int) -> Subject:
    angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS)))
    description = Description(
        family="native",
        vocab_size=VOCABULARY,
        dim=DIM,
        layers=layers,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=DIM // HEADS,
        max_len=LENGTH,
        activation="silu",
        is_tied=False,
        rotary_dims=DIM // HEADS,
    )
    return Subject(description=description, tables=[(angles.cos(), angles.sin())])


def prompts(count: int) -> list[list[int]]:
    return [[(7 * number + place) % VOCABULARY for place in range(16)] for number in range(count)]


# Measurements, each a process of its own


def measure_ztk(given: argparse.Namespace) -> dict[str, float]:
    policy = InferencePolicy(
        weights=given.weights,
        memory_bytes=given.memory,
        max_sequences=given.sequences,
        offload=OffloadPolicy(parameters="nvme", nvme_path=str(given.folder), threads=THREADS, block_bytes=BLOCK),
    )
    packed = open_packed(given.folder / f"ztk-{given.layers}")
    ring = AlignedRegion(nbytes=4 * THREADS * BLOCK, pin=False).bytes.fill_(
        1
    )  # for `direct_rate`; counts into the base memory
    base = resident("VmRSS")
    generator = Generator(packed, policy=policy)
    plan = generator.plan
    assert plan is not None, "no layer is streamed"
    print(plan, file=sys.stderr)
    rates, fio, direct, speeds, passes, moved = [], [], [], [], 0, 0
    for number in range(ROUNDS):
        fio.append(fio_rate(packed.path / LAYERS))
        direct.append(direct_rate(packed.path / LAYERS, memory=ring.view(-1, BLOCK)))
        for prompt in prompts(plan.sequences):
            generator.submit(prompt, sampling=SamplingParams(max_tokens=given.tokens + 2, temperature=0.0, seed=number))
        while len(generator.step()) < plan.sequences:
            passes += 1  # prompts
        passes += 1
        before, started, drawn = generator.streamed_bytes, time.perf_counter(), 0
        for _ in range(given.tokens):
            drawn += len(generator.step())
            passes += 1
        seconds = time.perf_counter() - started
        moved = generator.streamed_bytes - before
        rates.append(given.tokens * plan.pass_bytes / seconds)
        speeds.append(drawn / seconds)
        while generator.has_work:
            generator.step()
    return {
        "tokens_per_second": statistics.median(speeds),
        "planned_tokens_per_second": plan.tokens_per_second,
        "sequences": plan.sequences,
        "resident_layers": plan.resident,
        "pass_bytes": plan.pass_bytes,
        "bytes_exact": moved == given.tokens * plan.pass_bytes,
        "read_rate": statistics.median(rates),
        "fio_rate": statistics.median(fio),
        "direct_rate": statistics.median(direct),
        # With one buffer, reading and computing alternate: the disk waits.
        "is_read_bound": plan.read_seconds > plan.compute_seconds and plan.buffers > 1,
        "resident_bytes": resident("VmHWM") - base,
    }


def fio_rate(path: Path) -> float:
    """Bytes per second of fio without concurrent computing; 0 if fio is not installed."""
    if not shutil.which("fio"):
        return 0.0
    command = ["fio", "--name=read", f"--filename={path}", "--rw=read", "--direct=1", "--readonly", f"--bs={BLOCK}"]
    command += [
        "--ioengine=psync",
        f"--numjobs={THREADS}",
        "--group_reporting",
        "--time_based",
        f"--runtime={FIO_SECONDS}",
    ]
    command += ["--offset_increment=25%", "--size=25%", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
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


def measure_accelerate(given: argparse.Namespace) -> dict[str, float]:
    """transformers' `generate` with all layers on disk: fp32, greedy, the same prompts in one padded batch."""
    import accelerate
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=given.layers, **SIZES)
    torch.manual_seed(0)
    folder = given.folder / "accelerate"
    model = transformers.LlamaForCausalLM(config).eval()
    accelerate.disk_offload(model, offload_dir=str(folder), execution_device=torch.device("cpu"))
    os.sync()
    model.register_forward_pre_hook(lambda module, own: empty_cache(folder))
    tokens = torch.tensor(prompts(given.sequences))
    count = max(2, given.tokens // 4)
    found = rate(model, tokens=tokens, count=count)
    shutil.rmtree(folder)
    return {"tokens_per_second": found}


def measure_deepspeed(given: argparse.Namespace, *, sequences: int) -> float:
    """Tokens per second."""
    asked = {"layers": given.layers, "sizes": SIZES, "prompts": prompts(sequences), "tokens": max(2, given.tokens // 2)}
    folder = given.folder / "deepspeed"
    folder.mkdir()
    command = [given.deepspeed, str(Path(__file__).with_name("streaming_deepspeed.py")), str(folder), json.dumps(asked)]
    tools = os.pathsep.join(
        [str(Path(given.deepspeed).parent), os.environ["PATH"]]
    )  # ninja is installed next to Python
    own = os.environ | {"OMP_NUM_THREADS": "1", "PATH": tools}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=own)
    shutil.rmtree(folder)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


def empty_cache(folder: Path) -> None:
    """Drops a folder's files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


# The comparison


def child(given: argparse.Namespace, *, what: str, layers: int, sequences: int | None) -> dict[str, float]:
    command = [sys.executable, __file__, str(given.folder), "--measure", what, "--layers", str(layers)]
    command += ["--weights", given.weights, "--memory", str(given.memory), "--tokens", str(given.tokens)]
    command += [] if sequences is None else ["--sequences", str(sequences)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return json.loads(done.stdout)


def compare(given: argparse.Namespace) -> bool:
    small, large = given.layers, 4 * given.layers
    try:
        for layers in (small, large):
            pack(
                given.folder / f"ztk-{layers}",
                subject=subject(layers),
                state=Drawn(layers=layers),
                weights=given.weights,
            )
        own = {layers: child(given, what="ztk", layers=layers, sequences=given.sequences) for layers in (small, large)}
        sequences, peers = int(own[small]["sequences"]), {}
        if given.accelerate:
            found = child(given, what="accelerate", layers=small, sequences=sequences)
            peers["Accelerate's disk offload"] = found["tokens_per_second"]
        if given.deepspeed:
            peers["DeepSpeed's stage 3 on NVMe"] = measure_deepspeed(given, sequences=sequences)
        for name, other in peers.items():
            speed = own[small]["tokens_per_second"]
            print(f"{name}, {sequences} sequences: {other:.2f} tokens/s; ztk {speed:.2f}, {speed / other:.1f} times")
    finally:
        for layers in (small, large):
            shutil.rmtree(given.folder / f"ztk-{layers}", ignore_errors=True)
        shutil.rmtree(given.folder / "deepspeed", ignore_errors=True)
    faults = []
    for layers, found in own.items():
        read = found["read_rate"] / max(found["fio_rate"], found["direct_rate"])
        plan = found["tokens_per_second"] / found["planned_tokens_per_second"]
        print(
            f"{layers} layers, weights={given.weights}: {found['read_rate'] / 1e9:.2f} GB/s read while computing, "
            f"alone by fio {found['fio_rate'] / 1e9:.2f}, into huge pages {found['direct_rate'] / 1e9:.2f}: {read:.3f}; "
            f"{found['sequences']} sequences, "
            f"{found['tokens_per_second']:.2f} tokens/s, "
            f"planned {found['planned_tokens_per_second']:.2f}: {plan:.3f}; {found['resident_bytes'] / 1e6:.0f} MB resident of "
            f"{given.memory / 1e6:.0f} allowed; bytes exact: {bool(found['bytes_exact'])}"
        )
        faults += [] if found["bytes_exact"] else ["bytes differ"]
        faults += ["reads are slow"] if found["is_read_bound"] and read < READ else []
        faults += [] if abs(plan - 1) <= PLAN else ["tokens/s are not within 15 % of the plan"]
    ratio = own[large]["resident_bytes"] / own[small]["resident_bytes"]
    print(f"resident memory, {large} layers compared with {small}: {ratio:.3f}")
    faults += [] if ratio <= 1 + FLAT else ["memory grows with the model"]
    print("; ".join(faults) or "all hold")
    return not faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an existing folder on the disk")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--weights", choices=("stored", "int8", "int4"), default="stored")
    parser.add_argument(
        "--memory", type=int, default=600_000_000, help="bytes of memory for layers, caches and activations"
    )
    parser.add_argument("--sequences", type=int, help="default: the plan's choice")
    parser.add_argument("--tokens", type=int, default=12, help="tokens per sequence and round")
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="interpreter of an environment with DeepSpeed")
    parser.add_argument("--measure", choices=("ztk", "accelerate"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is None:
        sys.exit(0 if compare(given) else 1)
    measure = {"ztk": measure_ztk, "accelerate": measure_accelerate}[given.measure]
    print(json.dumps(measure(given)))


if __name__ == "__main__":
    main()
