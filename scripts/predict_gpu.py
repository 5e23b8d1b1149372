"""Predicts steps, decoding and kernels on GPUs without one, and writes the table into docs/gpu.md.

    python scripts/predict_gpu.py            # prints the table
    python scripts/predict_gpu.py --write    # and replaces the one in docs/gpu.md, and experiments/results/predicted_gpu.json

The file also has the work that `scripts/first_hour.py` measures, in its shapes: `first_hour.py read` puts measured next to predicted times.

Steps are planned (`ztk.planner`). Decoding and kernels have two times: the floor of their bytes and products at the data sheet's rates, and
the time at the shares of these rates that conf/hardware/ expects.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of
from scripts.first_hour import KERNELS as OPS
from scripts.gpu_item import DECODED, LLAMA
from scripts.results import PREDICTED, commit_of
from ztk.config import Config, compose
from ztk.core.policies.hardware import Hardware
from ztk.experiments.plan import make_plan
from ztk.experiments.policies import hardware
from ztk.kernels import ALL_OPS
from ztk.nn import Decoder

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "gpu.md"
START, END = "<!-- predicted: python scripts/predict_gpu.py --write -->", "<!-- end of predicted -->"
NAMES = ("h200", "h100")
MODEL = ("task=plan", "model=1b", "data=synthetic", "launch.ranks=1")
BATCH = ("data.seq_len=4096", "train.micro_batch_size=4", "train.global_batch_size=4")
STEPS = {
    "stage 0": ("zero=stage0",),
    "stage 3": ("zero=stage3",),
    "stage 3, states in main memory": ("zero=stage3", "offload=cpu"),
    "stage 3, half of the states in main memory": ("zero=stage3", "offload=cpu", "offload.optimizer_fraction=0.5"),
}
BYTES = 2  # of bf16
# Steps of scripts/first_hour.py: name, number in its result, and overrides. scripts/gpu_training.py chooses the batch by the GPU's memory.
MEASURED = (
    ("speed ztk0", "step_seconds", ("zero=stage0",)),
    ("overlap ztk3+cpu", "step", ("zero=stage3", "offload=cpu")),
)
SEQ_LEN, MICRO_BATCH = 2048, {"h200": 8, "h100": 4}
SHOWN = (  # kernels in the table: op, shape, direction
    ("attention", (4, 8192, 32, 128), "forward"),
    ("attention", (4, 8192, 32, 128), "backward"),
    ("adamw", (1_000_000_000,), "forward"),
    ("cross_entropy", (8192, 131_072), "forward+backward"),
)
PRODUCTS = {
    "attention": "attention_share",
    "linear_rows": "product_share",
}  # ops that multiply, and the share that they reach
ATTENTION = {"forward": 2, "backward": 5, "forward+backward": 7}  # products


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds of a piece of work on a GPU.

    floor: seconds at the data sheet's rates. step, value: the step of scripts/first_hour.py that measures it, and the number in its result;
    a kernel has its shape and direction instead. shown: whether the table of docs/gpu.md has it.
    """

    work: str
    seconds: float
    floor: float | None = None
    mfu: float | None = None
    step: str | None = None
    value: str | None = None
    shape: tuple[int, ...] = ()
    direction: str | None = None
    shown: bool = False


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--write", action="store_true", help="replace the table in docs/gpu.md and the file of predictions"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        predicted = {name: list(predictions(name, folder=folder)) for name in NAMES}
    found = table(predicted)
    print(found)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            f"{text.partition(START)[0]}{START}\n\n{found}\n\n{END}{text.partition(END)[2]}", encoding="utf-8"
        )
        rows = {name: [asdict(one) for one in own] for name, own in predicted.items()}
        PREDICTED.write_text(json.dumps({"commit": commit_of(REPOSITORY), **rows}, indent=1) + "\n")
    return 0


def table(predicted: dict[str, Sequence[Prediction]]) -> str:
    """One row per piece of work that is shown, and a column per GPU."""
    columns = [{one.work: cell(one) for one in own if one.shown} for own in predicted.values()]
    lines = [f"| work | {' | '.join(name.upper() for name in predicted)} |", f"| --- |{' --- |' * len(columns)}"]
    lines += [f"| {work} | {' | '.join(column[work] for column in columns)} |" for work in columns[0]]
    return "\n".join(lines)


