"""The mean over tokens that a loss takes."""

import torch
from torch import Tensor


def token_weights(
    lengths: Tensor, *, counts: Tensor, average: str, samples: int, tokens: int, max_tokens: int
) -> Tensor:
    """Returns the weight of every token of packed answers in the mean over all ranks: float32 [T]. T is the sum of `lengths`, int64 [S].

    counts: whether an answer counts, bool [S]. samples, tokens: counted ones in the step over all ranks. average: tokens gives equal
    weight to all tokens; sequence gives equal weight to all answers and to the tokens of an answer; constant gives each token 1 /
    (samples * max_tokens).
    """
    if average == "tokens":
        own = torch.full(lengths.shape, 1 / max(1, tokens))
    elif average == "constant":
        own = torch.full(lengths.shape, 1 / (max(1, samples) * max_tokens))
    else:
        own = 1 / lengths.clamp(min=1).float() / max(1, samples)
    return (own * counts).repeat_interleave(lengths)
