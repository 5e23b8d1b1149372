"""What a DeepSpeed script calls: DeepSpeed's names and counting over the one engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ztk.deepspeed import checkpoints, owners
from ztk.deepspeed.config import Settings
from ztk.deepspeed.getters import Getters
from ztk.deepspeed.optimizer import ShardedOptimizer
from ztk.deepspeed.watch.watcher import Watcher
from ztk.engine import Engine
from ztk.kernels import State

_MEND = (
    "no optimizer was given, so there is nothing to train: add the section "
    '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}} to the configuration, or pass optimizer= to initialize'
)


class DeepSpeedEngine(Getters, nn.Module):
    """`loss = engine(x)`, `engine.backward(loss)`, `engine.step()`, for every micro-batch; unknown names are the module's.

    global_steps rises with every step, skipped ones included; micro_steps with every call of `step`; a learning rate schedule moves
    with every step that was not skipped.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        settings: Settings,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: object | None,
        training_dataloader: object | None,
    ) -> None:
        super().__init__()
        self.module = engine.module
        self.engine, self.settings, self.optimizer = engine, settings, optimizer
        self.lr_scheduler, self.training_dataloader = lr_scheduler, training_dataloader
        self.micro_steps = 0
        self.global_samples = 0
        self._boundary: bool | None = None
        self._in_no_sync = False
        self._step_applied = False
        self._closed = False
        self._watcher = Watcher(self)

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules["module"], name)

    # Training

    def forward(self, *args, **kwargs):
        """The module's forward. With fp16 floating-point inputs are cast, unless `fp16.auto_cast` is false."""
        if self.settings.casts_inputs:
            args, kwargs = _cast(args, dtype=torch.float16), _cast(kwargs, dtype=torch.float16)
        with self._watcher.forward():
            output = self.engine(*args, **kwargs)
        if self.optimizer is not None and torch.is_grad_enabled():
            self._announce()  # for scripts that call loss.backward() themselves
        return output

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """The backward of a scalar loss. Returns the loss divided by the accumulation steps, as its gradients are.

        scale_wrt_gas: False leaves loss and gradients undivided.
        """
        self._need_optimizer()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError("backward(loss): must be a scalar tensor that the model's parameters led to")
        steps = self.settings.batch.accumulation
        self._announce()
        with self._watcher.backward(loss):
            self.engine.backward(loss if scale_wrt_gas else loss * steps, retain_graph=retain_graph)
        return loss / steps if scale_wrt_gas else loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale: for `engine.scale(loss).backward()`."""
        self._need_optimizer()
        self._announce()
        return self.engine.scale(loss)

    def step(self, lr_kwargs: dict | None = None) -> None:
        """Ends a micro-batch; at a boundary the optimizer steps, and the schedule if the step was not skipped.

        Raises FloatingPointError for a non-finite gradient that no smaller loss scale can mend.
        """
        self._need_optimizer()
        if self._in_no_sync:
            raise RuntimeError("engine.step() inside no_sync(): the gradients are not reduced; call it after the block")
        self._step_applied = False
        is_boundary = self.is_gradient_accumulation_boundary()
        with self._watcher.step():
            if is_boundary:
                self._take_model_step(lr_kwargs or {})
        if is_boundary:
            self._watcher.after_step()
        self.micro_steps += 1

    def _take_model_step(self, lr_kwargs: Mapping[str, object]) -> None:
        self._announce()
        self.optimizer.step(of_engine=True)
        # A step may have ended early: the engine counts whole ones.
        self.engine.micro_steps = self.engine.global_steps * self.engine.accumulation_steps
        self.global_samples += self.settings.batch.train
        self._step_applied = not self.optimizer.overflow
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside add up on the rank and are not reduced. Works at every stage."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            with self.engine.no_sync():
                yield
        finally:
            self._in_no_sync = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """The optimizer steps at the coming `step()`."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.settings.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decides it from now on; None goes back to counting."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients live in the engine's buffers, which a step empties."""

    def was_step_applied(self) -> bool:
        """The last `step()` changed the parameters."""
        return self._step_applied

    def _announce(self) -> None:
        """Tells the engine what the coming backward is for."""
        self.engine.boundary = self.is_gradient_accumulation_boundary()
        self.engine.prepare_backward()

    def _need_optimizer(self) -> None:
        if self.optimizer is None:
            raise ValueError(_MEND)

    # Counters

    @property
    def global_steps(self) -> int:
        return self.engine.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite. On a GPU this waits for the device."""
        return int(self.engine.control.state[State.skipped_steps])

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir/tag/` (default tag: global_stepN) and the tag into `save_dir/latest`. Every rank calls it.

        client_state: plain values and tensors; `load_checkpoint` gives them back.
        Raises SaveFailed on all ranks if any fails, ValueError for a client_state that cannot be read back safely.
        """
        if exclude_frozen_parameters:
            raise ValueError("exclude_frozen_parameters=True is not offered yet; frozen parameters are saved once, too")
        checkpoints.save_checkpoint(
            self, folder=save_dir, tag=tag, client_state=client_state or {}, save_latest=save_latest
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict]:
        """Sets the engine's state from a checkpoint saved at any stage and number of ranks. Every rank calls it.

        tag: None reads `load_dir/latest`. Returns (folder, client_state), or (None, {}) if there is no `latest`.
        Raises CheckpointError on all ranks for a checkpoint that is missing, damaged or of another model.
        """
        if not load_module_strict:
            raise ValueError("load_module_strict=False is not offered: names and shapes must be the model's")
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is not offered: a checkpoint is read by slices, no state_dict is made")
        return checkpoints.load_checkpoint(
            self,
            folder=load_dir,
            tag=tag,
            optimizer_states=load_optimizer_states and not load_module_only,
            scheduler_states=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights in the model's dtype as one state_dict file. Every rank calls it.

        False, and nothing written, at stage 3 unless `stage3_gather_16bit_weights_on_model_save` is set.
        """
        return checkpoints.save_16bit_model(
            self, folder=save_dir, filename=save_filename, exclude_frozen=exclude_frozen_parameters
        )

    def destroy(self) -> None:
        """Gives memory and files back. The engine is unusable after it. Idempotent."""
        if not self._closed:
            self._closed = True
            owners.forget(self.engine)
            self._watcher.close()
            self.engine.close()


def _cast(value: object, *, dtype: torch.dtype) -> object:
    """Floating-point tensors in tuples, lists and dicts as `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype=dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype=dtype) for key, item in value.items()}
    return value
