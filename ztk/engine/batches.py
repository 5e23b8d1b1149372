"""A batch in one call, for engines whose caller may also write the loop: forward, backward, step.

A loss has the dtype that the model computes it in.
"""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from ztk.nn.balance import weighing
from ztk.pipeline.layers import MicroBatch


def take(micro_batches: Iterable, *, count: int) -> list[MicroBatch]:
    """The next `count` micro-batches. Raises ValueError if there are fewer."""
    taken = [MicroBatch.of(batch) for batch in islice(micro_batches, count)]
    if len(taken) < count:
        raise ValueError(
            f"train_batch got {len(taken)} micro-batches and needs {count}, the accumulation steps that the engine was built with"
        )
    return taken


def train_batch(engine, *, micro_batches: Iterable) -> Tensor:
    """One optimizer step of `engine`; returns this replica's mean loss over its micro-batches, a scalar on the device."""
    losses = []
    for batch in take(micro_batches, count=engine.accumulation_steps):
        with weighing(engine.module, weight=batch.weight):  # the backward too, which may recompute
            loss = batch.weigh(engine(*batch.args, **batch.kwargs))
            engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def eval_batch(engine, *, micro_batches: Iterable) -> Tensor:
    """This replica's mean loss over `micro_batches`, without gradients and in eval mode; a scalar on the device."""
    with engine.evaluating():
        batches = map(MicroBatch.of, micro_batches)
        return torch.stack([batch.weigh(engine(*batch.args, **batch.kwargs)) for batch in batches]).mean()
