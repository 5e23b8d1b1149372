"""AdamW with smaller states learns as with fp32 states: one small decoder per format on the same tokens.

The tokens are a first-order Markov chain, whose entropy is a lower bound of the loss. Each format runs with several seeds (tokens, first
values, rounding bits). A format may differ from fp32 states by a tenth of what seeds of fp32 alone differ by (standard deviation).
"""

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

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
STEPS, SEEDS = 500, 3
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


def test_smaller_states_learn_as_fp32(ranks, show):
    ends = {
        kept: [final(ranks(1).run(losses, kept=kept, seed=seed, steps=STEPS)[0]) for seed in range(SEEDS)]
        for kept in FORMATS
    }
    base = ends[FORMATS[0]]
    deviation = statistics.stdev(base)
    show(f"loss above the entropy with fp32 states {statistics.fmean(base):.4f}, deviation of seeds {deviation:.4f}")
    for kept in FORMATS[1:]:
        differences = [end - first for end, first in zip(ends[kept], base, strict=True)]
        shown = ", ".join(f"{difference:+.4f}" for difference in differences)
        show(f"states={kept.states}, master={kept.master}, {kept.kept:g} bytes kept: minus fp32, per seed {shown}")
        assert max(map(abs, differences)) < deviation / 10, kept
