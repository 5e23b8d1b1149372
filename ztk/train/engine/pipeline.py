"""The engine for pipeline parallelism. Every rank runs its part of the schedule, one whole batch per call.

Losses have the output dtype of the last stage.
"""

import time
from collections.abc import Callable, Iterable, Iterator
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
        """As `Engine.set_accumulation`. Call it with the same value on every rank."""
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

    def train_batch(self, micro_batches: Iterable, *, before_step: Callable[[], None] | None = None) -> Tensor:
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

    def eval_batch(self, micro_batches: Iterable) -> Tensor:
        """Returns this replica's mean loss over `micro_batches`, without gradients and in eval mode; a scalar on every rank of the
        pipeline.
        """
        losses = self._eval_losses(micro_batches)
        return self.share(None if losses is None else torch.stack(losses).float().mean())

    def eval_losses(self, micro_batches: Iterable) -> Tensor:
        """As `Engine.eval_losses`. All stages except the last return zeros."""
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
        """Returns the model's output for one micro-batch on every rank of the pipeline.

        Without gradients: for inspection, not for training.
        """
        return self.compute([MicroBatch(args=args, kwargs=kwargs)])[0]

    def compute(self, micro_batches: Iterable) -> list[Carry]:
        """As `Engine.compute`. The last stage's results are sent to all ranks of the pipeline."""
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
