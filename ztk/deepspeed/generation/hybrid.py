"""`DeepSpeedHybridEngine`: trains and generates with one model, as in DeepSpeed-Chat's step 3. Losses have the model's output dtype."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.generation.loop import generate
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.zero.gathered import pin, unpin_unchanged
from ztk.rl.rollout.weights import RolloutWeights

_PARAMETERS = ("weight", "lora_left_weight", "lora_right_weight")
_ATTRIBUTES = (*_PARAMETERS, "lora_scaling", "fuse_lora")


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """The engine that `initialize` returns with `hybrid_engine.enabled`.

    `generate`, also available as `module.generate`, runs transformers' loop over the gathered parameters. No copy of the weights outlives a
    call, so `eval()` and `train()` convert nothing, and the next call uses the updated model.
    """

    def _prepare(self) -> None:
        assert self.settings.hybrid is not None, "the configuration has the section"
        self._adapters, self._times = _FusedAdapters(self.module), _Times()
        self.module.generate = self.generate  # called by scripts

    def generate(self, *inputs: Any, **options: Any) -> Tensor:
        """Runs transformers' `generate` without gradients and in eval mode. Returns tokens [B, T].

        A collective call; ranks may generate different numbers of tokens. Adapters are merged if parameters are gathered once per call.

        Raises:
            ValueError: a text could exceed `hybrid_engine.max_out_tokens`.
        """
        settings = self.settings.hybrid
        assert settings is not None
        self._check_length(inputs, options, limit=settings.max_out_tokens)
        with self._times.generating(), self._merged(wanted=settings.weights is RolloutWeights.whole):
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


class _FusedAdapters:
    """DeepSpeed-Chat's low-rank adapters, temporarily merged into the weights of their layers.

    Merges weight + scaling * (right @ left)^T in every layer of `model` with these parameters and a flag `fuse_lora`, which its
    forward reads.

    Copies of the base weights are kept, so that `unfuse` restores them bitwise. The shards never change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bases: dict[Any, Tensor] = {}  # copies by layer

    @property
    def is_fused(self) -> bool:
        """Whether the adapters are merged."""
        return bool(self._bases)

    def fuse(self) -> None:
        """Merges the adapters. Idempotent.

        A collective call if parameters are sharded: the layers' parameters stay gathered until `unfuse`.
        """
        if self.is_fused:
            return
        layers = [layer for layer in _adapted_layers(self._model) if not layer.fuse_lora]
        pin(_parameters(layers))
        with torch.no_grad():
            for layer in layers:
                self._bases[layer] = layer.weight.detach().clone()
                left, right = layer.lora_left_weight, layer.lora_right_weight
                layer.weight.data.copy_(_merged(layer.weight, left=left, right=right, scaling=layer.lora_scaling))
                layer.fuse_lora = True

    def unfuse(self) -> None:
        """Restores the bits from before `fuse`, if it was called. A collective call."""
        layers = list(self._bases)
        for layer in layers:
            layer.weight.data.copy_(self._bases.pop(layer))
            layer.fuse_lora = False
        unpin_unchanged(_parameters(layers))


def _adapted_layers(model: nn.Module) -> list[Any]:
    """Returns the layers of `model` with an adapter."""
    return [module for module in model.modules() if all(hasattr(module, attribute) for attribute in _ATTRIBUTES)]


def _merged(weight: Tensor, *, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    product = right.detach().float() @ left.detach().float()
    return (weight.detach().float() + scaling * product.t()).to(weight.dtype)


def _parameters(layers: list) -> list[nn.Parameter]:
    return [getattr(layer, name) for layer in layers for name in _PARAMETERS]
