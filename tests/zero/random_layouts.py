"""Random models and memory strategies: the bits must equal the same model at stage 0.

python -m tests.zero.random_layouts --seconds 600 [--seed 0] [--ranks 4]      draws until the time is over, prints failures
"""

import argparse
import hashlib
import random
import tempfile
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import RankFailed, RankPool
from tests.zero.models import Layout, make_engine
from ztk.checkpoint import load, save
from ztk.core.runtime import Process
from ztk.optim import OptimizerPolicy
from ztk.parallel.recompute import RecomputePolicy
from ztk.train.engine.engine import Engine

WORDS = 32
KINDS = ("plain", "no bias", "scale", "nested", "sometimes")
DISTURBANCES = ("", "a backward that raises", "a forward without backward", "an evaluation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A model and how it is trained.

    blocks: hidden size and kind of each. shared: the first block comes again at the end. frozen: of blocks, -1 is the embedding.
    outside: a weight is used outside of its module's forward.
    """

    width: int
    blocks: tuple[tuple[int, str], ...]
    enters: bool
    shared: bool
    tied: bool
    frozen: tuple[int, ...]
    outside: bool
    dtype: str
    optimizer: str
    clip: float
    fast_linear: bool
    bucket_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Settings that must not change a bit."""

    layout: Layout = field(default_factory=Layout)
    recompute: dict = field(default_factory=dict)


class Block(nn.Module):
    def __init__(self, width: int, *, hidden: int, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = nn.LayerNorm(width), kind
        self.up, self.down = nn.Linear(width, hidden, bias=kind != "no bias"), nn.Linear(hidden, width)
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2 if kind == "nested" else 0))
        self.scale = nn.Parameter(torch.ones(width)) if kind == "scale" else 1.0
        self.more = nn.Linear(width, width) if kind == "sometimes" else None

    def forward(self, x: Tensor, *, number: int) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)))
        for layer in self.inner:
            y = y + torch.sin(layer(y))
        y = self.down(y) * self.scale
        if self.more is not None and number % 2:
            y = y + self.more(x)
        return x + y


class Model(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, drawn.width)
        self.enter = nn.Linear(drawn.width, drawn.width) if drawn.enters else nn.Identity()
        self.blocks = nn.ModuleList(Block(drawn.width, hidden=hidden, kind=kind) for hidden, kind in drawn.blocks)
        if drawn.shared:
            self.blocks.append(self.blocks[0])
        self.norm, self.head = nn.LayerNorm(drawn.width), nn.Linear(drawn.width, WORDS, bias=False)
        if drawn.tied:
            self.head.weight = self.embedding.weight
        for number in drawn.frozen:
            (self.embedding if number < 0 else self.blocks[number]).requires_grad_(False)
        self.outside = drawn.outside

    def forward(self, tokens: Tensor, *, number: int) -> Tensor:
        x = self.enter(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, number=number)
        logits = self.head(self.norm(x))
        if self.outside:
            logits = logits + 1e-3 * x.mean() * self.blocks[0].down.weight.sum()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def draw(chance: random.Random) -> Drawn:
    blocks = tuple((chance.choice((8, 24, 40)), chance.choice(KINDS)) for _ in range(chance.randint(1, 4)))
    return Drawn(
        width=chance.choice((8, 12, 16)),
        blocks=blocks,
        enters=chance.random() < 0.5,
        shared=chance.random() < 0.2,
        tied=chance.random() < 0.4,
        frozen=(chance.randrange(-1, len(blocks)),) if chance.random() < 0.3 else (),
        outside=chance.random() < 0.25,
        dtype=chance.choice(("fp32", "bf16", "fp16")),
        optimizer=chance.choice(("adamw", "adam", "sgd", "lion")),
        clip=chance.choice((0.0, 0.5)),
        fast_linear=chance.random() < 0.5,
        bucket_size=chance.choice((300, 2000, 500_000)),
    )


