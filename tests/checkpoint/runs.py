"""Rank functions of the checkpoint tests."""

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.zero.models import Layout, batches, build, make_engine
from ztk.checkpoint import Saver, load, save
from ztk.core.runtime import Process
from ztk.optim import OptimizerPolicy
from ztk.train.engine import Engine

OPTIMIZERS = {
    "adamw": OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5),
    "bf16": OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5, states="bf16"),
    "8bit": OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5, states="8bit"),
    "sgd": OptimizerPolicy(name="sgd", lr=1e-2, momentum=0.9, weight_decay=0.0, clip_grad_norm=0.5),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A layout and everything else an engine is built from."""

    layout: Layout = field(default_factory=Layout)
    dtype: str = "fp32"
    optimizer: str = "adamw"
    master: str | None = None
    seed: int = 0
    frozen: tuple[str, ...] = ()
    accumulation_steps: int = 1

    def engine(self, process: Process) -> Engine:
        model = build(self.seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return make_engine(
            process,
            layout=self.layout,
            dtype=self.dtype,
            model=model,
            optimizer=OPTIMIZERS[self.optimizer],
            master=self.master,
            accumulation_steps=self.accumulation_steps,
        )


def train_steps(engine: Engine, *, start: int, stop: int) -> list[float]:
    """Losses of steps [start, stop), a function of the step's number and the engine's state; draws random numbers too."""
    process, losses = engine.process, []
    for step in range(start, stop):
        noise = float(torch.rand(())) + random.random()  # dropout's place: the generators' states matter
        for part in range(engine.accumulation_steps):
            number = step * engine.accumulation_steps + part
            tokens = list(batches(number + 1, rank=process.rank, world=process.world_size))[-1]
            loss = engine(tokens, use_all=step % 3 != 1) * (1 + 0.01 * noise)
            engine.backward(loss)
            engine.step()
        losses.append(float(process.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
    return losses


def canonical(engine: Engine) -> dict[tuple[str, str], Tensor]:
    """All states of the model by kind and name, complete, on every rank."""
    own = [
        (shard.kind, shard.name, shard.part, shard.start, shard.value.clone().cpu())
        for shard in engine.zero.state.shards()
    ]
    full: dict[tuple[str, str], Tensor] = {}
    for shards in engine.comm.gather_objects(own):
        for kind, name, part, start, value in shards:
            values = full.setdefault((kind, name), torch.full((_numel(part.full_shape),), torch.nan))
            values[part.positions(start, stop=start + value.numel())] = value.to(values.dtype)
    assert not any(value.isnan().any() for value in full.values())
    return full


def digest(states: dict[tuple[str, str], Tensor]) -> str:
    """A hash over names and bits."""
    total = hashlib.sha256()
    for key in sorted(states):
        total.update(repr(key).encode() + states[key].numpy().tobytes())
    return total.hexdigest()


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def full_weights(engine: Engine) -> str:
    """A hash of the parameters in the model's compute dtype."""
    return digest({("parameter", name): value.float().clone() for name, value in engine.zero.full_parameters()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Bits at the end of a run."""

    losses: list[float]
    states: str
    weights: str
    control: list[float]
    files: dict[str, int] = field(default_factory=dict)


def outcome(engine: Engine, *, losses: list[float]) -> Outcome:
    return Outcome(
        losses=losses,
        states=digest(canonical(engine)),
        weights=full_weights(engine),
        control=engine.control.state.nan_to_num(-1).tolist(),
    )


def seed_all(process: Process, *, seed: int) -> None:
    torch.manual_seed(seed + process.rank)
    random.seed(seed + process.rank)


def train_and_save(process: Process, *, setup: Setup, folder: str, save_at: int, stop: int) -> Outcome:
    """An uninterrupted run that saves once. Losses are those after the save."""
    seed_all(process, seed=5)
    engine = setup.engine(process)
    train_steps(engine, start=0, stop=save_at)
    save(engine, folder=folder, data_state={"position": save_at}, extra={"note": "x"})
    return outcome(engine, losses=train_steps(engine, start=save_at, stop=stop))


def resume(process: Process, *, setup: Setup, folder: str, stop: int) -> Outcome:
    """A new engine with different values continues from the folder's latest checkpoint."""
    seed_all(process, seed=99)
    engine = setup.engine(process)
    report = load(engine, path=folder)
    assert report.data_state == {"position": report.step} and report.extra == {"note": "x"}
    assert engine.global_steps == report.step
    return outcome(engine, losses=train_steps(engine, start=report.step, stop=stop))


def reload(process: Process, *, setup: Setup, folder: str, to: str | None = None) -> Outcome:
    """Loads and returns the report; saves again under this setup if `to` is given."""
    engine = setup.engine(process)
    load(engine, path=folder)
    if to is not None:
        save(engine, folder=to)
    return outcome(engine, losses=[])


def save_some(
    process: Process, *, setup: Setup, folder: str, steps: list[int], asynchronous: bool = False, **options
) -> list:
    """Trains and saves after each of `steps`; returns the names in the folder at the end."""
    seed_all(process, seed=5)
    engine = setup.engine(process)
    with Saver(engine, folder=folder, asynchronous=asynchronous, **options) as saver:
        for start, stop in zip([0, *steps], steps, strict=False):
            train_steps(engine, start=start, stop=stop)
            saver.save(data_state={"position": stop})
    return sorted(path.name for path in Path(folder).iterdir())


def try_load(process: Process, *, setup: Setup, path: str, **options) -> str:
    """Loads a checkpoint. Returns the text of the error, or ""."""
    engine = setup.engine(process)
    try:
        load(engine, path=path, **options)
    except ValueError as error:
        return str(error)
    return ""
