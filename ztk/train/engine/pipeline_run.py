"""Runs one batch through a pipeline: this rank's actions of the schedule, in order.

Losses have the output dtype of the last stage.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from ztk.core.runtime import PhaseClock
from ztk.nn import deferred
from ztk.nn.balance import weighing
from ztk.parallel.pipeline import Action, Interval, Kind, Schedule
from ztk.parallel.pipeline.layers import Carry, MicroBatch
from ztk.parallel.pipeline.stages import Stages
from ztk.parallel.pipeline.wire import Incoming, IncomingGradients, TensorKind, Wire, kinds_of, needs_gradient


class Trainer(Protocol):
    """The engine's interface that a training run calls."""

    deferred: deferred.DeferredGradients

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, a scalar, times the loss scale."""

    def backward_of(self, action: Action) -> AbstractContextManager[None]:
        """Encloses the arrival of gradients for the weights of the action's stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """Saved from a forward for the backward of the same stage and micro-batch.

    The output is not kept: its memory is freed after the send.
    """

    inputs: list[Tensor]  # leaf tensors that need gradients
    outputs: list[GradientEdge]
    kinds: list[TensorKind]  # kinds of the outputs

    @staticmethod
    def of(carry: Carry, *, output: Carry) -> "_Graph":
        wanted = _with_gradient(output)
        return _Graph(
            inputs=_with_gradient(carry),
            outputs=[get_gradient_edge(tensor) for tensor in wanted],
            kinds=kinds_of(wanted),
        )


class _LastStage:
    """The model of `MicroBatch.run`: runs the last stage, whose input is the carry. The arguments are the micro-batch's."""

    def __init__(self, module: nn.Module, *, stage: int, carry: Carry, batch: MicroBatch) -> None:
        self.module = module
        self._stage, self._carry, self._batch = stage, carry, batch

    def __call__(self, *args, **kwargs) -> Carry:
        return self.module(self._stage, self._carry, self._batch)


