"""The training engine. It applies a memory strategy to a model without changes to the model's code.

Losses have the model's output dtype.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.runtime import MemoryLedger, PhaseClock, Process
from ztk.core.runtime.io import IoCounters
from ztk.core.runtime.planned import host_bytes, is_planned, note_read
from ztk.core.runtime.streams import Copy, is_capturing, start_copy
from ztk.kernels import State
from ztk.optim import FlatOptimizer, WholeStep
from ztk.optim.script_optimizer import ScriptOptimizer
from ztk.parallel.pipeline.layers import MicroBatch
from ztk.train.engine.batches import BatchEngine, check_loss
from ztk.train.engine.control import StepControl, StepMetrics
from ztk.train.engine.full import full_value
from ztk.zero.parameters.partitioned import ZeroInitContext
from ztk.zero.parameters.released import was_read
from ztk.zero.reduction import Backward
from ztk.zero.zero import Zero


class OverflowGuard:
    """Checks each step's overflow status: immediately on the CPU, one step late on a GPU, so that the host never waits for the device.

    An unrecoverable step changes no parameter, so the late check is safe. It may only fail to name the parameter, if the next batch is
    finite; the error always names the step. Steps recorded into a CUDA graph are not checked: the control kernel skips on its own, and
    `read_metrics` reports it.
    """

    def __init__(self, control: StepControl, *, zero: Zero, device: torch.device) -> None:
        self._control, self._zero = control, zero
        self._seen = _host_memory(device)
        self._pending: Copy | None = None  # the copy of the last status

    def check(self, *, step: int) -> None:
        """Checks before the update, on all ranks. step: number of this step. Raises FloatingPointError."""
        if self._seen is None:
            self._judge(self._control.overflow_status(), step=step)
            return
        if is_capturing(self._control.control):
            return
        pending, self._pending = self._pending, None  # cleared first, so that the next step starts clean after an error
        note_read("overflow status of the step before")
        if pending is not None:
            pending.synchronize()
            self._judge(self._seen, step=step - 1)
        self._pending = start_copy(self._control.overflow_status(), out=self._seen)

    def finish(self, *, step: int) -> None:
        """Checks the last overflow status at the end of a run of `step` steps. Raises FloatingPointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.synchronize()
            assert self._seen is not None
            if not self._seen.is_meta and self._control.is_unrecoverable(self._seen):
                raise FloatingPointError(f"step {step}, the last one: its gradient is not finite and changed nothing")

    def _judge(self, overflow_status: Tensor, *, step: int) -> None:
        if overflow_status.is_meta or not self._control.is_unrecoverable(
            overflow_status
        ):  # meta tensors of a plan have no values
            return
        name = self._zero.first_non_finite() or "a parameter (which one, the next batch no longer shows)"
        scaling = self._control.scaling
        if scaling.dynamic:
            reason = f"at the smallest loss scale (precision.loss_scale.floor={scaling.floor:g})"
            fix = "the model diverges or fp16 is too narrow for it: use precision=bf16, or a smaller optimizer.lr"
        else:
            reason = "and there is no dynamic loss scale that could fix it"
            fix = "look at the data and the loss of this step, or use a smaller optimizer.lr"
        if was_read():
            fix += "; the script has read parameters while they were released (zero stage 3), which are NaN: see the warning"
        raise FloatingPointError(f"step {step}: the gradient of {name} is not finite {reason}; {fix}")


def _host_memory(device: torch.device) -> Tensor | None:
    """Returns a pinned float32 [2] buffer for the late check, or None if `device` is checked immediately."""
    if is_planned(device):
        return host_bytes(2 * torch.float32.itemsize).view(torch.float32)
    return torch.zeros(2, pin_memory=True) if device.type == "cuda" else None


LIVE: "weakref.WeakSet[Engine]" = weakref.WeakSet()  # engines that are not closed


