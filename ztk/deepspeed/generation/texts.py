"""Generates the hybrid engine's texts with ztk's inference engine, or gives the reason for transformers' loop.

The inference engine uses a float32 copy of the weights in main memory, which is read from the shards for every text. Any change of the
weights between two texts thus has an effect. The copy is freed after the text.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.runtime.own_forward import has_own_forward
from ztk.deepspeed.generation.adapters import adapted_layers, merged_parameters
from ztk.deepspeed.generation.asked import Asked, is_watched, read_call
from ztk.deepspeed.tools.log import logger
from ztk.inference import Generator, InferencePolicy
from ztk.inference.capacity import free_memory
from ztk.inference.describe import FAMILIES, describe
from ztk.rl.rollout.weights import RolloutWeights, rollout_weights
from ztk.train.engine import Engine
from ztk.zero.parameters.construction import construction_suspended

_MOST_SEQUENCES = 64  # in one step
_COPIES = 2  # copies of the weights during reading: as read, and in the processor's own layout
_ATTENTION = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class EngineTexts:
    """Answers calls of `generate` from a training engine's weights. weights: how sharded weights may be gathered."""

    def __init__(self, engine: Engine, *, weights: RolloutWeights) -> None:
        self._engine, self._model = engine, engine.module
        self._shards = engine.zero.policy.shards_parameters
        self._streams = self._shards and weights is RolloutWeights.streamed
        self._model_refusal: str | None = None  # for a model that was checked
        self._max_len = 0  # 0 before the model was checked
        self._is_compared = False
        self.said: list[str] = []  # the engines used so far, each once, with the reason

    def answer(self, args: tuple, kwargs: Mapping[str, object]) -> Tensor | None:
        """Returns int64 [B n, T + longest answer] in transformers' layout, or None if transformers' loop must answer.

        The reason is logged once. A collective call if parameters are sharded: all ranks use the same engine.

        Raises:
            FloatingPointError: logits are not finite.
            ValueError: weights are not finite.
        """
        refusal = self._refusal()
        asked = read_call(self._model, args=args, kwargs=kwargs) if refusal is None else refusal
        if isinstance(asked, Asked) and asked.longest > self._max_len:
            asked = f"a text may have {asked.longest} tokens, and the model {self._max_len}"
        if not self._all(isinstance(asked, Asked)):
            self._say(f"transformers' own loop: {asked if isinstance(asked, str) else 'another rank needs it'}")
            return None
        assert isinstance(asked, Asked), "all ranks have"
        generator = self._opened(sequences=asked.answers)
        if generator is None:
            self._say(f"transformers' own loop: {self._model_refusal}")
            return None
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in self._model.parameters()}
        self._say(f"ztk's inference engine, float32 over weights of {' and '.join(sorted(dtypes))}")
        try:
            return asked.answered_by(generator)
        finally:
            generator.close()

    def _opened(self, *, sequences: int) -> Generator | None:
        """Opens a generator over the current weights. Returns None if the engine's results differ from the model's. A collective call.

        Raises ValueError if weights are not finite.
        """
        try:
            policy = InferencePolicy(max_sequences=min(_MOST_SEQUENCES, sequences))
            generator = Generator(_Source(self._engine), policy=policy)
            if not self._is_compared:
                with rollout_weights(self._engine, weights=RolloutWeights.whole):
                    generator.compare_with(self._model)
                self._is_compared = True
        except ValueError as error:
            if self._is_compared:
                raise  # weights are not finite
            self._model_refusal = str(error)
            return None
        return generator

    def _refusal(self) -> str | None:
        zero, process = self._engine.zero, self._engine.process
        refusal = situation_refusal(
            streams=self._streams,
            device=process.device.type,
            dtypes={parameter.dtype for parameter in self._model.parameters()},
            elements=self._engine.num_parameters,
            most_elements=zero.policy.max_kept_parameters if self._shards else None,
            free_bytes=free_memory() // process.local_world_size,
        )
        if refusal is not None:
            return refusal
        if self._max_len == 0 and self._model_refusal is None:
            self._look_at_model()
        if self._model_refusal is not None:
            return self._model_refusal
        if is_watched(self._model) or any(has_own_forward(module) for module in self._model.modules()):
            return "the inference engine would bypass hooks or a replaced forward"
        if any(layer.fuse_lora for layer in adapted_layers(self._model).values()):
            return "adapters are merged by hand"
        return None

    def _look_at_model(self) -> None:
        refusal = structure_refusal(self._model)
        if refusal is None:
            try:
                self._max_len = describe(self._model).description.max_len
            except ValueError as error:
                refusal = str(error)
        self._model_refusal = refusal

    def _all(self, flag: bool) -> bool:
        """Returns whether `flag` is true on every participating rank."""
        comm = self._engine.comm
        if not self._shards or comm.size == 1:
            return flag
        own = torch.tensor([float(flag)], device=self._engine.process.device)
        return bool(comm.gather_scalars(own, label="who generates").all())

    def _say(self, who: str) -> None:
        if who in self.said:
            return
        self.said.append(who)
        if self._engine.process.rank == 0:
            logger.info("generate: by %s", who)


class _Source:
    """A training engine as a source of weights for a `Generator`: full parameters, with adapters merged into the weights."""

    def __init__(self, engine: Engine) -> None:
        self.module: nn.Module = engine.module
        self.zero, self._read = self, engine.zero.full_parameters

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full parameters. A collective call."""
        return merged_parameters(self.module, read=self._read)


def situation_refusal(
    *,
    streams: bool,
    device: str,
    dtypes: set[torch.dtype],
    elements: int,
    most_elements: int | None,
    free_bytes: int,
) -> str | None:
    """Returns why no call can be answered now, or None.

    streams: parameters are gathered one unit at a time. elements: the model's, in `dtypes`.
    most_elements: limit of gathered elements, or None if all parameters are on every rank. free_bytes: this rank's part of main memory.
    """
    if streams:
        return "parameters are gathered a unit at a time (pin_parameters=false or inference_tp_size above 1)"
    if device != "cpu":
        return "the model is not on the CPU, where the inference engine would compute"
    if not dtypes <= _DTYPES:
        return "the inference engine takes weights of float32, bfloat16 and float16"
    if most_elements is not None and elements > most_elements:
        return f"a copy has {elements:,} parameters, more than stage3_max_live_parameters={most_elements:,}"
    if (needed := _COPIES * 4 * elements) > free_bytes:
        return f"reading a copy takes {needed / 2**20:,.0f} MiB, and {free_bytes / 2**20:,.0f} MiB are free"
    return None


def structure_refusal(model: Any) -> str | None:
    """Returns why a model differs from its configuration, or None if it does not.

    The engine follows the configuration, so it would ignore replaced modules. It supports DeepSpeed-Chat's adapters.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        return f"model_type={kind}: the inference engine computes {', '.join(sorted(FAMILIES))}"
    if getattr(type(model).generate, "__qualname__", "") != "GenerationMixin.generate":
        return f"{type(model).__name__} has a generate() of its own"
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        return f"attn_implementation={attention} is none of transformers' own"
    with construction_suspended(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    adapted = tuple(adapted_layers(model))
    own, expected = (
        {
            name: type(module)
            for name, module in one.named_modules()
            if not any(name == layer or name.startswith(f"{layer}.") for layer in adapted)
        }
        for one in (model, plain)
    )
    other = next((name for name in {**expected, **own} if own.get(name) is not expected.get(name)), None)
    return None if other is None else f"the module {other or 'itself'} is not the one that {type(model).__name__} makes"
