"""`generate` of `init_inference`: by ztk's inference engine where it has the same answer, else by the module's own loop, as for beams."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.inference.plan import free_memory

# What a generation configuration may say beside its defaults for the engine to have the same answer.
_KNOWN = {
    *(
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "num_return_sequences",
        "do_sample",
        "temperature",
    ),
    *("top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "pad_token_id", "bos_token_id", "use_cache"),
    *("transformers_version", "output_attentions", "output_hidden_states", "_from_model_config"),
}
_MOST_SEQUENCES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A call of `generate` that the engine answers. tokens: int64 [B, T], as given. prompts: rows without what fills them up."""

    tokens: Tensor
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    pad: int


class EngineGeneration:
    """Answers calls of `generate` by a `Generator`, which is made for the first of them and keeps the weights as they are then.

    model: a causal language model of transformers in fp32 on the CPU.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._generator: Generator | None = None
        self.reason = _reason_against(model)

    def answer(self, args: tuple, kwargs: Mapping[str, object]) -> Tensor | None:
        """int64 [B n, T + longest answer], as transformers returns it; None if its own loop has to answer.

        Raises:
            FloatingPointError: logits that are not finite.
        """
        if self.reason is not None or _is_watched(self._model):
            return None
        asked = _read(self._model, args=args, kwargs=kwargs)
        if asked is None:
            return None
        generator = self._opened()
        if generator is None:
            return None
        longest = max(len(prompt) + one.max_tokens for prompt, one in zip(asked.prompts, asked.sampling, strict=True))
        if longest > generator.max_len:
            return None
        found = generator.generate(asked.prompts, sampling=asked.sampling)
        generator.forget_prefixes()
        broken = next((one.error for answers in found for one in answers if one.error is not None), None)
        if broken is not None:
            raise FloatingPointError(broken)
        return _padded(asked, answers=[answer.tokens for answers in found for answer in answers])

    def _opened(self) -> Generator | None:
        """None for a model that the engine does not compute."""
        if self._generator is None:
            try:
                self._generator = Generator(self._model, policy=InferencePolicy(max_sequences=_MOST_SEQUENCES))
            except ValueError as error:
                self.reason = str(error)
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


def _is_watched(model: nn.Module) -> bool:
    """Hooks, a compiled or a replaced forward would not see what the engine computes."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _read(model: Any, *, args: tuple, kwargs: Mapping[str, object]) -> Asked | None:
    """None for what the engine has no same answer to."""
    given = dict(kwargs)
    tokens = given.pop("inputs", given.pop("input_ids", args[0] if args else None))
    mask = given.pop("attention_mask", None)
    if len(args) > 1 or not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        return None
    settings, others = model._prepare_generation_config(given.pop("generation_config", None), **given)
    kept = mask if isinstance(mask, Tensor) else torch.ones_like(tokens)
    penalises_padding = settings.repetition_penalty not in (None, 1.0) and not bool(kept.all())
    pads_itself = mask is None and settings.pad_token_id is not None and bool((tokens == settings.pad_token_id).any())
    known = _is_known(settings, defaults=model.generation_config._get_default_generation_params())
    if (
        others
        or not known
        or kept.shape != tokens.shape
        or not _is_filled_on_the_left(kept)
        or penalises_padding
        or pads_itself
    ):
        return None
    ends = settings.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = settings.pad_token_id if settings.pad_token_id is not None else next(iter(ends), None)
    count = settings.max_new_tokens if settings.max_new_tokens is not None else settings.max_length - tokens.shape[1]
    n, draws = settings.num_return_sequences or 1, bool(settings.do_sample)
    if count < 1 or (ends and pad is None) or (n > 1 and not draws):
        return None
    least = settings.min_new_tokens or max(0, (settings.min_length or 0) - tokens.shape[1])
    steps = (
        _steps(settings) if draws else {"temperature": 0.0, "repetition_penalty": settings.repetition_penalty or 1.0}
    )
    vocabulary = model.config.get_text_config().vocab_size
    seed = int(torch.randint(1 << 62, ())) if draws else 0  # so torch.manual_seed repeats an answer
    sampling = [
        SamplingParams(
            max_tokens=count,
            n=n,
            seed=seed,
            draw_key=(row,),
            stop_token_ids=tuple(ends),
            token_mask=_without(ends, until=least, vocabulary=vocabulary) if ends and least else None,
            **steps,
        )
        for row in range(len(tokens))
    ]
    prompts = [row[own.bool()].tolist() for row, own in zip(tokens, kept, strict=True)]
    return Asked(tokens=tokens, prompts=prompts, sampling=sampling, pad=0 if pad is None else pad)


def _is_known(settings: Any, *, defaults: Mapping[str, object]) -> bool:
    said = {
        name for name, value in settings.to_diff_dict().items() if value is not None and value != defaults.get(name)
    }
    return said <= _KNOWN


def _is_filled_on_the_left(kept: Tensor) -> bool:
    """Each row of a mask is filled up on the left, and has a token."""
    own = kept.bool()
    return own.dim() == 2 and bool(own[:, -1].all()) and bool((own[:, 1:] >= own[:, :-1]).all())


def _steps(settings: Any) -> dict[str, Any]:
    """Sampling steps: transformers makes them in the engine's order."""
    return {
        "temperature": 1.0 if settings.temperature is None else settings.temperature,
        "top_k": settings.top_k or 0,
        "top_p": 1.0 if settings.top_p is None else settings.top_p,
        "min_p": settings.min_p or 0.0,
        "repetition_penalty": settings.repetition_penalty or 1.0,
    }


def _without(ends: list[int], *, until: int, vocabulary: int) -> Callable[[list[int]], Tensor]:
    """A mask without the tokens that end an answer while it has fewer than `until` tokens."""
    everything = torch.ones(vocabulary, dtype=torch.bool)
    going_on = everything.clone()
    going_on[ends] = False
    return lambda answer: going_on if len(answer) < until else everything


def _padded(asked: Asked, *, answers: list[list[int]]) -> Tensor:
    longest = max(map(len, answers))
    before = asked.tokens.repeat_interleave(len(answers) // len(asked.tokens), dim=0)
    after = torch.tensor([answer + [asked.pad] * (longest - len(answer)) for answer in answers], dtype=before.dtype)
    return torch.cat([before, after], dim=1)
