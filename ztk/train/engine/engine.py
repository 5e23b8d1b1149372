"""The engine: trains a model under a memory strategy, of which the model knows nothing.

A loss has the dtype that the model computes it in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ztk.core.runtime import MemoryLedger, PhaseClock, Process
from ztk.core.runtime.io import IoCounters
from ztk.kernels import State
from ztk.optim import TorchStep
from ztk.optim.script_optimizer import ScriptOptimizer
from ztk.train.engine.batches import eval_batch, eval_losses, train_batch
from ztk.train.engine.control import StepControl, StepMetrics
from ztk.train.engine.overflow import OverflowGuard
from ztk.zero.parameters.partitioned import ZeroInitContext
from ztk.zero.reduction import Backward
from ztk.zero.zero import Zero


class Engine:
    """Trains `module`: call it, `backward(loss)`, `step()`, for every micro-batch; built by `ztk.parallelize`.

    memory, clock, comm, io: the counters that reports print and tests assert.
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
        """module_metrics: returns what the modules measured since the last call, a collective call; None: they measure nothing."""
        self.module, self.zero, self.control, self.process = module, zero, control, process
        self.memory, self.clock, self.io, self.comm = memory, clock, io, process.comm
        self.accumulation_steps = accumulation_steps
        self.micro_steps = 0  # backward passes that were stepped over
        self.global_steps = 0  # optimizer steps, skipped ones included
        self._boundary: bool | None = None
        self._synchronise = True
        self._scales_loss = control.scaling.dynamic or control.scaling.initial != 1.0
        if self._scales_loss:
            zero.reduction.require_scaled_loss()
        self._module_metrics = module_metrics
        self.script_optimizer: ScriptOptimizer | None = (
            None  # the torch optimizer whose step runs, and that is the caller's
        )
        self._guard = OverflowGuard(control, zero=zero, device=process.device)

    def __call__(self, *args, **kwargs):
        """The module's forward."""
        with self.clock.phase("forward"):
            return self.module(*args, **kwargs)

    @property
    def is_accumulation_boundary(self) -> bool:
        """The optimizer steps after this micro-batch."""
        counted = (self.micro_steps + 1) % self.accumulation_steps == 0
        return self._synchronise and (counted if self._boundary is None else self._boundary)

    def decide_boundary(self, is_boundary: bool) -> None:
        """Decides whether this and the following micro-batches end a step, instead of counting by `accumulation_steps`."""
        self._boundary = is_boundary

    def set_accumulation(self, steps: int) -> None:
        """Sets the number of micro-batches per step, from the next step on. Raises ValueError if a pipeline's schedule cannot run them."""
        self.accumulation_steps = steps
        self.micro_steps = self.global_steps * steps  # counts to the end of a step

    def set_averaging(self, *, prescale: float, divisor: float) -> None:
        """Sets how gradients are averaged over ranks and micro-batches, from the next backward on.

        prescale: factor of each rank's gradients before they are summed. divisor: of the sum over ranks and micro-batches.
        """
        self.zero.reduction.set_prescale(prescale)
        self.control.set_gradient_divisor(divisor)

    def resume_at(self, step: int) -> None:
        """Continues the counts as after `step` steps."""
        self.global_steps, self.micro_steps = step, step * self.accumulation_steps

    def restore_updates(self, count: int, *, missed: Mapping[str, int]) -> None:
        """Sets how many updates the optimizer has made, and by name how many of them a parameter of this rank has missed."""
        self.control.state[State.step] = count
        self.zero.missed_updates.restore(dict(missed))

    def release_optimizer(self) -> None:
        """Returns the torch optimizer that the engine took over to its caller, if there is one."""
        if self.script_optimizer is not None:
            self.script_optimizer.release()
            self.script_optimizer = None

    @property
    def scales_loss(self) -> bool:
        """A loss scale other than 1 is in effect: see `scale`."""
        return self._scales_loss

    @property
    def has_gradients(self) -> bool:
        """A backward has left gradients since the last step."""
        return self.zero.reduction.has_gradients

    def reduce_gradients(self) -> None:
        """Reduces the gradients that backwards under `no_sync` left on the ranks, as a last backward does. Every rank must call it."""
        self.zero.reduction.reduce_now()

    @property
    def synchronises(self) -> bool:
        """False inside `no_sync`."""
        return self._synchronise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside add up locally and are not reduced; at stages 2 and 3 too, at the price of full gradients."""
        self._synchronise, before = False, self._synchronise
        try:
            yield
        finally:
            self._synchronise = before

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, a scalar, times the loss scale: for `engine.scale(loss).backward()`.

        Where a loss scale is in effect, `loss.backward()` without it raises RuntimeError.
        """
        self.prepare_backward(scaled=True)
        return loss.float() * self.control.loss_scale if self._scales_loss else loss  # 65536 is infinite in fp16

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Runs the backward of a scalar loss and reduces gradients as its place in the step demands.

        The gradient that the optimizer sees is the sum of all backwards since the last step, divided by the data-parallel ranks and
        `accumulation_steps`. Micro-batches that `no_sync` adds beyond that are the caller's to weigh, as with DDP.
        retain_graph: as in `Tensor.backward`.
        """
        scaled = self.scale(loss)
        self.zero.reduction.begin()
        with self.clock.phase("backward"):
            scaled.backward(retain_graph=retain_graph)
            self.zero.reduction.finish()

    def prepare_backward(self, *, scaled: bool = False) -> None:
        """Announces the next backward; `backward` and `scale` call this themselves. scaled: the loss is multiplied by the loss scale."""
        is_last = self.is_accumulation_boundary
        reduces = self._synchronise and (is_last or self.zero.policy.shards_gradients)
        self.zero.reduction.announce(Backward(reduces=reduces, is_last=is_last, scaled=scaled))

    def step(self) -> bool:
        """Ends a micro-batch. At a boundary the optimizer steps: True, also if overflow made it skip.

        Raises FloatingPointError, on all ranks alike, for a non-finite gradient that no smaller loss scale can fix.
        """
        boundary = self.is_accumulation_boundary
        self.micro_steps += 1
        if not boundary:
            return False
        with self.clock.phase("optimizer"), self._inside_script_optimizer():
            self.control.decide(self.zero.sum_of_squares())
            try:
                self._guard.check(step=self.global_steps)
            except FloatingPointError:
                self.discard_gradients()
                raise
            self.zero.update(self.control.control, step=self.global_steps + 1)
        self._end_step()
        return True

    def _end_step(self) -> None:
        """A step that a caller ended before its last micro-batch counts as a full one."""
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
        """Ends a step without an update: gradients are dropped, counters rise as for an overflow, and the loss scale stays as it is.

        Every rank must call it.
        """
        self.discard_gradients()
        self.control.state[State.skipped_steps] += 1
        self.micro_steps += 1
        self._end_step()

    def read_metrics(self) -> StepMetrics:
        """The last step's scalars. On a GPU this waits for the device: once per logged step, not more."""
        metrics, step = self.control.read(), self.zero.optimizer
        if not isinstance(step, TorchStep):
            return metrics
        return replace(metrics, lr=step.rate * self.control.read_multiplier())

    def read_module_metrics(self) -> dict[str, object]:
        """What the modules measured since the last call, such as how evenly experts are used, over all ranks. Every rank must call it."""
        return {} if self._module_metrics is None else self._module_metrics()

    def close(self, *, init_context: ZeroInitContext | None = None) -> None:
        """Ends what still runs and gives files and host memory back; raises what went wrong there. The engine is unusable after it.

        init_context: takes the sharded parameters in, so that the model may have another engine; then every rank must call it. None: at stage 3
        the model is unusable, too.
        """
        self.release_optimizer()
        try:
            self._guard.finish(step=self.global_steps)
        finally:
            if init_context is None:
                self.zero.close()
            else:
                self.zero.release_model(init_context)

    def discard_gradients(self) -> None:
        """Drops the gradients since the last step, for a batch that failed half way. Every rank must call it."""
        self.zero.discard_gradients()

    def train_batch(self, micro_batches: Iterable) -> Tensor:
        """One optimizer step over the next `accumulation_steps` of `micro_batches`; returns this replica's mean loss, a scalar on the device.

        A micro-batch is a tuple of the module's arguments, a dict of keyword arguments, or a `MicroBatch`; the module returns its loss.
        """
        return train_batch(self, micro_batches=micro_batches)

    def eval_batch(self, micro_batches: Iterable) -> Tensor:
        """This replica's mean loss over `micro_batches`, without gradients and in eval mode; a scalar on the device."""
        return eval_batch(self, micro_batches=micro_batches)

    def eval_losses(self, micro_batches: Iterable) -> Tensor:
        """The loss of each of `micro_batches`, one at least, without gradients and in eval mode: [n] on the device. On ranks that share
        sequences, of which each has a part of the loss, the mean over these ranks is the loss; on those of a pipeline that do not compute
        it, zeros. Every rank must call it with as many."""
        return eval_losses(self, micro_batches=micro_batches)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients, the module in eval mode, and back; every submodule returns to the mode that it had."""
        training = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in training.items():
                module.training = mode

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model's weights are their moving average; after it weights, optimizer states and average have the bits that they had.

        To evaluate and to generate; a step or a checkpoint inside raises RuntimeError, and so does an engine without an average
        (`ema=` of `parallelize`). Every rank must enter it, between steps.
        """
        with self.zero.averaged.shown():
            yield

    @property
    def num_parameters(self) -> int:
        """Elements of the model, frozen ones included, padding not."""
        return self.zero.num_parameters