class PipelineRun:
    """Runs `schedule.ranks[rank]` over `batches`.

    trainer: omit it to run without backwards.
    outputs: the last stage's output per micro-batch, on the ranks that have it; weighted losses when training.
    now: the clock for `record`.
    """

    def __init__(
        self,
        *,
        stages: Stages,
        schedule: Schedule,
        rank: int,
        wire: Wire,
        batches: list[MicroBatch | None],
        clock: PhaseClock,
        trainer: Trainer | None,
        record: Callable[[Interval], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.outputs: list[Carry] = [None] * len(batches)
        self._stages, self._schedule, self._rank, self._wire = stages, schedule, rank, wire
        self._batches, self._clock, self._trainer, self._record = batches, clock, trainer, record
        self._router_weights: list[float] = []
        self._now = now
        # Keyed by (stage, micro-batch). Each entry is removed when it is used.
        self._arriving: dict[tuple[int, int], Incoming] = {}
        self._leaving: dict[tuple[int, int], Carry] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._arriving_gradients: dict[tuple[int, int], IncomingGradients] = {}
        self._leaving_gradients: dict[tuple[int, int], list[Tensor]] = {}
        self._deferred: dict[tuple[int, int], list] = {}

    def run(self) -> None:
        """Runs the batch."""
        self._router_weights = self._wire.open(
            self._batches
        )  # taken from the first rank, because others may have no micro-batches
        for action in self._schedule.ranks[self._rank]:
            self._do(action)
        self._wire.finish()

    def _do(self, action: Action) -> None:
        match action.kind:
            case Kind.forward:
                self._forward(action)
            case Kind.backward:
                self._backward(action)
            case Kind.backward_input:
                self._backward_input(action)
            case Kind.backward_weight:
                self._backward_weight(action)
            case Kind.send_activation:
                self._send_activation(action)
            case Kind.receive_activation:
                self._receive_activation(action)
            case Kind.send_gradient:
                self._send_gradient(action)
            case Kind.receive_gradient:
                self._receive_gradient(action)

    # Computing

    def _forward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        carry = self._wait(self._arriving.pop(key)) if action.stage else None
        batch = self._batches[action.micro_batch]
        with self._computing(action, phase="forward"):
            if action.stage + 1 < self._stages.num_stages:
                output = self._leaving[key] = self._stages.module(action.stage, carry, batch)
            else:
                assert batch is not None, "the last stage computes the loss from its arguments"
                output = batch.run(_LastStage(self._stages.module, stage=action.stage, carry=carry, batch=batch))
                output = self._finish(output, batch=batch, micro_batch=action.micro_batch)
            if self._trainer is not None:
                self._graphs[key] = _Graph.of(carry, output=output)

    def _finish(self, output: Carry, *, batch: MicroBatch, micro_batch: int) -> Carry:
        """Stores the last stage's output. Returns the scaled loss when training."""
        if self._trainer is None:
            self.outputs[micro_batch] = output
            return output
        loss = batch.weigh(output)
        self.outputs[micro_batch] = loss.detach()
        return self._trainer.scale(loss)

    def _backward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        gradients = self._wait(self._arriving_gradients.pop(key)) if key in self._arriving_gradients else None
        graph = self._graphs.pop(key)
        assert self._trainer is not None
        with self._computing(action, phase="backward"), self._trainer.backward_of(action):
            if graph.outputs:
                torch.autograd.backward(graph.outputs, gradients)
        self._leaving_gradients[key] = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in graph.inputs
        ]

    def _backward_input(self, action: Action) -> None:
        assert self._trainer is not None
        collector = self._trainer.deferred
        collector.collecting = self._deferred[action.stage, action.micro_batch] = []
        try:
            self._backward(action)
        finally:
            collector.collecting = None

    def _backward_weight(self, action: Action) -> None:
        assert self._trainer is not None
        with self._computing(action, phase="backward"), self._trainer.backward_of(action):
            deferred.finish(self._deferred.pop((action.stage, action.micro_batch)))

    @contextmanager
    def _computing(self, action: Action, *, phase: str) -> Iterator[None]:
        start = self._now()
        weight = self._router_weights[action.micro_batch]
        with self._clock.phase(phase), weighing(self._stages.module, weight=weight):
            yield
        if self._record is not None:
            self._record(Interval(rank=self._rank, action=action, start=start, stop=self._now()))

    def _wait(self, arriving: Incoming | IncomingGradients):
        with self._clock.phase("bubble"):
            return arriving.wait()

    # Transfers

    def _send_activation(self, action: Action) -> None:
        self._wire.send_activation(
            self._leaving.pop((action.stage, action.micro_batch)),
            stage=action.stage,
            to=self._schedule.rank_of(action.stage + 1),
            micro_batch=action.micro_batch,
        )

    def _receive_activation(self, action: Action) -> None:
        self._arriving[action.stage, action.micro_batch] = self._wire.receive_activation(
            stage=action.stage, source=self._schedule.rank_of(action.stage - 1), micro_batch=action.micro_batch
        )

    def _send_gradient(self, action: Action) -> None:
        self._wire.send_gradients(
            self._leaving_gradients.pop((action.stage, action.micro_batch)),
            stage=action.stage,
            to=self._schedule.rank_of(action.stage - 1),
            micro_batch=action.micro_batch,
        )

    def _receive_gradient(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        self._arriving_gradients[key] = self._wire.receive_gradients(
            self._graphs[key].kinds,
            stage=action.stage,
            source=self._schedule.rank_of(action.stage + 1),
            micro_batch=action.micro_batch,
        )


def _with_gradient(carry: Carry) -> list[Tensor]:
    """Returns the tensors in `carry` that need gradients, in order."""
    return [leaf for leaf in pytree.tree_leaves(carry) if isinstance(leaf, Tensor) and needs_gradient(leaf)]
