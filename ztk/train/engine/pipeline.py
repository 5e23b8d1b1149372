"""The engine of a model that is cut into stages: every rank of the pipeline runs its part of the schedule, a batch at a time.

A loss has the dtype that the last stage computes it in.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ztk.core.policies.pipeline import PipelinePolicy
from ztk.nn.deferred import DeferredGradients
from ztk.parallel.pipeline import Action, Interval, Kind, Schedule, Timeline, make_inference_schedule, make_schedule
from ztk.parallel.pipeline.layers import Carry, MicroBatch
from ztk.parallel.pipeline.stages import Stages
from ztk.parallel.pipeline.wire import Wire
from ztk.train.engine.batches import take
from ztk.train.engine.engine import Engine
from ztk.train.engine.pipeline_run import PipelineRun
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.reduction import Backward


class PipelineEngine(Engine):
    """Trains by `train_batch` alone: forwards and backwards of several micro-batches alternate, so there is no loop to write outside.

    record_timeline: set it, and `timeline` says afterwards what this rank computed when, in seconds of the clock `now`.

    [Note: ZeRO inside a stage] Every stage is a model of its own to ZeRO, sharded over the ranks that hold the same stage. What is
    gathered at stage 3 stays gathered for all micro-batches of the batch as far as `zero.max_live_parameters` reaches. Gradients add
    up locally and are reduced once, during a stage's last backward; at stages 2 and 3, where they are more than
    `max_local_gradients`, after every micro-batch.
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
        """As `Engine.set_accumulation`, the same on every rank."""
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
        self._last_of = {action.stage: action for action in own}  # after it the stage's gradients are complete

    @property
    def is_first_stage(self) -> bool:
        """This rank reads the inputs."""
        return self._pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank computes the loss."""
        return self.process.mesh.is_last_stage

    def train_batch(self, micro_batches: Iterable) -> Tensor:
        """One optimizer step; returns this replica's mean loss over its micro-batches, a scalar on the device of every rank of the pipeline.

        micro_batches: at least `accumulation_steps` of them, of which that many are taken: tuples of arguments, dicts of keyword arguments,
            or `MicroBatch`. Ranks that hold neither the first nor the last stage may be given Nones.
        After an error the engine cannot go on: ranks stand at different places of the schedule.
        """
        batches = take(micro_batches, count=self.accumulation_steps)
        losses = self._run(batches, schedule=self.schedule, trains=True)
        self.micro_steps += len(batches) - 1
        self.step()
        return self.share(torch.stack(losses).float().mean() if self.is_last_stage else None)

    def eval_batch(self, micro_batches: Iterable) -> Tensor:
        """This replica's mean loss over `micro_batches`, without gradients and in eval mode; a scalar on every rank of the pipeline."""
        losses = self._eval_losses(micro_batches)
        return self.share(None if losses is None else torch.stack(losses).float().mean())

    def eval_losses(self, micro_batches: Iterable) -> Tensor:
        """As `Engine.eval_losses`: zeros on all stages but the last."""
        batches = list(micro_batches)
        losses = self._eval_losses(batches)
        return torch.zeros(len(batches), device=self.process.device) if losses is None else torch.stack(losses)

    def _eval_losses(self, micro_batches: Iterable) -> list[Tensor] | None:
        batches = [MicroBatch.of(batch) for batch in micro_batches]
        with self.evaluating():
            outputs = self.forward_batches(batches)
        if not self.is_last_stage:
            return None
        return [batch.weigh(out) for batch, out in zip(batches, outputs, strict=True)]

    def __call__(self, *args, **kwargs) -> Carry:
        """The model's output for one micro-batch, on every rank of the pipeline and without gradients: for looking, not for training."""
        with torch.no_grad():
            (output,) = self.forward_batches([MicroBatch(args=args, kwargs=kwargs)])
        return self._wire.spread(output, source=self._pipeline.size - 1)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Refused for every loss, scalar or not: see the class. Raises: RuntimeError, always."""
        raise RuntimeError(
            "a pipeline trains by engine.train_batch(micro_batches): it has no backward of a single loss"
        )

    # Runs

    def forward_batches(self, batches: list[MicroBatch]) -> list[Carry]:
        """Forwards alone; returns the model's outputs per micro-batch on the last stage, Nones elsewhere. Collective along the pipeline."""
        schedule = make_inference_schedule(
            num_ranks=self._pipeline.size,
            num_micro_batches=len(batches),
            virtual_stages=self.policy.virtual_stages,
        )
        return self._run(batches, schedule=schedule, trains=False)

    def _run(self, batches: list[MicroBatch], *, schedule: Schedule, trains: bool) -> list[Carry]:
        """The last stage's outputs, where this rank has them."""
        intervals: list[Interval] = []
        run = PipelineRun(
            stages=self.stages,
            schedule=schedule,
            rank=self._pipeline.rank,
            wire=self._wire,
            batches=batches,
            clock=self.clock,
            trainer=self if trains else None,
            record=intervals.append if self.record_timeline else None,
            now=self.now,
        )
        with self.zero.gathering.keep_unsharded():
            run.run()
        if self.record_timeline:
            self.timeline = Timeline(intervals=tuple(intervals))
        return run.outputs

    def share(self, value: Tensor | None) -> Tensor:
        """The last stage's scalar, on every rank of the pipeline."""
        own = torch.zeros(1, device=self.process.device) if value is None else value.view(1)
        return self._pipeline.gather_scalars(own, label="loss")[-1, 0]

    # What a run asks of its trainer

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, a scalar, times the loss scale."""
        return loss.float() * self.control.loss_scale if self._scales_loss else loss

    @contextmanager
    def backward_of(self, action: Action) -> Iterator[None]:
        """Gradients that arrive inside are reduced when they are complete. See [Note: ZeRO inside a stage]."""
        reduction = self.zero.reduction
        is_last = action == self._last_of[action.stage]
        reduces = is_last or (not self._adds_locally and action.kind is self._completing)
        reduction.begin(Backward(reduces=reduces, is_last=is_last, scope=self._buckets_of[action.stage]))
        yield
        reduction.finish()

    def _buckets_by_stage(self) -> dict[int, set[Bucket]]:
        """Each bucket belongs to the first of this rank's stages that uses it, whose backward comes last."""
        found: dict[int, set[Bucket]] = {stage: set() for stage in self.stages.own}
        for bucket in self.zero.buckets:
            names = [placement.name for placement in bucket.layout.placements]
            stage = min(self.stages.stage_of.get(name, self.stages.own[0]) for name in names)
            found[stage].add(bucket)
        return found

    def _gradients_fit(self) -> bool:
        """The rank's full gradients may stay until the step; at stages 0 and 1 they do anyway."""
        if not self.zero.policy.shards_gradients:
            return True
        elements = sum(bucket.size for bucket in self.zero.buckets if bucket.traits.trainable)
        return elements <= self.policy.max_local_gradients