def cell(one: Prediction) -> str:
    """The time with MFU, or after the floor."""
    if one.floor is None:
        return f"{1e3 * one.seconds:.0f} ms, MFU {one.mfu:.0%}"
    return f"{1e3 * one.floor:.2g} ms, expected {1e3 * one.seconds:.2g} ms"


def predictions(name: str, *, folder: str) -> Iterator[Prediction]:
    """All work on the GPU `name`. folder: holds the plans."""
    target = partial(compose, *MODEL, f"hardware={name}", output_dir=folder)
    for title, words in STEPS.items():
        yield planned(target(*BATCH, *words), work=f"step of 1B, 16,384 tokens, {title}", shown=True)
    micro_batch = MICRO_BATCH[name]
    batch = (
        f"data.seq_len={SEQ_LEN}",
        f"train.micro_batch_size={micro_batch}",
        f"train.global_batch_size={micro_batch}",
    )
    for step, value, words in MEASURED:
        title = f"{step}: step of 1B, {micro_batch * SEQ_LEN:,} tokens"
        yield planned(target(*batch, *words), work=title, step=step, value=value)
    machine = hardware(target(*BATCH))
    assert machine is not None
    for rows, length in DECODED.items():
        nbytes = weight_bytes() + rows * length * cache_bytes()
        floor, seconds = times(machine, nbytes=nbytes, flops=0)
        work = f"decode of 8B, batch {rows}, {length:,} tokens each"
        yield Prediction(work=work, seconds=seconds, floor=floor, shown=True, step="decode", value=f"batch_{rows}")
    yield from kernels(machine)


def planned(
    config: Config, *, work: str, step: str | None = None, value: str | None = None, shown: bool = False
) -> Prediction:
    """A training step of the planner."""
    plan = make_plan(config)
    assert plan.time is not None and plan.mfu is not None
    return Prediction(work=work, seconds=plan.time.seconds, mfu=plan.mfu, step=step, value=value, shown=shown)


def kernels(machine: Hardware) -> Iterator[Prediction]:
    """The kernels of the table and of scripts/first_hour.py, in bf16."""
    specs = {spec.name: spec for spec in ALL_OPS}
    measured = [
        (op, shape, direction)
        for op in OPS
        for shape in specs[op].bench_shapes
        for direction in (("forward", "forward+backward") if specs[op].differentiable else ("forward",))
    ]
    for op, shape, direction in dict.fromkeys((*SHOWN, *measured)):
        spec = specs[op]
        forward = spec.num_bytes(shape, BYTES)
        backward = spec.num_bytes_backward(shape, BYTES) if spec.num_bytes_backward else 2 * forward
        nbytes = {"forward": forward, "backward": backward, "forward+backward": forward + backward}[direction]
        flops = spec.num_flops(shape) if op in PRODUCTS else 0
        flops *= ATTENTION[direction] / ATTENTION["forward"] if op == "attention" else 1
        floor, seconds = times(machine, nbytes=nbytes, flops=flops, share=getattr(machine, PRODUCTS.get(op, ""), 1.0))
        yield Prediction(
            work=f"{op} {'x'.join(map(str, shape))}{'' if direction == 'forward' else f', {direction}'}",
            seconds=seconds,
            floor=floor,
            step=f"kernels {op}" if (op, shape, direction) in measured else None,
            shape=shape,
            direction=direction,
            shown=(op, shape, direction) in SHOWN,
        )


def weight_bytes() -> int:
    """Bytes of the weights that a step of decoding reads: all but the embedding, of which it reads a row per sequence."""
    with torch.device("meta"):
        model = Decoder(LLAMA)
    count = sum(parameter.numel() for parameter in model.parameters())
    return BYTES * (count - LLAMA.vocab_size * LLAMA.dim)


def cache_bytes() -> int:
    """Bytes of one token's keys and values."""
    return 2 * LLAMA.layers * LLAMA.kv_heads * LLAMA.dim // LLAMA.heads * BYTES


def times(machine: Hardware, *, nbytes: float, flops: float, share: float = 1.0) -> tuple[float, float]:
    """Seconds at the data sheet's rates, and at the expected shares. share: fraction of the rate of products."""
    moved, computed = nbytes / machine.memory_bandwidth, flops / machine.rate("bfloat16")
    return max(moved, computed), max(moved / machine.memory_share, computed / share)


if __name__ == "__main__":
    sys.exit(main())
