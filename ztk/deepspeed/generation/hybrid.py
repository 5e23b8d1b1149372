"""`DeepSpeedHybridEngine`: trains and generates with one model, as in DeepSpeed-Chat's step 3. Losses have the model's output dtype."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.generation.adapters import FusedAdapters
from ztk.deepspeed.generation.loop import generate
from ztk.deepspeed.generation.texts import EngineTexts
from ztk.deepspeed.tools.log import logger
from ztk.rl.rollout.weights import RolloutWeights


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """The engine that `initialize` returns with `hybrid_engine.enabled`.

    `generate`, also available as `module.generate`, generates from the sharded parameters with ztk's inference engine or with
    transformers' loop; see `EngineTexts`. No copy of the weights outlives a call, so `eval()` and `train()` convert nothing, and the
    next call uses the updated model.
    """

    def _prepare(self) -> None:
        assert self.settings.hybrid is not None, "the configuration has the section"
        self._adapters, self._times = FusedAdapters(self.module), _Times()
        self._texts = EngineTexts(self.engine, weights=self.settings.hybrid.weights)
        self.module.generate = self.generate  # called by scripts

    def generate(self, *inputs: Any, **options: Any) -> Tensor:
        """Runs transformers' `generate` without gradients and in eval mode. Returns tokens [B, T].

        A collective call; ranks may generate different numbers of tokens. transformers' loop is used if `EngineTexts` has a reason for
        it. It merges adapters if parameters are gathered once per call.

        Raises:
            ValueError: a text could exceed `hybrid_engine.max_out_tokens`.
            FloatingPointError: logits of the inference engine are not finite.
        """
        settings = self.settings.hybrid
        assert settings is not None
        self._check_length(inputs, options, limit=settings.max_out_tokens)
        with self._times.generating():
            tokens = self._texts.answer(inputs, options)
            if tokens is None:
                with self._merged(wanted=settings.weights is RolloutWeights.whole):
                    tokens = generate(self, *inputs, weights=settings.weights, **options)
        if settings.release_inference_cache:
            self.empty_partition_cache()
        return tokens

    def _check_length(self, inputs: tuple, options: dict, *, limit: int) -> None:
        prompt = inputs[0] if inputs else options.get("inputs", options.get("input_ids"))
        given = options.get("generation_config") or getattr(self.module, "generation_config", None)
        more = options.get("max_new_tokens", getattr(given, "max_new_tokens", None))
        total = options.get("max_length", getattr(given, "max_length", None))
        if more is not None:
            total = more + (prompt.shape[1] if isinstance(prompt, Tensor) else 0)
        if total is not None and total > limit:
            raise ValueError(
                f"generate: prompt and answer may have {total} tokens, and hybrid_engine.max_out_tokens is {limit}: raise it, or use "
                "max_new_tokens"
            )

    # Adapters

    @contextmanager
    def _merged(self, *, wanted: bool) -> Iterator[None]:
        merges = wanted and not self._adapters.is_fused
        if merges:
            self._adapters.fuse()
        try:
            yield
        finally:
            if merges:
                self._adapters.unfuse()

    def fuse_lora_weight(self) -> None:
        """Merges DeepSpeed-Chat's adapters into the layers' weights until `unfuse_lora_weight`. A collective call."""
        self._adapters.fuse()

    def unfuse_lora_weight(self) -> None:
        """Restores the weights bitwise. A collective call."""
        self._adapters.unfuse()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs `DeepSpeedEngine.backward`. Raises RuntimeError while adapters are merged, because they would get no gradients."""
        if self._adapters.is_fused:
            raise RuntimeError(
                "backward() while adapters are merged into the weights: call unfuse_lora_weight() before the forward"
            )
        return super().backward(loss, retain_graph, scale_wrt_gas)

    # Modes and times

    def step(self, lr_kwargs: dict | None = None) -> None:
        """Runs `DeepSpeedEngine.step`."""
        super().step(lr_kwargs)
        self._times.end_training()

    def train(self, mode: bool = True) -> "DeepSpeedHybridEngine":
        """Sets the module's mode. At each `eval()` after training, rank 0 logs the times of texts and updates since the last one."""
        super().train(mode)
        if mode:
            self._times.begin_training()
        elif (line := self._times.line(samples=self.settings.batch.train)) is not None and self.global_rank == 0:
            logger.info(line)
        return self

    def destroy(self) -> None:
        """Runs `DeepSpeedEngine.destroy` and restores the module's own `generate`."""
        self.module.__dict__.pop("generate", None)
        super().destroy()


class _Times:
    """Seconds of one round of texts and updates. There is no synchronization with a GPU: running kernels count for the next phase."""

    def __init__(self) -> None:
        self._began = self._ended = self._training_since = time.perf_counter()
        self._generated = self._trained = 0.0

    @contextmanager
    def generating(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._generated += time.perf_counter() - started

    def begin_training(self) -> None:
        self._training_since = time.perf_counter()

    def end_training(self) -> None:
        now = time.perf_counter()
        self._trained += now - self._training_since
        self._training_since = now

    def line(self, *, samples: int) -> str | None:
        """Returns the times of the round and begins a new one. Returns None if the round has no update."""
        if not self._trained:
            return None
        now = time.perf_counter()
        total = now - self._began
        shares = {"Generate time": self._generated, "Training time": self._trained}
        shares["Others"] = total - sum(shares.values())
        parts = "".join(f" |{name}={spent:.2f}s ({100 * spent / total:.2f}%)" for name, spent in shares.items())
        self._began, self._generated, self._trained = now, 0.0, 0.0
        return f"|E2E latency={total:.2f}s{parts} |CurSamplesPerSec={samples / total:.2f}"