def draw_strategy(chance: random.Random, *, drawn: Drawn) -> Strategy:
    stage, tiers = chance.choice((1, 2, 3, 3, 3)), ("none", "cpu", "nvme")
    zero = {"bucket_size": drawn.bucket_size}
    if stage == 3:
        zero |= {
            "prefetch_bucket_size": chance.choice((0, 300, 1000, 50_000)),
            "max_live_parameters": chance.choice((0, 1000, 10**9)),
            "max_reuse_distance": chance.choice((0, 500)),
        }
        if not drawn.clip:  # another layout sums the norm in another order
            zero["param_persistence_threshold"] = chance.choice((0, 20, 600))
    return Strategy(
        layout=Layout(stage=stage, offload=chance.choice(tiers), parameters=chance.choice(tiers), zero=zero),
        recompute=chance.choice(
            ({}, {"mode": "full"}, {"mode": "full", "inputs_on_cpu": True}, {"mode": "selective"})
            + ({"mode": "selective", "every": 2},)
        ),
    )


def train(
    process: Process, *, drawn: Drawn, strategies: tuple[Strategy, ...], disturbance: str = "", steps: int = 3
) -> tuple[list[float], str]:
    """Losses and the digest of the weights after `steps` steps under each strategy, with a checkpoint between two."""
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as own:
        folder = process.comm.gather_objects(own)[0]
        for turn, strategy in enumerate(strategies):
            torch.manual_seed(0)
            engine = make_engine(
                process,
                layout=strategy.layout,
                dtype=drawn.dtype,
                model=Model(drawn),
                optimizer=OptimizerPolicy(name=drawn.optimizer, lr=1e-2, clip_grad_norm=drawn.clip),
                recompute=RecomputePolicy(**strategy.recompute),
                fast_linear=drawn.fast_linear,
            )
            if turn:
                load(engine, path=folder)
            for number in range(turn * steps, (turn + 1) * steps):
                tokens = torch.randint(
                    WORDS, (3, 7), generator=torch.Generator().manual_seed(100 * number + process.rank)
                )
                _disturb(engine, tokens=tokens, number=number, how=disturbance)
                loss = engine(tokens, number=number)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            if turn + 1 < len(strategies):
                save(engine, folder=folder)
            digest = hashlib.sha256()
            full = {name: value.float().numpy().tobytes() for name, value in engine.zero.full_parameters()}
            for name in sorted(full):  # buckets, and so their order, may differ
                digest.update(full[name])
            engine.close()
        process.comm.barrier()  # before the folder goes
    return losses, digest.hexdigest()


def _disturb(engine: Engine, *, tokens: Tensor, number: int, how: str) -> None:
    """Runs a disturbance that must leave no trace."""
    if how == "an evaluation":
        with engine.evaluating(), torch.no_grad():
            engine(tokens.flip(0), number=number + 1)
    elif how == "a forward without backward":
        engine(tokens, number=number)
    elif how == "a backward that raises":
        loss = engine(tokens, number=number)
        loss.register_hook(lambda gradient: {}["no such key"])
        try:
            engine.backward(loss)
        except KeyError:
            engine.discard_gradients()


def failures(seed: int, *, pool: RankPool, draws: int = 3) -> list[str]:
    """Differences from stage 0, for one model and `draws` pairs of strategies and a disturbance."""
    chance = random.Random(seed)
    drawn = draw(chance)
    plain = Strategy(layout=Layout(zero={"bucket_size": drawn.bucket_size}))
    expected = pool.run(train, drawn=drawn, strategies=(plain, plain))[0]
    found = []
    for _ in range(draws):
        strategies = tuple(draw_strategy(chance, drawn=drawn) for _ in range(2))
        disturbance = chance.choice(DISTURBANCES)
        try:
            result = pool.run(train, drawn=drawn, strategies=strategies, disturbance=disturbance)[0]
        except RankFailed as error:
            result = str(error).strip().splitlines()[-1]
        if result != expected:
            found.append(f"seed {seed}: {drawn} {strategies} {disturbance!r}: {result}, expected {expected}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    pool, seed, end = RankPool(options.ranks), options.seed, time.monotonic() + options.seconds
    while time.monotonic() < end:
        for failure in failures(seed, pool=pool):
            print(failure, flush=True)
        seed += 1
    pool.close()
    print(f"seeds {options.seed} to {seed - 1} tried")


if __name__ == "__main__":
    main()
