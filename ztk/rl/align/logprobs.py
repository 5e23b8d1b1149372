"""Log-probabilities of the tokens of answers."""

import torch
from torch import Tensor

from ztk.rl.align.sequences import Sequences


def token_logprobs(logits: Tensor, *, sequences: Sequences) -> Tensor:
    """log p(token | those before it in its sequence), of packed logits [T, V] -> [T]; 0 for tokens that do not count.

    Logits at a token predict the next one. float64 for float64 logits, else float32. Only rows that count are read: the backward keeps one
    copy of them.
    """
    return answer_logprobs(logits.index_select(0, sequences.answer.nonzero().squeeze(1) - 1), sequences=sequences)


def answer_logprobs(rows: Tensor, *, sequences: Sequences) -> Tensor:
    """As `token_logprobs`, of the rows of logits alone that predict the N tokens that count: [N, V] -> [T]."""
    index = sequences.answer.nonzero().squeeze(1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    chosen = rows.gather(1, sequences.tokens[index].unsqueeze(1)).squeeze(1)
    found = chosen - rows.logsumexp(dim=1)
    return found.new_zeros(len(sequences.tokens)).index_copy(0, index, found)