class Engine(BatchEngine):
    """Trains `module`: call it, then `backward(loss)` and `step()`, for every micro-batch. Built by `ztk.parallelize`.

    memory, clock, comm, io: counters for reports and tests.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        zero: Zero,
        control: StepControl,
        process: Process,
        memory: MemoryLedger,
        clock: PhaseClock,
        io: IoCounters,
        accumulation_steps: int = 1,
        module_metrics: Callable[[], dict[str, object]] | None = None,
    ) -> None:
        """module_metrics: returns the metrics that modules collected since the last call, a collective call. If omitted, there are
        none.
        """
        self.module, self.zero, self.control, self.process = module, zero, control, process
        self.memory, self.clock, self.io, self.comm = memory, clock, io, process.comm
        self.accumulation_steps = accumulation_steps
        self.micro_steps = 0  # backward passes followed by `step`
        self.global_steps = 0  # optimizer steps, including skipped ones
        self._boundary: bool | None = None
        self._scales_loss = control.scaling.dynamic or control.scaling.initial != 1.0
        if self._scales_loss:
            zero.reduction.require_scaled_loss()
        self._module_metrics = module_metrics
        self.script_optimizer: ScriptOptimizer | None = None  # the caller's torch optimizer, if its step runs
        self._guard = OverflowGuard(control, zero=zero, device=process.device)
        self.before_update: Callable[[], None] | None = (
            None  # called by `step` at a boundary, when gradients are complete
        )
        LIVE.add(self)

    def __call__(self, *args, **kwargs):
        """Runs the module's forward."""
        with self.clock.phase("forward"):
            return self.module(*args, **kwargs)

    @property
    def is_accumulation_boundary(self) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        counted = (self.micro_steps + 1) % self.accumulation_steps == 0
        return self._synchronise and (counted if self._boundary is None else self._boundary)

    def decide_boundary(self, is_boundary: bool) -> None:
        """Sets whether this and the following micro-batches end a step. Overrides counting by `accumulation_steps`."""
        self._boundary = is_boundary

    def set_accumulation(self, steps: int) -> None:
        """Sets the number of micro-batches per step, from the next step on. Raises ValueError if a pipeline's schedule cannot run them."""
        self.accumulation_steps = steps
        self.micro_steps = self.global_steps * steps  # aligns the counter with the end of a step

    def set_averaging(self, *, prescale: float, divisor: float) -> None:
        """Sets how gradients are averaged over ranks and micro-batches, from the next backward on.

        prescale: factor on each rank's gradients before the reduction. divisor: divides the sum over ranks and micro-batches.
        """
        self.zero.reduction.set_prescale(prescale)
        self.control.set_gradient_divisor(divisor)

    def resume_at(self, step: int) -> None:
        """Sets the counters to their values after `step` steps."""
        self.global_steps, self.micro_steps = step, step * self.accumulation_steps

    def restore_updates(self, count: int, *, missed: Mapping[str, int]) -> None:
        """Restores the optimizer's number of updates, and per parameter name of this rank the number of updates that it missed."""
        self.control.state[State.step] = count
        self.zero.missed_updates.restore(dict(missed))

    def release_optimizer(self) -> None:
        """Gives a torch optimizer that the engine took over back to its caller."""
        if self.script_optimizer is not None:
            self.script_optimizer.release()
            self.script_optimizer = None

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale other than 1 is in effect; see `scale`."""
        return self._scales_loss

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has produced gradients since the last step."""
        return self.zero.reduction.has_gradients

    def reduce_gradients(self) -> None:
        """Reduces the local gradients of backwards under `no_sync`, as a last backward does. A collective call."""
        self.zero.reduction.reduce_now()

    @property
    def synchronises(self) -> bool:
        """False inside `no_sync`."""
        return self._synchronise

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, a scalar, times the loss scale: for `engine.scale(loss).backward()`.

        With a loss scale in effect, `loss.backward()` without it raises RuntimeError.
        """
        self.prepare_backward(scaled=True)
        return loss.float() * self.control.loss_scale if self._scales_loss else loss  # a scale of 65536 overflows fp16

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Runs the backward of a scalar loss. Reduces gradients as the micro-batch's place in the step requires.

        The optimizer gets the sum of all backwards since the last step, divided by the number of data-parallel ranks and
        `accumulation_steps`. If `no_sync` adds more micro-batches than that, scale their losses yourself, as with DDP.

        retain_graph: the same as in `Tensor.backward`.

        Raises ValueError for a loss that is no scalar, or that no trained parameter has a gradient of.
        """
        check_loss(loss)
        scaled = self.scale(loss)
        self.zero.reduction.begin()
        with self.clock.phase("backward"):
            scaled.backward(retain_graph=retain_graph)
            self.zero.reduction.finish()

    def prepare_backward(self, *, scaled: bool = False) -> None:
        """Prepares for the next backward; `backward` and `scale` call this themselves. scaled: the loss includes the loss scale."""
        is_last = self.is_accumulation_boundary
        reduces = self._synchronise and (is_last or self.zero.policy.shards_gradients)
        self.zero.reduction.announce(Backward(reduces=reduces, is_last=is_last, scaled=scaled))

    @property
    def needs_closure(self) -> bool:
        """Whether the optimizer's step evaluates the loss again, see `step`."""
        optimizer = self.zero.optimizer
        return isinstance(optimizer, WholeStep) and optimizer.needs_closure

    def step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Ends a micro-batch. Returns True at a boundary, where the optimizer steps; also if an overflow made it skip.

        closure: for a torch optimizer of full parameters whose step evaluates the loss again. It runs forward and `backward` of all
        micro-batches of the step with the parameters of that moment, and returns the loss, of which the optimizer gets the mean over the
        ranks.

        Raises FloatingPointError on all ranks for a non-finite gradient that no smaller loss scale can fix, and ValueError for a closure
        with another optimizer.
        """
        if closure is not None and not isinstance(self.zero.optimizer, WholeStep):
            raise ValueError(
                "engine.step(closure): only a torch optimizer of full parameters calls a closure; pass it as torch_optimizer, without "
                "elementwise=True"
            )
        boundary = self.is_accumulation_boundary
        self.micro_steps += 1
        if not boundary:
            return False
        if self.before_update is not None:
            self.before_update()
        with self.clock.phase("optimizer"), self._inside_script_optimizer():
            self.control.decide(self.zero.sum_of_squares())
            try:
                self._guard.check(step=self.global_steps + 1)
            except FloatingPointError:
                self.discard_gradients()
                raise
            evaluate = None if closure is None else functools.partial(self._evaluate_again, closure)
            self.zero.update(self.control.control, step=self.global_steps + 1, evaluate=evaluate)
        self._end_step()
        return True

    def _evaluate_again(self, closure: Callable[[], Any]) -> Any:
        """Returns the loss of `closure`, mean over the ranks, after its gradients are reduced and `control` follows them."""
        with torch.enable_grad(), self.no_sync():
            loss = closure()
        self.reduce_gradients()
        self.control.decide_again(self.zero.sum_of_squares())
        if not isinstance(loss, Tensor):
            return loss
        losses = self.process.mesh.comm("data").gather_scalars(loss.detach().double().view(1), label="loss")
        return losses.mean().to(loss.dtype)

    def _end_step(self) -> None:
        """Counts a step that the caller ended before its last micro-batch as a full one."""
        self.global_steps += 1
        if self._boundary is not None:
            self.micro_steps = self.global_steps * self.accumulation_steps

    @contextmanager
    def _inside_script_optimizer(self) -> Iterator[None]:
        if self.script_optimizer is None:
            yield
            return
        with self.script_optimizer.inside_hooks():
            self.script_optimizer.check()
            yield

    def skip_step(self) -> None:
        """Ends a step without an update. A collective call.

        Drops gradients and advances the counters as for an overflow, but keeps the loss scale.
        """
        self.discard_gradients()
        self.control.state[State.skipped_steps] += 1
        self.micro_steps += 1
        self._end_step()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Disables gradients and sets eval mode, of the module and of an optimizer that has one. On exit every submodule returns to its
        previous mode. A collective call with such an optimizer."""
        with self.zero.evaluated_weights(), super().evaluating():
            yield

    def full_grad(self, name: str) -> Tensor:
        """Returns the gradient of a parameter for this step, fp32 in the full shape on every rank, in any layout: averaged over ranks and
        micro-batches, without loss scale, before clipping. A collective call in `Callback.before_update`, or between the last backward
        of a step and `step()`.

        Raises RuntimeError at another time, and ValueError for a name without a trained parameter.
        """
        found = full_value(self, name=name, is_gradient=True)
        return found / (self.control.loss_scale * self.control.gradient_divisor)

    def full_parameter(self, name: str) -> Tensor:
        """Returns a parameter with the optimizer's precision, fp32 in the full shape on every rank, in any layout. A collective call.

        Raises ValueError for a name without a parameter.
        """
        return full_value(self, name=name, is_gradient=False)

    def read_metrics(self) -> StepMetrics:
        """Returns the last step's scalars. On a GPU this waits for the device, so call it at most once per logged step."""
        metrics, step = self.control.read(), self.zero.optimizer
        if isinstance(step, FlatOptimizer):
            return metrics
        return replace(metrics, lr=step.rate * self.control.read_multiplier())

    def read_module_metrics(self) -> dict[str, object]:
        """Returns metrics that modules collected since the last call, such as the balance of experts, over all ranks. A collective
        call.
        """
        return {} if self._module_metrics is None else self._module_metrics()

    def close(self, *, init_context: ZeroInitContext | None = None) -> None:
        """Stops background work, frees files and host memory, and raises errors of pending work. The engine is unusable afterwards.

        init_context: takes over the sharded parameters, so that another engine can train the model; a collective call then. If omitted,
        the model is unusable too after stage 3.
        """
        LIVE.discard(self)
        self.release_optimizer()
        try:
            self._guard.finish(step=self.global_steps)
        finally:
            if init_context is None:
                self.zero.close()
            else:
                self.zero.release_model(init_context)

    def discard_gradients(self) -> None:
        """Drops the gradients since the last step, after a batch that failed half way. A collective call."""
        self.zero.discard_gradients()

    def compute(self, micro_batches: Iterable[Any]) -> list[Any]:
        """Returns the output of each micro-batch, or the result of its `loss_of`, on every rank that shares the model. No gradients."""
        with torch.no_grad():
            return [batch.run(self) for batch in map(MicroBatch.of, micro_batches)]

    def eval_losses(self, micro_batches: Iterable[Any]) -> Tensor:
        """Returns the loss of each of `micro_batches`, without gradients and in eval mode: [n] on the device. A collective call.

        Needs at least one micro-batch, and the same number on every rank. With sequence parallelism, each rank has a part of the loss,
        and the mean over the ranks is the loss. On pipeline ranks without the last stage, the losses are zeros.
        """
        with self.evaluating(), self.zero.gathering.keep_unsharded():  # one gather of the parameters for all
            return self._losses(micro_batches)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replaces the model's weights by their moving average, for evaluation and generation. A collective call, between steps.

        On exit, weights, optimizer states and average are bitwise as before. A step or a checkpoint inside raises RuntimeError, and so
        does an engine without an average (`ema=` of `parallelize`).
        """
        with self.zero.averaged.shown():
            yield

    @property
    def num_parameters(self) -> int:
        """Number of elements of the model, including frozen parameters, without padding."""
        return self.zero.num_parameters
