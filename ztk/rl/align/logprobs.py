"""Log-probabilities of the tokens of answers."""

import torch
from torch import Tensor

from ztk.rl.align.sequences import Sequences


def token_logprobs(logits: Tensor, *, sequences: Sequences) -> Tensor:
    """Returns log p(token | previous tokens of its sequence) from packed logits [T, V] -> [T]; 0 for tokens that do not count.

    Logits at a token predict the next one. The result is float64 for float64 logits, else float32. Only counted rows are read, and the
    backward keeps one copy of them.
    """
    return answer_logprobs(logits.index_select(0, sequences.answer.nonzero().squeeze(1) - 1), sequences=sequences)


def answer_logprobs(rows: Tensor, *, sequences: Sequences) -> Tensor:
    """Same as `token_logprobs`, from only the rows of logits that predict the N counted tokens: [N, V] -> [T]."""
    index = sequences.answer.nonzero().squeeze(1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    chosen = rows.gather(1, sequences.tokens[index].unsqueeze(1)).squeeze(1)
    found = chosen - rows.logsumexp(dim=1)
    return found.new_zeros(len(sequences.tokens)).index_copy(0, index, found)
