"""Log-likelihood of sequences of any length, in windows of the model's length."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

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
