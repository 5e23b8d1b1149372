"""Scores of texts: log-likelihoods of any length in windows, perplexity, and the likeliest of several continuations.

[Note: Choices] Prompt and choice are tokenised together, as in the model's training data. A token may then cross their boundary, or the
last tokens of the prompt may differ from the prompt's own tokens. All choices of an example are therefore scored from the first token in
which any of them differs from the prompt: they are conditioned on the same tokens, and the sum covers the same end of the prompt, if any,
and the choice. If the boundary is a token boundary for all choices, this is log p(choice | prompt), as in lm-evaluation-harness.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from ztk.inference.slots import common_length

_AT_ONCE = 64  # windows whose log-probabilities are in memory together


class Scorer(Protocol):
    """Computes log-probabilities: `Generator`, or the training engine (`ztk.train.engine.scoring`)."""

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of the model."""
        ...

    def score_ends(self, sequences: list[list[int]], *, counts: list[int]) -> list[float]:
        """For each sequence the sum of log p(token | those before it), natural, over its last `counts` tokens, fewer than it has.

        Raises:
            ValueError: a sequence that the model does not take.
            FloatingPointError: logits that are not finite.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Tokens `start` to `stop` of a sequence are computed; those from `scored` on count."""

    start: int
    scored: int
    stop: int


def windows(count: int, *, context: int, seq_len: int, stride: int) -> Iterator[Window]:
    """Windows of at most `seq_len` tokens in which each of a sequence's `count` tokens counts once, except the first `context`.

    The first window begins with the sequence. Each later one ends `stride` tokens after the previous one and scores those tokens, so that
    each has at least seq_len - stride tokens before it, or all that exist.

    Raises:
        ValueError: a context of no token, no room after it, or a stride that leaves tokens out.
    """
    if not 1 <= context < seq_len:
        raise ValueError(
            f"seq_len={seq_len}: must be more than the {context} tokens before the text, which are one at least"
        )
    if not 1 <= stride < seq_len:
        raise ValueError(f"stride={stride}: must be 1 or more and below seq_len={seq_len}")
    scored, stop = context, min(seq_len, count)
    while scored < count:
        yield Window(start=max(0, stop - seq_len), scored=scored, stop=stop)
        scored, stop = stop, min(stop + stride, count)


def log_likelihoods(
    scorer: Scorer,
    *,
    sequences: list[list[int]],
    context: int,
    seq_len: int,
    stride: int,
    on_scored: Callable[[int], None] | None = None,
) -> list[float]:
    """For each sequence the sum of log p(token | those before it in its window), natural, over all but its first `context` tokens.

    on_scored: is called with the number of tokens that were scored since its last call.

    Raises:
        ValueError: as `windows` and `Scorer.score_ends` do.
        FloatingPointError: logits that are not finite.
    """
    sums = [0.0] * len(sequences)
    planned = chain.from_iterable(
        ((number, window) for window in windows(len(tokens), context=context, seq_len=seq_len, stride=stride))
        for number, tokens in enumerate(sequences)
    )
    while several := list(islice(planned, _AT_ONCE)):
        found = scorer.score_ends(
            [sequences[number][window.start : window.stop] for number, window in several],
            counts=[window.stop - window.scored for _, window in several],
        )
        for (number, _), value in zip(several, found, strict=True):
            sums[number] += value
        if on_scored is not None:
            on_scored(sum(window.stop - window.scored for _, window in several))
    return sums


def perplexity(scorer: Scorer, *, tokens: list[int]) -> float:
    """exp of the mean of -log p(token | those before it in its piece), over pieces of at most the model's length.

    Raises:
        ValueError: fewer than two tokens, or one outside the vocabulary.
        FloatingPointError: logits that are not finite.
    """
    if len(tokens) < 2:
        raise ValueError(f"perplexity needs two tokens at least, not {len(tokens)}: use a longer text")
    size = scorer.max_len
    pieces = [piece for start in range(0, len(tokens), size) if len(piece := tokens[start : start + size]) > 1]
    counts = [len(piece) - 1 for piece in pieces]
    return math.exp(-sum(scorer.score_ends(pieces, counts=counts)) / sum(counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChoices:
    """context: tokens that all choices follow, one at least. endings: the tokens of each choice that count. is_cut: the beginning of the
    prompt was left out, because the model does not take as much."""

    context: list[int]
    endings: list[list[int]]
    is_cut: bool = False

    def cut_to(self, size: int) -> "EncodedChoices":
        """The same with the end of the context that fits into `size` tokens together with the longest choice.

        Raises:
            ValueError: a choice does not fit.
        """
        longest = max(map(len, self.endings))
        if longest >= size:
            raise ValueError(
                f"a choice has {longest} tokens, and the model is given {size} with one before it; shorten the choice"
            )
        room = size - longest
        if len(self.context) <= room:
            return self
        return EncodedChoices(context=self.context[-room:], endings=self.endings, is_cut=True)


def encode_choices(
    prompt: str, *, choices: list[str], encode: Callable[[str], list[int]], begin: tuple[int, ...], first: int | None
) -> EncodedChoices:
    """Tokens of a prompt with each choice. encode: without special tokens. begin: tokens before every text. first: the token before a
    choice that has nothing else before it.

    Raises:
        ValueError: a choice without a token, or nothing before the choices.
    """
    alone = encode(prompt)
    joined = [encode(prompt + choice) for choice in choices]
    if not all(joined):
        raise ValueError("a choice has no token; write its text")
    shared = min(min(common_length(alone, other=tokens), len(tokens) - 1) for tokens in joined)
    context = [*begin, *joined[0][:shared]]
    if not context:
        if first is None:
            raise ValueError(
                "nothing is before the choices, and the tokenizer has neither a bos_token nor an eos_token; write a prompt"
            )
        context = [first]
    return EncodedChoices(context=context, endings=[tokens[shared:] for tokens in joined])


def score_choices(scorer: Scorer, *, examples: list[EncodedChoices]) -> list[list[float]]:
    """The log-likelihood, natural, of each choice of each example.

    Raises:
        ValueError: as `Scorer.score_ends` does.
        FloatingPointError: logits that are not finite.
    """
    found = iter(
        scorer.score_ends(
            [example.context + ending for example in examples for ending in example.endings],
            counts=[len(ending) for example in examples for ending in example.endings],
        )
    )
    return [[next(found) for _ in example.endings] for example in examples]
