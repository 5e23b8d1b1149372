"""Whole-batch calls on top of an engine's forward, backward and step. Losses have the model's output dtype."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from ztk.nn.balance import weighing
from ztk.parallel.pipeline.layers import MicroBatch


def take(micro_batches: Iterable, *, count: int) -> list[MicroBatch]:
    """Returns the next `count` micro-batches. Raises ValueError if there are fewer."""
    taken = [MicroBatch.of(batch) for batch in islice(micro_batches, count)]
    if len(taken) < count:
        raise ValueError(
            f"train_batch got {len(taken)} micro-batches and needs {count}, the accumulation steps that the engine was built with"
        )
    return taken


def train_batch(engine, *, micro_batches: Iterable, before_step: Callable[[], None] | None = None) -> Tensor:
    """Runs one optimizer step of `engine`. Returns this replica's mean loss over the micro-batches, a scalar on the device.

    before_step: called between the last backward and the optimizer's step.
    """
    losses: list[Tensor] = []
    for batch in take(micro_batches, count=engine.accumulation_steps):
        with weighing(
            engine.module, weight=batch.router_weight
        ):  # includes the backward, which may recompute the forward
            loss = batch.weigh(batch.run(engine))
            engine.backward(loss)
        losses.append(loss.detach())
        if before_step is not None and len(losses) == engine.accumulation_steps:
            before_step()
        engine.step()
    return torch.stack(losses).mean()


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Disables gradients and sets eval mode. On exit every submodule returns to its previous mode."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in training.items():
            part.training = mode


def eval_batch(engine, *, micro_batches: Iterable) -> Tensor:
    """Returns this replica's mean loss over `micro_batches`, without gradients and in eval mode; a scalar on the device."""
    with engine.evaluating():
        return torch.stack(list(_losses(engine, micro_batches=micro_batches))).mean()


def eval_losses(engine, *, micro_batches: Iterable) -> Tensor:
    """Returns the loss of each of `micro_batches`, [n] on the device, as `eval_batch` computes it.

    All micro-batches share one gather of the parameters.
    """
    with engine.evaluating(), engine.zero.gathering.keep_unsharded():
        return torch.stack(list(_losses(engine, micro_batches=micro_batches)))


def _losses(engine, *, micro_batches: Iterable) -> Iterator[Tensor]:
    for batch in map(MicroBatch.of, micro_batches):
        yield batch.weigh(batch.run(engine))
