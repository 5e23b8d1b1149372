"""The engine that `init_inference` returns."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.runtime import Process
from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine, OverModule
from ztk.deepspeed.generation.asked import is_watched, read_call
from ztk.deepspeed.serving.config import DeepSpeedInferenceConfig
from ztk.deepspeed.tools.timers import now
from ztk.hf.kernels import Injection
from ztk.inference import Generator, InferencePolicy
from ztk.inference.capacity import free_memory

_MOST_SEQUENCES = 64


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
        is_uncut = streaming is None and process.mesh.comm("tp").size == 1 and not model.training
        self.__dict__["_answers"] = EngineGeneration(model) if is_uncut and _is_causal(model) else None
        if hasattr(model, "generate"):
            self.generate = self._generate

    @property
    def device(self) -> torch.device:
        return self._process.device

    def forward(self, *args, **kwargs):
        """Runs the module's forward. Ranks that share its layers pass the same arguments. Under ZeRO a collective call."""
        return self.module(*args, **kwargs)

    def _generate(self, *args, **kwargs):
        """Runs the module's `generate`, including beam search. ztk's inference engine is used if its answer is the same.
        Raises ValueError for a prompt longer than `max_out_tokens`.
        """
        prompt = kwargs.get("input_ids", args[0] if args else None)
        limit = self._config.max_out_tokens
        if isinstance(prompt, Tensor) and prompt.dim() == 2 and prompt.shape[1] > limit:
            raise ValueError(
                f"max_out_tokens={limit}: the prompt has {prompt.shape[1]} tokens; give init_inference max_out_tokens={prompt.shape[1]} "
                "or more"
            )
        found = None if self._answers is None else self._answers.answer(args, kwargs)
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        return self.module.generate(*args, **kwargs) if found is None else found

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
        self.__dict__["_answers"] = None  # frees its copy of the weights
        if self._streaming is not None:
            self._streaming.destroy()
            self.module.__dict__.pop("generate", None)
        if self._injection is not None:
            self._injection.undo()


def _is_causal(model: nn.Module) -> bool:
    """Returns whether the model is a causal transformers language model."""
    return hasattr(model, "generation_config") and hasattr(model, "_prepare_generation_config")


class EngineGeneration:
    """Answers calls of `generate` with a `Generator`, which is created on the first call and reads the weights again after they change.

    model: a causal transformers language model in fp32 on the CPU.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._generator: Generator | None = None
        self.reason = _reason_against(model)

    def answer(self, args: tuple, kwargs: Mapping[str, object]) -> Tensor | None:
        """Returns int64 [B n, T + longest answer] in transformers' layout, or None if the module's own loop must answer.

        Raises:
            FloatingPointError: logits are not finite.
        """
        if self.reason is not None or is_watched(self._model):
            return None
        asked = read_call(self._model, args=args, kwargs=kwargs)
        if isinstance(asked, str):
            return None
        generator = self._opened()
        if generator is None or asked.longest > generator.max_len:
            return None
        found = asked.answered_by(generator)
        generator.forget_prefixes()
        return found

    def _opened(self) -> Generator | None:
        """Returns None for a model that the engine does not support."""
        if self._generator is None:
            try:
                self._generator = Generator(self._model, policy=InferencePolicy(max_sequences=_MOST_SEQUENCES))
            except ValueError as error:
                self.reason = str(error)
        elif self._generator.read.changed() is not None:
            self._generator.load(self._model)
        return self._generator


def _reason_against(model: Any) -> str | None:
    parameters = list(model.parameters())
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        return "weights of 16 bits would be widened, which takes twice their memory"
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "the inference engine computes on the CPU"
    if sum(parameter.nbytes for parameter in parameters) > free_memory():
        return "its copy of the linear layers does not fit into memory"
    return None
