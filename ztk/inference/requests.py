"""A submitted request, its sequences, and the checks of its tokens and its adapter."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ztk.inference.masks import masks_tokens, packed_mask
from ztk.inference.policy import Completion, GrammarState, PromptLogprob, SamplingParams
from ztk.inference.sample import Draw, Drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A submitted prompt. `id` is in every `Output` of its answers. adapter: its name, or None for the base."""

    id: int
    prompt: list[int]
    sampling: SamplingParams
    adapter: str | None = None


Owner = tuple[int, str]


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One answer of one request. tokens: prompt and answer. computed: how many of them have keys and values in the slot.

    limit: most tokens of the answer. adapter: its number, or 0 for the base. state: the request's grammar, or None. drawn: the
    answer's tokens. prompt_logprobs: one for each token of the prompt. cause: an exception that ended it.
    """

    request_id: int
    sample: int
    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    limit: int
    adapter: int = 0
    state: GrammarState | None = None
    slot: int = -1
    computed: int = 0
    drawn: list[Drawn] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cause: Exception | None = None

    @property
    def owner(self) -> Owner:
        """Sequences of one owner may share keys and values: the adapter that computes them, and the salt of the request."""
        return self.adapter, self.sampling.cache_salt

    @property
    def longest(self) -> int:
        """Maximum number of tokens at the end."""
        return self.prompt_length + self.limit

    @property
    def answer(self) -> list[int]:
        """Tokens drawn so far."""
        return self.tokens[self.prompt_length :]

    def draw(self, drafts: list[int], *, vocabulary: int) -> Draw:
        """The draw after these guesses. Raises NothingDrawn as `packed_mask`."""
        tokens, mask = [*self.tokens, *drafts] if drafts else self.tokens, None
        if masks_tokens(self.sampling):
            answer = tokens[self.prompt_length :]
            mask = packed_mask(self.sampling, state=self.state, answer=answer, size=vocabulary)
        return Draw(
            sampling=self.sampling, tokens=tokens, prompt_length=self.prompt_length, sample=self.sample, mask=mask
        )

    def completion(self) -> Completion:
        """The result of `generate` for this sequence."""
        asked = self.sampling
        return Completion(
            tokens=self.answer,
            logprobs=torch.tensor([one.logprob for one in self.drawn], dtype=torch.float32),
            processed_logprobs=torch.tensor([one.processed_logprob for one in self.drawn], dtype=torch.float32),
            finish_reason=self.finish_reason or "error",
            top_logprobs=[one.top or {} for one in self.drawn] if asked.logprobs else None,
            prompt_logprobs=logprob_values(self.prompt_logprobs) if asked.prompt_logprobs else None,
            kept=[one.kept for one in self.drawn if one.kept is not None] or None,
            error=self.error,
        )


def logprob_values(logprobs: list[PromptLogprob]) -> Tensor:
    """Without the likeliest tokens: fp32 [len(logprobs)]."""
    return torch.tensor([item.value for item in logprobs], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Rows of one sequence in a step: tokens from `start` on; the last `drafts` of them are guesses."""

    sequence: Sequence
    start: int
    tokens: list[int]
    drafts: int = 0


def check_tokens(prompt: list[int], *, limit: int, biased: Iterable[int] = (), vocabulary: int, max_len: int) -> None:
    """Raises ValueError for an empty prompt, a token outside the vocabulary, and more tokens than `max_len` with an answer of up to `limit`.
    biased: tokens that the sampling names."""
    if not prompt:
        raise ValueError("the prompt is empty: begin with the model's first token, or a newline")
    for kind in {*map(type, prompt), *map(type, biased)} - {int}:
        if issubclass(kind, bool) or not hasattr(kind, "__index__"):
            raise ValueError(f"a token is a {kind.__name__}: tokens are integers")
    odd = next((token for token in (*prompt, *biased) if not 0 <= token < vocabulary), None)
    if odd is not None:
        raise ValueError(f"token {odd} is outside the vocabulary of {vocabulary}")
    if len(prompt) + limit > max_len:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and an answer of up to {limit} are more than the {max_len} tokens of this model: "
            "shorten the prompt or lower max_tokens"
        )


def adapter_number(name: str | None, *, among: Iterable[str]) -> int:
    """The number of an adapter in spans, 0 of the base. Raises ValueError for a name that is not in `among`, a generator's adapters."""
    names = [None, *among]
    if name not in names:
        has = f"has {', '.join(map(str, names[1:]))}" if names[1:] else "has none"
        raise ValueError(f"adapter {name!r}: this generator {has}; pass Generator(adapters=), or name one of them")
    return names.index(name)
