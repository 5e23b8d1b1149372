"""Families of transformers in every strategy: the run of a cell, and its bounds. `tests/slow/test_families.py` runs all."""

from dataclasses import dataclass
from pathlib import Path

from tests.hf.test_causal import RELATIVE, Strategy, plain, saved, train
from tests.hf.test_lora import LORA, by_peft
from tests.hf.test_lora import train as train_adapters
from tests.parallel.topology.families import make
from tests.ranks import RankPool
from ztk.config import ConfigError, Machine, compose
from ztk.core.runtime import Topology

RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A strategy as the user's words and as the engine's policies."""

    overrides: tuple[str, ...]
    strategy: Strategy
    has_adapters: bool = False


COLUMNS = {
    "stage 3": Column(overrides=("zero=stage3",), strategy=Strategy(stage=3)),
    "tp2": Column(overrides=("topology=tp2",), strategy=Strategy(topology=Topology(tensor=2))),
    "pp2": Column(overrides=("topology=pp2",), strategy=Strategy(topology=Topology(pipeline=2))),
    "sp2": Column(overrides=("topology=sp2",), strategy=Strategy(topology=Topology(sequence=2))),
    "cp2": Column(overrides=("topology=cp2",), strategy=Strategy(topology=Topology(context=2))),
    "ep2": Column(overrides=("topology=ep2",), strategy=Strategy(topology=Topology(expert=2))),
    "kernels": Column(overrides=("model.kernels=true",), strategy=Strategy(stage=1, kernels=True)),
    "LoRA": Column(overrides=("lora=adapter",), strategy=Strategy(stage=1), has_adapters=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """deviation: the largest relative difference of a step's loss from plain transformers, or with adapters peft, and torch's AdamW on
    one rank. refusal: the configuration's error before ranks start; then there is no deviation."""

    deviation: float | None = None
    refusal: str = ""

    @property
    def holds(self) -> bool:
        """Whether it agrees, or its refusal names a fix."""
        if self.deviation is None:
            return "use " in self.refusal
        return self.deviation <= RELATIVE


def run_cell(pool: RankPool, *, family: str, column: str, folder: Path) -> Result:
    """Runs one cell on the two ranks of `pool`. folder: for the model and checkpoints. Raises the error of a run that is refused too late."""
    choice, model = COLUMNS[column], saved(folder, family=family)
    words = ("data=synthetic", "data.seq_len=12", f"model.path={model}", *choice.overrides)
    try:
        compose("model=hf", *words, output_dir=folder / "run", machine=Machine(gpus=0, cores=2))
    except ConfigError as error:
        return Result(refusal=str(error))
    if choice.has_adapters:
        expected = by_peft(family=family, folder=model, lora=LORA)
        where = {"folder": model, "strategy": choice.strategy, "lora": LORA, "to": str(folder / "saves")}
        found = [losses for losses, *_ in pool.run(train_adapters, **where)]
    else:
        expected = plain(make(family))
        found = pool.run(train, folder=model, strategy=choice.strategy)
        if (
            choice.strategy.topology.sequence_ranks > 1
        ):  # each rank has its share of the loss: their mean is the sequences' loss
            found = [[sum(shares) / len(shares) for shares in zip(*found, strict=True)]]
    return Result(
        deviation=max(abs(a / b - 1) for losses in found for a, b in zip(losses, expected, strict=True)),
    )
