"""Where documents end in packed sequences.

[Note: Documents in a sequence]
With `data.packing=documents` a sequence has the same tokens as with `concatenate`, and what follows from the end tokens in it is:
- A token attends to its own document, of which the sequence may have a part only.
- Positions start at 0 behind every end token and at the start of the sequence, as Megatron's `reset_position_ids` and transformers'
  `DataCollatorWithFlattening` count. So a document has the numbers that it has alone, with learned positions, too.
- An end token predicts nothing: its target would be the first token of another document (Megatron's `eod_mask_loss`). torchtitan lets it
  count.
A micro-batch's weight compensates for the targets that do not count: the mean over ranks and micro-batches of `weight * mean loss` is the
mean over all targets of the step that count, whatever ranks and micro-batches divide it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

IGNORED = -100  # a target that does not count, as in torch


def num_targets(sequence: Tensor, *, end: int) -> int:
    """How many targets count of a sequence, tokens [T + 1]."""
    return len(sequence) - 1 - int((sequence[:-1] == end).sum())


def without_borders(targets: Tensor, *, tokens: Tensor, end: int) -> Tensor:
    """`targets` int64 [B, T], those of end tokens ignored. tokens: int64 [B, T]."""
    return targets.masked_fill(tokens == end, IGNORED)


def positions_of(tokens: Tensor, *, end: int) -> Tensor:
    """The place of each token in its document, int64 [B, T]: 0 at the start of a sequence and behind an end token. tokens: int64 [B, T]."""
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    behind_end = torch.zeros_like(tokens, dtype=torch.bool)
    behind_end[:, 1:] = tokens[:, :-1] == end
    starts = torch.where(behind_end, places, torch.zeros_like(places)).cummax(dim=1).values
    return places - starts


def share_of_targets(own: Sequence[int], *, total: int, parts: int) -> float:
    """The weight of a micro-batch: of its targets that count, among all of a step in `parts` micro-batches.

    own: `num_targets` of each of its sequences.
    """
    return sum(own) * parts / max(1, total)
