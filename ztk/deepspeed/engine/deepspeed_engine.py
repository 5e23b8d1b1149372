"""The engine of a DeepSpeed script: DeepSpeed's names and counters on top of ztk's engine. Losses have the model's output dtype."""

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler

from ztk.core.policies.tier import StateKind
from ztk.core.runtime import Topology
from ztk.deepspeed.config.top import BatchSizes
from ztk.deepspeed.engine import owners
from ztk.deepspeed.engine.buffers import naming_buffers
from ztk.deepspeed.engine.getters import Getters
from ztk.deepspeed.engine.gradients import take_assigned, take_changes
from ztk.deepspeed.engine.offloading import OffloadDeviceEnum, StateOffload
from ztk.deepspeed.optimizers.sharded import ShardedOptimizer
from ztk.deepspeed.saved.checkpoints import Saving
from ztk.deepspeed.start.build import Builder, set_averaging
from ztk.deepspeed.start.loader import loader_of
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.watch.watcher import Watcher
from ztk.train.engine import Engine

# Types that `initialize` accepts in place of an optimizer and a schedule.
DeepSpeedOptimizerCallable = Callable[[Iterable], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
_FIX = (
    "there is nothing to train: no optimizer was given, and no forward of the engine has run with gradients on, or no parameter "
    'requires one. Add the section "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}} to the configuration, or pass '
    "optimizer= to initialize"
)


class OverModule(nn.Module):
    """Looks up unknown attributes in its `module`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules["module"], name)


class DeepSpeedEngine(Getters, Saving, OverModule):
    """`loss = engine(x)`, `engine.backward(loss)`, `engine.step()`, for every micro-batch.

    global_steps counts all optimizer steps, including skipped ones; micro_steps counts calls of `step`. A learning rate schedule advances
    with every step that is not skipped.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        builder: Builder,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        collate_fn: Callable | None,
    ) -> None:
        super().__init__()
        self.module = engine.module
        self.engine, self.settings, self.optimizer = engine, builder.settings, optimizer
        self.lr_scheduler, self.collate_fn = lr_scheduler, collate_fn
        self.training_dataloader: Any = None
        self._builder = builder
        self._states = optimizer.moving if optimizer else StateOffload(engine, policy=self.settings.offload)
        self.micro_steps = 0
        self.since_step = 0  # micro-batches ended by `step` since the optimizer's last step
        self.global_samples = 0
        self._boundary: bool | None = None
        self._in_step = False
        self._backwards = 0  # since the last step
        self._in_no_sync = False
        self._step_applied = False
        self._compiled = False
        self.is_closed = self._warned_of_drop = False
        if optimizer is not None:
            optimizer.before_drop = self._warn_of_drop
        self._watcher = Watcher(self)
        self._prepare()

    def _prepare(self) -> None:
        """Hook for derived engines, called at the end of the construction."""

    # Training

    def forward(self, *args, **kwargs):
        """Runs the module's forward. With fp16, casts floating-point inputs unless `fp16.auto_cast` is false."""
        if self.optimizer is None and self._builder.trainable and torch.is_grad_enabled():
            self._begin_training()
        self._states.need(StateKind.lp_params, operation="forward")
        if self.settings.casts_inputs:
            args, kwargs = tree_map_only(Tensor, _halved, (args, kwargs))
        with naming_buffers(self.module, dtype=self.settings.precision.dtype), self._watcher.forward(), self.autocast():
            output = self.engine(*args, **kwargs)
        if self.optimizer is not None and torch.is_grad_enabled():
            self._announce()  # for scripts that call loss.backward() themselves
        return output

    def autocast(self) -> AbstractContextManager:
        """torch.autocast with the settings of `torch_autocast`. Without that section, the script's own autocast stays active."""
        dtype = self.settings.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs the backward of a scalar loss. Returns the loss divided by the accumulation steps, like its gradients.

        scale_wrt_gas: False leaves loss and gradients undivided. Raises ValueError for a loss that is not a scalar or has no graph.
        """
        self._need_optimizer()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError("backward(loss): must be a scalar tensor that the model's parameters led to")
        steps = self.settings.batch.accumulation
        self._states.need(StateKind.lp_params, StateKind.lp_grads, operation="backward")
        self._announce()
        self._backwards += 1
        with self._watcher.backward(loss):
            self.engine.backward(loss if scale_wrt_gas else loss * steps, retain_graph=retain_graph)
        return loss / steps if scale_wrt_gas else loss

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, a scalar, times the loss scale: for `engine.scale(loss).backward()`."""
        self._need_optimizer()
        self._announce()
        return self.engine.scale(loss)

    def step(self, lr_kwargs: dict | None = None) -> None:
        """Ends a micro-batch. At a boundary the optimizer steps, and the schedule advances if the step was not skipped.

        Raises FloatingPointError for a non-finite gradient that no smaller loss scale can fix, and RuntimeError inside `no_sync`.
        """
        self._need_optimizer()
        self._states.need(operation="step")
        if self._in_no_sync:
            raise RuntimeError("engine.step() inside no_sync(): the gradients are not reduced; call it after the block")
        self._step_applied, self._in_step = False, True
        is_boundary = self.is_gradient_accumulation_boundary()
        try:
            with self._watcher.step():
                if is_boundary:
                    self._take_model_step(lr_kwargs or {})
        finally:
            self._in_step = False
        self.micro_steps += 1
        self.since_step = 0 if is_boundary else self.since_step + 1
        if is_boundary:
            self._watcher.after_step()

    def _take_model_step(self, lr_kwargs: Mapping[str, object]) -> None:
        self._announce()
        take_assigned(self.engine)
        assert self.optimizer is not None
        if not self.settings.managed_gradient_accumulation and self.engine.has_gradients:
            self.engine.reduce_gradients()  # the backwards did not reduce, because they were not known to be the last ones
        self.optimizer.step_of_engine()
        batch = self.settings.batch
        micro = batch.train // batch.accumulation
        self.global_samples += batch.train if self.settings.managed_gradient_accumulation else micro * self._backwards
        self._backwards = 0
        self._advance_schedule(**lr_kwargs)

    def _advance_schedule(self, **lr_kwargs: object) -> None:
        """Called after the optimizer's step."""
        assert self.optimizer is not None
        self._step_applied = not self.optimizer.overflow
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def _begin_training(self) -> None:
        """Prepares for a possible backward although no optimizer was given."""
        self.engine, self.optimizer = self._builder.begin_training(self.engine)
        self._states, self.optimizer.before_drop = self.optimizer.moving, self._warn_of_drop

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates the gradients of backwards inside on the rank, without reducing them. Works at every stage."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            with self.engine.no_sync():
                yield
        finally:
            self._in_no_sync = before

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Accumulates the gradients of backwards inside on the rank, and reduces them once at the end: one block per following `step()`.

        Works at every stage; at 2 and 3 it needs memory for unsharded gradients. Raises RuntimeError inside another such block or
        `no_sync`.
        """
        self._need_optimizer()
        self._need_managed("coalesce_grad_reduction")
        if self._in_no_sync:
            raise RuntimeError("coalesce_grad_reduction() inside no_sync() or itself: leave the outer block first")
        with self.no_sync():
            yield
        self.allreduce_gradients()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduces the local gradients of backwards under `no_sync`, if there are any. A collective call.

        bucket_size: elements. Accepted and ignored: gradients are reduced in their buffers.
        """
        del bucket_size
        if self.engine.zero.reduction.has_unreduced:
            self.engine.reduce_gradients()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches per step; the size of a micro-batch stays.

        Raises ValueError unless train_batch_size is a multiple of the micro-batch on all ranks.
        """
        batch = self.settings.batch
        unit = batch.micro * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % unit:
            raise ValueError(
                f"train_batch_size={train_batch_size}: must be a multiple of {unit}, the micro-batch {batch.micro} on "
                f"{self.dp_world_size} ranks; {max(unit, round(train_batch_size / unit) * unit)} would fit"
            )
        self._set_batch(replace(batch, train=train_batch_size, accumulation=train_batch_size // unit))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the size of a micro-batch; the number of micro-batches per step stays. Existing loaders keep their size.

        Raises ValueError if micro_batch_size, in samples, is below 1.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size}: must be 1 or more")
        batch = self.settings.batch
        train = micro_batch_size * batch.accumulation * self.dp_world_size
        self._set_batch(replace(batch, train=train, micro=micro_batch_size))

    def _set_batch(self, batch: BatchSizes) -> None:
        self.settings = replace(self.settings, batch=batch)
        self.engine.set_accumulation(batch.accumulation)
        set_averaging(self.engine, settings=self.settings)
        if batch.accumulation > 1 and self.engine.zero.gradient_dtype.itemsize < 4 and self.global_rank == 0:
            logger.warning(
                "gradients of %d micro-batches add up in %s, which stagnates; set data_types.grad_accum_dtype to fp32",
                batch.accumulation,
                self.engine.zero.gradient_dtype,
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the optimizer steps at the next `step()`."""
        if not self.settings.managed_gradient_accumulation:
            return self._in_step
        if self._boundary is not None:
            return self._boundary
        return self.since_step + 1 >= self.settings.batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether the next `step()` calls are boundaries; None counts micro-batches again.

        Raises RuntimeError if the script manages the boundary already.
        """
        self._need_managed("set_gradient_accumulation_boundary")
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step, also of earlier micro-batches, as in plain PyTorch. A collective call.

        The micro-batch counter is not affected.
        """
        if self.optimizer is None:
            return
        self.optimizer.zero_grad(set_to_none)

    def _warn_of_drop(self) -> None:
        if self.since_step and not self._warned_of_drop:
            self._warned_of_drop = True
            if self.global_rank == 0:
                logger.warning(
                    "zero_grad() after %d of %d micro-batches drops their gradients, as in plain PyTorch (DeepSpeed's keeps them): call it "
                    "once per step",
                    self.since_step,
                    self.settings.batch.accumulation,
                )

    def compile(
        self,
        backend: str | Callable = "inductor",
        compile_kwargs: Mapping[str, object] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Applies torch.compile to the module. At stage 3, compiles every gathered unit, between which the model runs in eager mode.

        A second call does nothing. Raises ValueError for schedule and compiled_autograd_enabled, which belong to DeepCompile.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError(
                "schedule, compiled_autograd_enabled: passes of DeepCompile, which ztk does not offer; leave them out"
            )
        if self.is_compiled:
            return
        self.engine.zero.compile(self.module, backend=backend, **(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled

    def deepspeed_io(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler | None = None,
        collate_fn: Callable | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader:
        """Returns a loader of this rank's part of `dataset`; see `loader_of`. batch_size: samples; defaults to the micro-batch."""
        return loader_of(
            dataset,
            batch_size=self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            process=self.engine.process,
            drop_last=self.settings.dataloader_drop_last,
            route=route,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
        )

    def was_step_applied(self) -> bool:
        """Returns whether the last `step()` changed the parameters."""
        return self._step_applied

    def _announce(self) -> None:
        """Passes the purpose of the next backward to the engine."""
        self.engine.decide_boundary(self.is_gradient_accumulation_boundary())
        self.engine.prepare_backward()
        take_changes(self.engine)

    def _need_managed(self, operation: str) -> None:
        if not self.settings.managed_gradient_accumulation:
            raise RuntimeError(
                f"{operation}() with managed_gradient_accumulation=false: every engine.step() ends a step there; leave one of them out"
            )

    def _need_optimizer(self) -> None:
        if self.optimizer is None:
            raise ValueError(_FIX)

    # Memory

    def offload_states(
        self,
        include: Container[StateKind] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states to main memory until `reload_states`, at every stage. A collective call, between steps.

        Offloaded states stay in their tier. With lp_params on the device, the model can still run forward; all other calls need the
        states.

        include: members of OffloadStateTypeEnum; defaults to all.
        non_blocking: returns before the copies are complete, after which the memory is free.

        Raises ValueError for nvme and for offloaded parameters.
        """
        self._states.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the states of `offload_states` back. Does nothing if there are none."""
        self._states.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Frees unused buffers of gathered parameters and of gradients on the device."""
        self.engine.zero.offloader.free_buffers()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Counters

    @property
    def global_steps(self) -> int:
        """Number of optimizer steps, including skipped ones."""
        return self.engine.global_steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because of a non-finite gradient. On a GPU this waits for the device."""
        return self.engine.read_metrics().skipped_total

    def destroy(self) -> None:
        """Frees memory and files.

        The engine is unusable afterwards; a model on data-parallel ranks keeps its weights and may be initialised again.

        Idempotent. A collective call, except on a rank that ends with an exception; its model is then unusable too. Connections are kept
        for the next engine on the same mesh.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._watcher.close()
        if self.optimizer is not None:
            self.optimizer.leave_client()
        is_full = self.engine.process.mesh.topology == Topology()  # every parameter is sharded over all ranks
        if self.settings.zero.shards_parameters and is_full and sys.exception() is None:
            self._builder.end(self.engine)
        else:
            owners.forget(self.engine)
            self.engine.close()


def autocast_if_enabled(engine: DeepSpeedEngine) -> AbstractContextManager:
    """Returns the autocast context of the engine's forward: `torch_autocast` of its configuration."""
    return engine.autocast()


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
