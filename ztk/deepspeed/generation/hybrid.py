"""`DeepSpeedHybridEngine`: one model that trains and generates, as DeepSpeed-Chat's step 3 uses it.

A loss has the dtype that the model computes it in.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ztk.deepspeed.engine.engine import DeepSpeedEngine
from ztk.deepspeed.generation.adapters import FusedAdapters
from ztk.deepspeed.generation.loop import generate
from ztk.deepspeed.generation.texts import EngineTexts
from ztk.deepspeed.tools.log import logger
from ztk.rl.rollout.weights import RolloutWeights


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """`initialize` makes it where the configuration has `hybrid_engine.enabled`.

    `generate`, also under the name `module.generate`, draws texts from the parameters as they are sharded: by ztk's inference engine, or
    by transformers' own loop, see `hybrid_texts`. No copy of the weights outlives a text, so that `eval()` and `train()` have nothing to
    convert: the next text is the updated model's.
    """

    def _prepare(self) -> None:
        assert self.settings.hybrid is not None, "the configuration has the section"
        self._adapters, self._times = FusedAdapters(self.module), _Times()
        self._texts = EngineTexts(self.engine, weights=self.settings.hybrid.weights)
        self.module.generate = self.generate  # what scripts call

    def generate(self, *inputs: Any, **options: Any) -> Tensor:
        """transformers' `generate`, without gradients and in eval mode: tokens [B, T].

        Every rank calls it, and may end after other numbers of tokens. transformers' own loop draws what `hybrid_texts` has a reason for.

        Adapters are merged meanwhile, by that loop where parameters are gathered once for the text.

        Raises:
            ValueError: a text that may become longer than `hybrid_engine.max_out_tokens`.
            FloatingPointError: logits that are not finite, by the inference engine.
        """
        settings = self.settings.hybrid
        assert settings is not None
        self._check_length(inputs, options, limit=settings.max_out_tokens)
        with self._times.generating():
            tokens = self._texts.answer(inputs, options)
            if tokens is None:
                with self._merged(wanted=settings.weights is RolloutWeights.whole):
                    tokens = generate(self, *inputs, weights=settings.weights, **options)
        if settings.releases:
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
        """Merges DeepSpeed-Chat's adapters into the layers' weights until `unfuse_lora_weight`. Every rank calls it."""
        self._adapters.fuse()

    def unfuse_lora_weight(self) -> None:
        """The weights as they were, bit for bit. Every rank calls it."""
        self._adapters.unfuse()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """`DeepSpeedEngine.backward`. Raises RuntimeError while adapters are merged: their gradients would be missing."""
        if self._adapters.is_fused:
            raise RuntimeError(
                "backward() while adapters are merged into the weights: call unfuse_lora_weight() before the forward"
            )
        return super().backward(loss, retain_graph, scale_wrt_gas)

    # Modes and times

    def step(self, lr_kwargs: dict | None = None) -> None:
        """`DeepSpeedEngine.step`."""
        super().step(lr_kwargs)
        self._times.end_training()

    def train(self, mode: bool = True) -> "DeepSpeedHybridEngine":
        """The module's mode. At each `eval()` after training rank 0 logs how long the texts and the updates since the last one took."""
        super().train(mode)
        if mode:
            self._times.begin_training()
        elif (line := self._times.line(samples=self.settings.batch.train)) is not None and self.global_rank == 0:
            logger.info(line)
        return self

    def destroy(self) -> None:
        """`DeepSpeedEngine.destroy`; the module's own `generate` is back."""
        self.module.__dict__.pop("generate", None)
        super().destroy()


class _Times:
    """Seconds of one round of texts and updates. A GPU is not waited for: kernels that still run count for what follows."""

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
        """What the round took, and a new one begins; None: there was no update in it."""
        if not self._trained:
            return None
        now = time.perf_counter()
        total = now - self._began
        shares = {"Generate time": self._generated, "Training time": self._trained}
        shares["Others"] = total - sum(shares.values())
        parts = "".join(f" |{name}={spent:.2f}s ({100 * spent / total:.2f}%)" for name, spent in shares.items())
        self._began, self._generated, self._trained = now, 0.0, 0.0
        return f"|E2E latency={total:.2f}s{parts} |CurSamplesPerSec={samples / total:.2f}"
