"""Translates a call of transformers' `generate` for ztk's inference engine, or returns the reason why the engine would answer
differently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference import Generator, SamplingParams

# Generation settings with which the engine gives the same answer, in addition to the defaults.
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
_NOT_PARTS = {"synced_gpus"}  # affects only the execution, not the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A call of `generate` for the engine. tokens: int64 [B, T], as given. prompts: the rows without padding."""

    tokens: Tensor
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    pad: int

    @property
    def longest(self) -> int:
        """The largest number of tokens of a prompt with its answer."""
        return max(len(prompt) + one.max_tokens for prompt, one in zip(self.prompts, self.sampling, strict=True))

    @property
    def answers(self) -> int:
        """The number of answers to all prompts."""
        return sum(one.n for one in self.sampling)

    def answered_by(self, generator: Generator) -> Tensor:
        """Returns int64 [B n, T + longest answer], in transformers' layout.

        Raises:
            FloatingPointError: logits are not finite.
        """
        found = generator.generate(self.prompts, sampling=self.sampling)
        broken = next((one.error for answers in found for one in answers if one.error is not None), None)
        if broken is not None:
            raise FloatingPointError(broken)
        return _padded(self, answers=[answer.tokens for answers in found for answer in answers])


def is_watched(model: nn.Module) -> bool:
    """Returns whether the model has hooks or a compiled forward, which the engine would bypass."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl is not None
        for module in model.modules()
    )


def read_call(model: Any, *, args: tuple, kwargs: Mapping[str, object]) -> Asked | str:
    """Translates a call of `model.generate`, or returns the reason why only transformers' loop can answer it.

    A sampling call takes its seed from torch's generator. model: a causal transformers language model.
    """
    given = {name: value for name, value in kwargs.items() if name not in _NOT_PARTS}
    tokens = given.pop("inputs", given.pop("input_ids", args[0] if args else None))
    mask = given.pop("attention_mask", None)
    if len(args) > 1 or not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        return "the prompts are not one tensor of tokens [B, T]"
    settings, others = model._prepare_generation_config(given.pop("generation_config", None), **given)
    kept = mask if isinstance(mask, Tensor) else torch.ones_like(tokens)
    refusal = _refusal_of_settings(
        settings, defaults=model.generation_config._get_default_generation_params(), others=others
    ) or _refusal_of_prompts(tokens, kept=kept, settings=settings, has_mask=mask is not None)
    if refusal is not None:
        return refusal
    ends = settings.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = settings.pad_token_id if settings.pad_token_id is not None else next(iter(ends), None)
    count = settings.max_new_tokens if settings.max_new_tokens is not None else settings.max_length - tokens.shape[1]
    n, draws = settings.num_return_sequences or 1, bool(settings.do_sample)
    if count < 1 or (n > 1 and not draws):
        return "no length of an answer, or several answers without do_sample"
    least = settings.min_new_tokens or max(0, (settings.min_length or 0) - tokens.shape[1])
    steps = (
        _steps(settings) if draws else {"temperature": 0.0, "repetition_penalty": settings.repetition_penalty or 1.0}
    )
    vocabulary = model.config.get_text_config().vocab_size
    seed = int(torch.randint(1 << 62, ())) if draws else 0  # so that torch.manual_seed makes an answer reproducible
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


def _refusal_of_settings(settings: Any, *, defaults: Mapping[str, object], others: Mapping[str, object]) -> str | None:
    """others: arguments that are not settings."""
    said = {
        name for name, value in settings.to_diff_dict().items() if value is not None and value != defaults.get(name)
    }
    unknown = sorted((said - _KNOWN) | {name for name, value in others.items() if value is not None})
    return f"{', '.join(unknown)}: transformers' loop has this alone" if unknown else None


def _refusal_of_prompts(tokens: Tensor, *, kept: Tensor, settings: Any, has_mask: bool) -> str | None:
    """kept: the attention mask, or ones."""
    if kept.shape != tokens.shape or not _is_filled_on_the_left(kept):
        return "attention_mask does not fill rows up on the left alone"
    if settings.repetition_penalty not in (None, 1.0) and not bool(kept.all()):
        return "repetition_penalty counts the padding, too"
    pad = settings.pad_token_id
    if not has_mask and pad is not None and bool((tokens == pad).any()):
        return "pad_token_id is in the prompts, and there is no attention_mask"
    return None


def _is_filled_on_the_left(kept: Tensor) -> bool:
    """Returns whether each row of a mask is padded only on the left, and has a token."""
    own = kept.bool()
    return own.dim() == 2 and bool(own[:, -1].all()) and bool((own[:, 1:] >= own[:, :-1]).all())


def _steps(settings: Any) -> dict[str, Any]:
    """Returns the sampling steps, which transformers applies in the engine's order."""
    return {
        "temperature": 1.0 if settings.temperature is None else settings.temperature,
        "top_k": settings.top_k or 0,
        "top_p": 1.0 if settings.top_p is None else settings.top_p,
        "min_p": settings.min_p or 0.0,
        "repetition_penalty": settings.repetition_penalty or 1.0,
    }


def _without(ends: list[int], *, until: int, vocabulary: int) -> Callable[[list[int]], Tensor]:
    """Returns a mask that excludes end tokens while an answer has fewer than `until` tokens."""
    everything = torch.ones(vocabulary, dtype=torch.bool)
    going_on = everything.clone()
    going_on[ends] = False
    return lambda answer: going_on if len(answer) < until else everything


def _padded(asked: Asked, *, answers: list[list[int]]) -> Tensor:
    longest = max(map(len, answers))
    before = asked.tokens.repeat_interleave(len(answers) // len(asked.tokens), dim=0)
    after = torch.tensor([answer + [asked.pad] * (longest - len(answer)) for answer in answers], dtype=before.dtype)
    return torch.cat([before, after], dim=1)
