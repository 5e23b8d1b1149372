"""Sampling a sequence, and its results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from ztk.core.policies.inference import LOGIT_BIAS, SamplingConfig
from ztk.core.policies.key import key_faults
from ztk.core.policies.ranges import COUNT, COUNT_OR_ZERO, refuse

_OTHERS = {"vocabulary": COUNT, "min_tokens": COUNT_OR_ZERO}  # of fields that no key sets


class GrammarState(Protocol):
    """State of one answer in a grammar. Used by one thread at a time."""

    def mask(self, answer: list[int]) -> Tensor | None:
        """int32 [words]: the tokens that may follow `answer`, as `ztk.inference.masks` packs them. None if the grammar does
        not lead to `answer`.

        The last tokens of `answer` may be guesses, which a later call leaves out again. Raises ValueError where the grammar fails.
        """
        ...

    def advance(self, answer: list[int]) -> bool:
        """Appends one token to the answer. Returns whether it is complete, so that only its end may follow. Begins the next mask."""
        ...


class Grammar(Protocol):
    """A language for the answers of one request."""

    def begin(self) -> GrammarState:
        """The state before the first token of one answer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a sequence is drawn. The order of the steps is vLLM's: bias and penalties, temperature, top-k, top-p, min-p.

    temperature: 0 takes the likeliest token, of equal ones the first. top_k: 0 keeps all. presence_penalty, frequency_penalty: OpenAI's,
    over the answer; repetition_penalty: the penalty of Keskar et al. 2019 (arXiv 1909.05858), over prompt and answer.
    stop_token_ids: end the answer, and are its last token. n: answers per prompt.
    seed, draw_key: a draw is a function only of (seed, draw_key, number of the answer, position) and of the probabilities. An integer is a
        key of `ztk.inference.uniforms`, which stands for all of these but the position.
    logprobs: number of the likeliest tokens to return per position. prompt_logprobs: also returns log-probabilities of the prompt's tokens.
    vocabulary: only tokens below it are drawn, for a model that has more tokens than its tokenizer; log-probabilities of the model's own
        distribution are over all of them. Defaults to all. A token_mask would have the same effect, more slowly.
    token_mask: called with the answer so far, returns a bool tensor [V] of the tokens that are allowed.
    min_tokens: none of `stop_token_ids` is drawn before this many tokens. allowed_token_ids: only these are drawn; empty for all.
    bad_words: token sequences that no answer contains. grammar: constrains answers; an answer that is complete in it ends with "stop".
    cache_salt: keys and values of a prompt are reused only for requests with the same salt.
    fp32_logprobs: draws from log_softmax(logits / temperature) in fp32, with a trainer's bits, instead of double precision, and returns
    these as `processed_logprobs`. Requires that no steps are used except the temperature and top-k, top-p and min-p, over whose tokens
    the softmax is.

    Raises:
        ValueError: a number is out of range, or fp32_logprobs with a step that a trainer does not make.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    seed: int = 0
    draw_key: tuple[object, ...] | int = ()
    logprobs: int = 0
    prompt_logprobs: bool = False
    vocabulary: int | None = None
    token_mask: Callable[[list[int]], Tensor] | None = None
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    cache_salt: str = ""
    fp32_logprobs: bool = False

    def __post_init__(self) -> None:
        refuse(key_faults(self, keys=SamplingConfig, section="sampling", others=_OTHERS))
        for token, bias in self.logit_bias.items():
            if reason := LOGIT_BIAS.fault(bias):
                raise ValueError(f"sampling.logit_bias={bias} of token {token}: {reason}")
        if not self.fp32_logprobs:
            return
        plain = SamplingParams()
        others = (
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "vocabulary",
            "token_mask",
            "min_tokens",
            "allowed_token_ids",
            "bad_words",
            "grammar",
        )
        changed = [name for name in others if getattr(self, name) != getattr(plain, name)]
        changed += ["logit_bias"] * bool(self.logit_bias) + ["temperature"] * (self.temperature == 0)
        if changed:
            raise ValueError(
                f"fp32_logprobs=True goes with a temperature above 0, top_k, top_p and min_p alone: leave out {', '.join(changed)}"
            )

    @property
    def named_tokens(self) -> list[int]:
        """All tokens that must be in the vocabulary."""
        words = [token for word in self.bad_words for token in word]
        return [*self.logit_bias, *self.allowed_token_ids, *words]


@dataclass(kw_only=True)
class Completion:
    """One answer. tokens: its ids. finish_reason: stop, length or error.

    logprobs: fp32 [tokens], log-softmax of the model's own logits at each token. processed_logprobs: the same after the sampling steps, the
    distribution that the token was drawn from. top_logprobs: per token the likeliest ones and their raw log-probabilities, if requested.
    prompt_logprobs: fp32 [prompt - 1], of each prompt token given the tokens before it, if requested. kept: int32 [kept] for each token,
    the tokens that it was drawn from, if `fp32_logprobs` is used with top-k, top-p or min-p.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: Tensor
    processed_logprobs: Tensor
    finish_reason: str
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: Tensor | None = None
    kept: list[Tensor] | None = None
    error: str | None = None


class PromptLogprob(NamedTuple):
    """Of one token of a prompt: its raw log-probability, the likeliest tokens with theirs, and its rank, the number of tokens that are as
    likely or likelier."""

    value: float
    top: dict[int, float]
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """One token of one answer. sample: number of the answer. token: None if the sequence ended with an error.

    finish_reason: stop, length, error or cancelled, or None while the answer continues. logprob: raw, of the model's own logits.
    processed_logprob: from the distribution that the token was drawn from, as in `Completion`. top_logprobs: the likeliest tokens with their
    raw log-probabilities, if requested. prompt_logprobs: come with an answer's first token, for the prompt's tokens from the second on, if
    requested. is_by_request: the fields of the request have caused the error, such as masks that allow no token.
    version: name of the weights that drew the token, as in `Generator.switch`; None before the first call. kept: the tokens that this one was
    drawn from, as in `Completion`, int32 [kept].
    """

    request_id: int
    sample: int
    token: int | None
    logprob: float
    processed_logprob: float
    finish_reason: str | None = None
    error: str | None = None
    top_logprobs: dict[int, float] | None = None
    prompt_logprobs: "list[PromptLogprob] | None" = None
    is_by_request: bool = False
    version: str | None = None
    kept: Tensor | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None
