"""Trains one small decoder with every format of AdamW's states on the same tokens, and compares the losses with float32 states.

The tokens are a first-order Markov chain, whose entropy is a lower bound of the loss. Each format runs with several seeds (tokens, first
values, rounding bits). The differences of float32 states between seeds are the noise that a format's difference is compared with.

    python scripts/compare_states.py --steps 400
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process
from ztk.nn import Decoder, DecoderConfig
from ztk.nn.initial import initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize

VOCAB, LENGTH, BATCH = 64, 32, 8
SHAPE = {
    "vocab_size": VOCAB,
    "dim": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "hidden_dim": 64,
    "max_seq_len": LENGTH,
}
LAST = 20  # steps whose losses are averaged


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """states, master: `optimizer.states` and `precision.master`. kept: bytes per parameter without the 16-bit one and its gradient."""

    states: str
    master: str
    kept: float


FORMATS = (
    Format(states="fp32", master="fp32", kept=12),
    Format(states="bf16", master="fp32", kept=8),
    Format(states="bf16", master="stochastic", kept=4),
    Format(states="8bit", master="stochastic", kept=3.125),
)


def chain(seed: int) -> tuple[Tensor, float]:
    """Transition probabilities [VOCAB, VOCAB] of a chain, and its entropy in nats per token."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=draw, dtype=torch.float64), dim=1)
    stationary = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    for _ in range(200):
        stationary = stationary @ rows
    return rows, float(-(stationary[:, None] * rows * rows.log()).sum())


def losses(process: Process, *, kept: Format, seed: int, steps: int) -> list[float]:
    """The loss of every step minus the chain's entropy."""
    rows, entropy = chain(0)
    draw = torch.Generator().manual_seed(1000 + seed)
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**SHAPE))
    engine = parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(
            lr=3e-3, weight_decay=0.1, clip_grad_norm=1.0, states=kept.states, rounding_seed=seed
        ),
        precision=PrecisionPolicy.named("bf16", master=kept.master),
        initial_values=lambda **wanted: initial_values(model, seed=seed, **wanted),
    )
    found = []
    for _ in range(steps):
        tokens = [torch.randint(VOCAB, (BATCH,), generator=draw)]
        for _ in range(LENGTH):
            tokens.append(torch.multinomial(rows[tokens[-1]], 1, generator=draw)[:, 0])
        sequence = torch.stack(tokens, dim=1)
        loss = engine(sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()) - entropy)
    return found


def final(values: list[float]) -> float:
    """The mean of the last steps."""
    return statistics.fmean(values[-LAST:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    process = Process.start()
    table = Table(
        title=f"loss above the entropy after {given.steps} steps, mean of the last {LAST}, {given.seeds} seeds"
    )
    for column in ("optimizer.states", "precision.master", "bytes kept", "loss", "minus fp32, per seed"):
        table.add_column(column, justify="right")
    base: list[float] = []
    for kept in FORMATS:
        ends = [final(losses(process, kept=kept, seed=seed, steps=given.steps)) for seed in range(given.seeds)]
        base = base or ends
        differences = ", ".join(f"{end - first:+.4f}" for end, first in zip(ends, base, strict=True))
        table.add_row(kept.states, kept.master, f"{kept.kept:g}", f"{statistics.fmean(ends):.4f}", differences)
    Console(width=110).print(table)
    print(f"standard deviation of fp32 between seeds: {statistics.stdev(base):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
