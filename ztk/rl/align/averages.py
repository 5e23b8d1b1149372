"""What a loss over tokens is a mean of."""

import torch
from torch import Tensor


def token_weights(
    lengths: Tensor, *, counts: Tensor, average: str, samples: int, tokens: int, max_tokens: int
) -> Tensor:
    """The weight of every token of packed answers in the mean over all ranks: float32 [T]; T is the sum of `lengths`, int64 [S].

    counts: whether an answer does, bool [S]. samples, tokens: those that count in the step over all ranks. average: tokens: all tokens weigh
    alike; sequence: all answers do, and an answer's tokens alike; constant: a token weighs 1 / (samples * max_tokens).
    """
    if average == "tokens":
        own = torch.full(lengths.shape, 1 / max(1, tokens))
    elif average == "constant":
        own = torch.full(lengths.shape, 1 / (max(1, samples) * max_tokens))
    else:
        own = 1 / lengths.clamp(min=1).float() / max(1, samples)
    return (own * counts).repeat_interleave(lengths)
