"""Perplexity of quantised weights on the same text as the original's."""

import math

from ztk.inference.engine import Generator


def perplexity(generator: Generator, *, tokens: list[int]) -> float:
    """exp of the mean of -log p(token | those before it in its piece), over pieces of at most the model's length.

    Raises:
        ValueError: fewer than two tokens, or one outside the vocabulary.
        FloatingPointError: logits that are not finite.
    """
    if len(tokens) < 2:
        raise ValueError(f"perplexity needs two tokens at least, not {len(tokens)}: use a longer text")
    size = generator.max_len
    pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    scores = generator.score([piece for piece in pieces if len(piece) > 1])
    return math.exp(-sum(float(score.double().sum()) for score in scores) / sum(len(score) for score in scores))
