"""Whole-batch calls on top of an engine's forward, backward and step. Losses have the model's output dtype."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ztk.nn.balance import weighing
from ztk.parallel.pipeline.layers import MicroBatch


def take(micro_batches: Iterable[Any], *, count: int) -> list[MicroBatch]:
    """Returns the next `count` micro-batches. Raises ValueError if there are fewer."""
    taken = [MicroBatch.of(batch) for batch in islice(micro_batches, count)]
    if len(taken) < count:
        raise ValueError(
            f"train_batch got {len(taken)} micro-batches and needs {count}, the accumulation steps that the engine was built with"
        )
    return taken


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


def check_loss(loss: object) -> None:
    """Raises ValueError for a loss from which no backward can start, with the way to one."""
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"the loss is no tensor but a {type(loss).__name__}: return the tensor itself, without .item()"
        )
    if loss.numel() != 1:
        raise ValueError(f"the loss has the shape {list(loss.shape)}: return a scalar, such as loss.mean()")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: no trained parameter takes part in it, or the way to it has torch.no_grad(), .detach(), .item() or "
            "a new torch.tensor(...); compute it from the model's outputs by torch's operations alone"
        )


class BatchEngine:
    """Whole-batch calls on top of an engine's forward (`__call__`), `backward` and `step`, which a subclass defines."""

    module: nn.Module
    accumulation_steps: int
    backward: Callable
    step: Callable
    needs_closure = False
    _synchronise = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients locally instead of reducing them. At stages 2 and 3 this needs memory for full gradients."""
        self._synchronise, before = False, self._synchronise
        try:
            yield
        finally:
            self._synchronise = before

    def evaluating(self) -> AbstractContextManager[None]:
        """Disables gradients and sets eval mode. On exit every submodule returns to its previous mode."""
        return in_eval_mode(self.module)

    def train_batch(self, micro_batches: Iterable[Any], *, before_step: Callable[[], None] | None = None) -> Tensor:
        """Runs one optimizer step over the next `accumulation_steps` micro-batches.

        Returns this replica's mean loss, a scalar on the device.

        A micro-batch is a tuple of the module's arguments, a dict of keyword arguments, or a `MicroBatch`. The module must return its
        loss.

        before_step: called between the last backward and the optimizer's step.
        """
        losses: list[Tensor] = []
        batches = take(micro_batches, count=self.accumulation_steps)
        given = {"closure": lambda: torch.stack([self._backward_of(batch) for batch in batches]).mean()}
        for batch in batches:
            losses.append(self._backward_of(batch))
            if before_step is not None and len(losses) == self.accumulation_steps:
                before_step()
            self.step(**(given if self.needs_closure else {}))
        return torch.stack(losses).mean()

    def _backward_of(self, batch: MicroBatch) -> Tensor:
        """Runs forward and backward of a micro-batch. Returns its loss."""
        with weighing(
            self.module, weight=batch.router_weight
        ):  # includes the backward, which may recompute the forward
            loss = batch.weigh(batch.run(self))
            self.backward(loss)
        return loss.detach()

    def eval_batch(self, micro_batches: Iterable[Any]) -> Tensor:
        """Returns this replica's mean loss over `micro_batches`, without gradients and in eval mode; a scalar on the device."""
        with self.evaluating():
            return self._losses(micro_batches).mean()

    def _losses(self, micro_batches: Iterable[Any]) -> Tensor:
        """The loss of each of `micro_batches`: [n] on the device."""
        return torch.stack([batch.weigh(batch.run(self)) for batch in map(MicroBatch.of, micro_batches)])
