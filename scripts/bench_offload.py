"""Measures how much of the disk time training hides: step time at `zero=stage3 offload=nvme`, compute time and disk time.

    python scripts/bench_offload.py                     2 ranks, 30m model, bf16
    python scripts/bench_offload.py --batch 16          more compute per byte
    python scripts/bench_offload.py --ranks 1           on 2 cores: leaves one core for the disk

Each round runs the same model with its shards on the device, whose step is the compute time, and on NVMe. Disk time is the time with at
least one transfer in flight, from the I/O counters. Goal: a step takes at most 1.15 times the larger of compute and disk time.
"""

import functools
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of, table, timed
from tests.ranks import RankPool
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy

SEQ_LEN = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds and bytes per step of one rank."""

    step: float
    cpu: float
    disk: float
    read: float
    write: float


def run(
    process: Process, *, tier: str, model: DecoderConfig, batch: int, steps: int, folder: str, buffers: int
) -> Timing:
    """Medians over `steps` steps, after two steps of warm-up."""
    with torch.device("meta"):
        decoder = Decoder(model)
    engine = parallelize(
        decoder,
        process=process,
        optimizer=OptimizerPolicy(clip_grad_norm=1.0),
        precision=PrecisionPolicy.named("bf16"),
        zero=ZeroPolicy(stage=3, prefetch_bucket_size=10_000_000),
        offload=OffloadPolicy(optimizer=tier, parameters=tier, nvme_path=folder, buffer_count=buffers),
        initial_values=functools.partial(initial_values, decoder, seed=0),
    )
    tokens = torch.randint(model.vocab_size, (batch, SEQ_LEN))
    seconds, cpu, marks = [], [], []

    def step() -> None:
        engine.backward(engine(tokens, tokens))
        engine.step()

    for _ in range(steps + 2):
        marks.append((engine.io.busy_seconds, engine.io.read_bytes, engine.io.write_bytes))
        taken, used = timed(step)
        seconds.append(taken)
        cpu.append(used)
    (busy, read, write), last = marks[2], marks[-1]
    engine.close()
    count = len(marks) - 3
    return Timing(
        step=statistics.median(seconds[2:]),
        cpu=statistics.median(cpu[2:]),
        disk=(last[0] - busy) / count,
        read=(last[1] - read) / count,
        write=(last[2] - write) / count,
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="one thread each")
    parser.add_argument("--folder", default=".")
    parser.add_argument(
        "--buffers", type=int, default=9, help="buffers of the pool; with more buffers more states are prefetched"
    )
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: use 2 or more, because disk time is measured between steps")
    dim = options.dim
    model = DecoderConfig(
        vocab_size=256,
        dim=dim,
        layers=options.layers,
        heads=dim // 64,
        kv_heads=dim // 64,
        hidden_dim=11 * dim // 4,
        max_seq_len=SEQ_LEN,
    )
    rows = []
    pool = RankPool(options.ranks)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for batch in options.batch:
            rounds: dict[str, list[Timing]] = {"none": [], "nvme": []}
            for _ in range(options.rounds):
                for tier, timings in rounds.items():
                    given = {"tier": tier, "model": model, "batch": batch, "folder": folder}
                    timings.append(pool.run(run, steps=options.steps, buffers=options.buffers, **given)[0])
            compute = statistics.median(t.step for t in rounds["none"])
            step = statistics.median(t.step for t in rounds["nvme"])
            disk = statistics.median(t.disk for t in rounds["nvme"])
            moved = statistics.median((t.read + t.write) / t.disk for t in rounds["nvme"])
            cpu = {tier: statistics.median(t.cpu for t in timings) for tier, timings in rounds.items()}
            ratio = step / max(compute, disk)
            values = (compute, disk, step, ratio, moved / 1e9, cpu["none"], cpu["nvme"])
            rows.append([str(batch), *(f"{value:.3f}" for value in values)])
    pool.close()
    size = f"{model.parameter_count() / 1e6:.0f} M parameters, bf16, {options.ranks} ranks"
    columns = ("batch", "compute", "disk", "nvme step", "step / max", "GB/s read+write", "CPU none", "CPU nvme")
    Console(width=140).print(table(f"seconds per step and rank, {size}", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
