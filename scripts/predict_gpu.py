"""Predicts steps, decoding and kernels on GPUs without one, and writes the table into docs/gpu.md.

    python scripts/predict_gpu.py            # prints the table
    python scripts/predict_gpu.py --write    # and replaces the one in docs/gpu.md

Steps are planned (`ztk.planner`). Decoding and kernels have two times: the floor of their bytes and products at the data sheet's rates, and
the time at the shares of these rates that conf/hardware/ expects.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.plan import make_plan
from experiments.policies import hardware
from ztk.config import compose
from ztk.core.policies.hardware import Hardware
from ztk.kernels import ALL_OPS
from ztk.nn import Decoder, DecoderConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
START, END = "<!-- predicted: python scripts/predict_gpu.py --write -->", "<!-- end of predicted -->"
NAMES = ("h200", "h100")
STEP = ("task=plan", "model=1b", "data=synthetic", "data.seq_len=4096", "launch.ranks=1")
BATCH = ("train.micro_batch_size=4", "train.global_batch_size=4")
STEPS = {
    "stage 0": ("zero=stage0",),
    "stage 3": ("zero=stage3",),
    "stage 3, states in main memory": ("zero=stage3", "offload=cpu"),
    "stage 3, half of the states in main memory": ("zero=stage3", "offload=cpu", "offload.optimizer_fraction=0.5"),
}
LLAMA = DecoderConfig(
    vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336, max_seq_len=8192
)
DECODED = {1: 2048, 64: 2048}  # rows -> tokens that each has in the cache
BYTES = 2  # of bf16
KERNELS = (
    ("attention", (4, 8192, 32, 128), False),
    ("attention", (4, 8192, 32, 128), True),
    ("adamw", (1_000_000_000,), False),
    ("cross_entropy", (8192, 131_072), False),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/gpu.md")
    found = table()
    print(found)
    if parser.parse_args().write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            f"{text.partition(START)[0]}{START}\n\n{found}\n\n{END}{text.partition(END)[2]}", encoding="utf-8"
        )
    return 0


def table() -> str:
    """One row per piece of work, and a column per GPU."""
    with tempfile.TemporaryDirectory() as folder:
        columns = {name: dict(rows(name, folder=folder)) for name in NAMES}
    lines = [f"| work | {' | '.join(name.upper() for name in NAMES)} |", f"| --- |{' --- |' * len(NAMES)}"]
    lines += [f"| {work} | {' | '.join(columns[name][work] for name in NAMES)} |" for work in columns[NAMES[0]]]
    return "\n".join(lines)


def rows(name: str, *, folder: str) -> Iterator[tuple[str, str]]:
    """(work, time on the GPU `name`)."""
    for title, words in STEPS.items():
        config = compose(*STEP, *BATCH, *words, f"hardware={name}", output_dir=folder)
        plan, machine = make_plan(config), hardware(config)
        assert plan.time is not None and plan.mfu is not None and machine is not None
        yield f"step of 1B, 16,384 tokens, {title}", f"{1e3 * plan.time.seconds:.0f} ms, MFU {plan.mfu:.0%}"
    for batch, length in DECODED.items():
        nbytes = weight_bytes() + batch * length * cache_bytes()
        yield f"decode of 8B, batch {batch}, {length:,} tokens each", times(machine, nbytes=nbytes, flops=0)
    specs = {spec.name: spec for spec in ALL_OPS}
    for op, shape, backward in KERNELS:
        spec, count = specs[op], 2.5 if backward else 1  # a backward of attention has five products to two
        count_bytes = spec.num_bytes_backward if backward else spec.num_bytes
        assert count_bytes is not None, "an op of the list has a count"
        nbytes = count_bytes(shape, BYTES)
        flops = count * spec.num_flops(shape) if op == "attention" else 0
        title = f"{op} {'x'.join(map(str, shape))}{', backward' if backward else ''}"
        yield title, times(machine, nbytes=nbytes, flops=flops, share=machine.attention_share)


def weight_bytes() -> int:
    """Bytes of the weights that a step of decoding reads: all but the embedding, of which it reads a row per sequence."""
    with torch.device("meta"):
        model = Decoder(LLAMA)
    count = sum(parameter.numel() for parameter in model.parameters())
    return BYTES * (count - LLAMA.vocab_size * LLAMA.dim)


def cache_bytes() -> int:
    """Bytes of one token's keys and values."""
    return 2 * LLAMA.layers * LLAMA.kv_heads * LLAMA.dim // LLAMA.heads * BYTES


def times(machine: Hardware, *, nbytes: float, flops: float, share: float = 1.0) -> str:
    """The floor, and the time at the expected shares. share: of the rate of products."""
    moved, computed = nbytes / machine.memory_bandwidth, flops / machine.rate("bfloat16")
    expected = max(moved / machine.memory_share, computed / share)
    return f"{1e3 * max(moved, computed):.2g} ms, expected {1e3 * expected:.2g} ms"


if __name__ == "__main__":
    sys.exit(main())
