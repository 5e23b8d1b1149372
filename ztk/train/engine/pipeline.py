"""The engine for pipeline parallelism. Every rank runs its part of the schedule, one whole batch per call.

Losses have the output dtype of the last stage.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from ztk.core.policies.pipeline import PipelinePolicy
from ztk.nn import deferred
from ztk.nn.balance import weighing
from ztk.nn.deferred import DeferredGradients
from ztk.parallel.pipeline import Action, Interval, Kind, Schedule, Timeline, make_inference_schedule, make_schedule
from ztk.parallel.pipeline.layers import Carry, MicroBatch
from ztk.parallel.pipeline.stages import Stages
from ztk.parallel.pipeline.wire import Incoming, TensorKind, Wire, kinds_of, needs_gradient
from ztk.train.engine.batches import check_loss, take
from ztk.train.engine.engine import Engine
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.reduction import Backward


class PipelineEngine(Engine):
    """Trains with `train_batch` only: forwards and backwards of micro-batches interleave, so the caller cannot write the loop.

    record_timeline: set it to True to fill `timeline` with this rank's actions and their times, in seconds of the clock `now`.

    [Note: ZeRO inside a stage] ZeRO treats every stage as a separate model, sharded over the ranks that hold the stage. At stage 3,
    parameters stay gathered for all micro-batches of the batch, up to `zero.max_live_parameters`. Gradients accumulate locally and are
    reduced once, during a stage's last backward. At stages 2 and 3 they are reduced after every micro-batch if they exceed
    `max_local_gradients`.
    """

    def __init__(self, *args, stages: Stages, policy: PipelinePolicy, deferred: DeferredGradients, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.stages, self.policy, self.deferred = stages, policy, deferred
        self.record_timeline = False
        self.now = time.perf_counter
        self.timeline: Timeline | None = None
        self._pipeline = self.process.mesh.comm("pp")
        self._wire = Wire(self._pipeline, dynamic_shapes=policy.dynamic_shapes)
        self.set_accumulation(self.accumulation_steps)
        self._buckets_of = self._buckets_by_stage()
        self._adds_locally = self._gradients_fit()

    def set_accumulation(self, steps: int) -> None:
        """Does the same as `Engine.set_accumulation`. Call it with the same value on every rank."""
        schedule = make_schedule(
            self.policy.schedule,
            num_ranks=self._pipeline.size,
            num_micro_batches=steps,
            virtual_stages=self.policy.virtual_stages,
        )
        super().set_accumulation(steps)
        self.schedule = schedule
        self._completing = Kind.backward_weight if schedule.is_split else Kind.backward
        own = [action for action in schedule.computes(self._pipeline.rank) if action.kind is self._completing]
        self._last_of = {
            action.stage: action for action in own
        }  # the action after which a stage's gradients are complete

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank reads the inputs."""
        return self._pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.process.mesh.is_last_stage

    def train_batch(self, micro_batches: Iterable[Any], *, before_step: Callable[[], None] | None = None) -> Tensor:
        """Runs one optimizer step. Returns this replica's mean loss, a scalar on the device, on every rank of the pipeline.

        micro_batches: the first `accumulation_steps` of them are used: tuples of arguments, dicts of keyword arguments, or `MicroBatch`.
        Ranks that hold neither the first nor the last stage may pass Nones.

        After an error the engine is unusable, because the ranks are at different positions of the schedule.
        """
        batches = take(micro_batches, count=self.accumulation_steps)
        losses = self._run(batches, schedule=self.schedule, trains=True)
        self.micro_steps += len(batches) - 1
        if before_step is not None:
            before_step()
        self.step()
        return self.share(torch.stack(losses).float().mean() if self.is_last_stage else None)

    def eval_batch(self, micro_batches: Iterable[Any]) -> Tensor:
        """Returns this replica's mean loss over `micro_batches`, without gradients and in eval mode; a scalar on every rank of the
        pipeline.
        """
        losses = self._eval_losses(micro_batches)
        return self.share(None if losses is None else torch.stack(losses).float().mean())

    def eval_losses(self, micro_batches: Iterable[Any]) -> Tensor:
        """Returns the same as `Engine.eval_losses` on the last stage. All other stages return zeros."""
        batches = list(micro_batches)
        losses = self._eval_losses(batches)
        return torch.zeros(len(batches), device=self.process.device) if losses is None else torch.stack(losses)

    def _eval_losses(self, micro_batches: Iterable[Any]) -> list[Tensor] | None:
        batches = [MicroBatch.of(batch) for batch in micro_batches]
        with self.evaluating():
            outputs = self.forward_batches(batches)
        if not self.is_last_stage:
            return None
        return [batch.weigh(out) for batch, out in zip(batches, outputs, strict=True)]

    def __call__(self, *args, **kwargs) -> Carry:
        """Returns the model's output for one micro-batch on every rank of the pipeline.

        Without gradients: for inspection, not for training.
        """
        return self.compute([MicroBatch(args=args, kwargs=kwargs)])[0]

    def compute(self, micro_batches: Iterable[Any]) -> list[Carry]:
        """Returns the same as `Engine.compute`. The last stage's results are sent to all ranks of the pipeline."""
        with torch.no_grad():
            outputs = self.forward_batches([MicroBatch.of(batch) for batch in micro_batches])
            return self._wire.spread(outputs, source=self._pipeline.size - 1)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Always raises RuntimeError: a pipeline has no backward of a single loss, scalar or not."""
        raise RuntimeError(
            "a pipeline trains by engine.train_batch(micro_batches): it has no backward of a single loss"
        )

    # Runs

    def forward_batches(self, batches: list[MicroBatch]) -> list[Carry]:
        """Runs forwards only. Returns the outputs per micro-batch on the last stage and Nones elsewhere. Collective along the
        pipeline.
        """
        schedule = make_inference_schedule(
            num_ranks=self._pipeline.size,
            num_micro_batches=len(batches),
            virtual_stages=self.policy.virtual_stages,
        )
        return self._run(batches, schedule=schedule, trains=False)

    def _run(self, batches: list[MicroBatch], *, schedule: Schedule, trains: bool) -> list[Carry]:
        """Returns the last stage's outputs, or Nones on ranks that do not have them."""
        run = PipelineRun(self, schedule=schedule, wire=self._wire, batches=batches, trains=trains)
        with self.zero.gathering.keep_unsharded():
            run.run()
        if self.record_timeline:
            self.timeline = Timeline(intervals=tuple(run.intervals))
        return run.outputs

    def share(self, value: Tensor | None) -> Tensor:
        """Returns the last stage's scalar on every rank of the pipeline."""
        own = torch.zeros(1, device=self.process.device) if value is None else value.view(1)
        return self._pipeline.gather_scalars(own, label="loss")[-1, 0]

    # Called by `PipelineRun`

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, a scalar, times the loss scale."""
        return loss.float() * self.control.loss_scale if self._scales_loss else loss

    @contextmanager
    def backward_of(self, action: Action) -> Iterator[None]:
        """Reduces gradients that arrive inside as soon as they are complete. See [Note: ZeRO inside a stage]."""
        reduction = self.zero.reduction
        is_last = action == self._last_of[action.stage]
        reduces = is_last or (not self._adds_locally and action.kind is self._completing)
        reduction.begin(Backward(reduces=reduces, is_last=is_last, scope=self._buckets_of[action.stage]))
        yield
        reduction.finish()

    def _buckets_by_stage(self) -> dict[int, set[Bucket]]:
        """Assigns each bucket to the first of this rank's stages that uses it, because that stage's backward comes last."""
        found: dict[int, set[Bucket]] = {stage: set() for stage in self.stages.own}
        for bucket in self.zero.buckets:
            names = [placement.name for placement in bucket.layout.placements]
            stage = min(self.stages.stage_of.get(name, self.stages.own[0]) for name in names)
            found[stage].add(bucket)
        return found

    def _gradients_fit(self) -> bool:
        """Whether the rank's full gradients may stay until the step. At stages 0 and 1 they always do."""
        if not self.zero.policy.shards_gradients:
            return True
        elements = sum(bucket.size for bucket in self.zero.buckets if bucket.traits.trainable)
        return elements <= self.policy.max_local_gradients


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
    """Runs this rank's actions of `schedule` over `batches`, without backwards unless it `trains`.

    outputs: the last stage's output per micro-batch, on the ranks that have it; weighted losses when training.
    intervals: the actions and their times on the engine's clock.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        *,
        schedule: Schedule,
        wire: Wire,
        batches: list[MicroBatch | None],
        trains: bool,
    ) -> None:
        self.outputs: list[Carry] = [None] * len(batches)
        self.intervals: list[Interval] = []
        self._engine, self._schedule, self._wire, self._batches = engine, schedule, wire, batches
        self._trains, self._rank, self._stages = trains, engine.process.mesh.comm("pp").rank, engine.stages
        self._router_weights: list[float] = []
        # Keyed by (stage, micro-batch). Each entry is removed when it is used.
        self._arriving: dict[tuple[int, int], Incoming] = {}
        self._leaving: dict[tuple[int, int], Carry] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._arriving_gradients: dict[tuple[int, int], Incoming] = {}
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
            if self._trains:
                self._graphs[key] = _Graph.of(carry, output=output)

    def _finish(self, output: Carry, *, batch: MicroBatch, micro_batch: int) -> Carry:
        """Stores the last stage's output. Returns the scaled loss when training."""
        if not self._trains:
            self.outputs[micro_batch] = output
            return output
        loss = batch.weigh(output)
        check_loss(loss)
        self.outputs[micro_batch] = loss.detach()
        return self._engine.scale(loss)

    def _backward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        gradients = self._wait(self._arriving_gradients.pop(key)) if key in self._arriving_gradients else None
        graph = self._graphs.pop(key)
        with self._computing(action, phase="backward"), self._engine.backward_of(action):
            if graph.outputs:
                torch.autograd.backward(graph.outputs, gradients)
        self._leaving_gradients[key] = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in graph.inputs
        ]

    def _backward_input(self, action: Action) -> None:
        collector = self._engine.deferred
        collector.collecting = self._deferred[action.stage, action.micro_batch] = []
        try:
            self._backward(action)
        finally:
            collector.collecting = None

    def _backward_weight(self, action: Action) -> None:
        with self._computing(action, phase="backward"), self._engine.backward_of(action):
            deferred.finish(self._deferred.pop((action.stage, action.micro_batch)))

    @contextmanager
    def _computing(self, action: Action, *, phase: str) -> Iterator[None]:
        start = self._engine.now()
        weight = self._router_weights[action.micro_batch]
        with self._engine.clock.phase(phase), weighing(self._stages.module, weight=weight):
            yield
        self.intervals.append(Interval(rank=self._rank, action=action, start=start, stop=self._engine.now()))

    def _wait(self, arriving: Incoming):
        with self._engine.clock.phase("bubble"):
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
