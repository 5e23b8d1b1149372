"""The engine that `init_inference` returns."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ztk.core.runtime import Process
from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine, OverModule
from ztk.deepspeed.serving.config import DeepSpeedInferenceConfig
from ztk.deepspeed.tools.timers import now
from ztk.hf.kernels import Injection


class InferenceEngine(OverModule):
    """Call it, or its `module`, the model that was passed.

    config: the model's own configuration, or None. notes: keys without effect, and the modules that kernels compute.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: DeepSpeedInferenceConfig,
        process: Process,
        injection: Injection | None,
        streaming: DeepSpeedEngine | None,
        notes: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.module = model
        self.training = model.training
        self.config = getattr(model, "config", None)
        self.notes = notes
        self._config, self._process, self._injection = config, process, injection
        self.__dict__["_streaming"] = streaming  # a module, but not a submodule of this one
        self._times: list[float] | None = None
        self._is_compiled = self._closed = False
        if hasattr(model, "generate"):
            self.generate = self._generate

    @property
    def device(self) -> torch.device:
        return self._process.device

    def forward(self, *args, **kwargs):
        """Runs the module's forward. Ranks that share its layers pass the same arguments. Under ZeRO a collective call."""
        return self.module(*args, **kwargs)

    def _generate(self, *args, **kwargs):
        """Runs the module's `generate`. Raises ValueError for a prompt longer than `max_out_tokens`."""
        prompt = kwargs.get("input_ids", args[0] if args else None)
        limit = self._config.max_out_tokens
        if isinstance(prompt, Tensor) and prompt.dim() == 2 and prompt.shape[1] > limit:
            raise ValueError(
                f"max_out_tokens={limit}: the prompt has {prompt.shape[1]} tokens; give init_inference max_out_tokens={prompt.shape[1]} "
                "or more"
            )
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        return self.module.generate(*args, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Makes `model_times` record every forward. use_cuda_events: accepted and ignored; the timing always synchronizes with the
        device.
        """
        del use_cuda_events
        if self._times is not None:
            return
        self._times, started = [], []

        def begin(module: nn.Module, args: tuple) -> None:
            started.append(now())

        def end(module: nn.Module, args: tuple, output: object) -> None:
            assert self._times is not None
            self._times.append(1e3 * (now() - started.pop()))

        self.module.register_forward_pre_hook(begin)
        self.module.register_forward_hook(end)

    def model_times(self) -> list[float]:
        """Returns milliseconds of every forward since the last call. Raises ValueError before `profile_model_time`."""
        if self._times is None:
            raise ValueError("model_times: nothing was measured; call profile_model_time() first")
        times = self._times[:]
        self._times.clear()
        return times

    def compile(self, backend: str | Callable = "inductor", compile_kwargs: Mapping[str, object] | None = None) -> None:
        """Applies torch.compile to the module, or under ZeRO to every gathered unit. Idempotent."""
        if self._is_compiled:
            return
        if self._streaming is not None:
            self._streaming.compile(backend=backend, compile_kwargs=compile_kwargs)
        else:
            self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled

    def destroy(self) -> None:
        """Frees memory and files, and restores the modules' forwards. Idempotent. Under ZeRO a collective call.

        The module's parameters stay sharded for another engine. A module that was cut over ranks stays cut.
        """
        if self._closed:
            return
        self._closed = True
        if self._streaming is not None:
            self._streaming.destroy()
            self.module.__dict__.pop("generate", None)
        if self._injection is not None:
            self._injection.undo()
