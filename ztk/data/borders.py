"""Document boundaries in packed sequences.

[Note: Documents in a sequence]
With `data.packing=documents` a sequence has the same tokens as with `concatenate`. The end tokens in it have these effects:
- A token attends only to its own document, of which the sequence may contain only a part.
- Positions restart at 0 after every end token and at the start of the sequence, as with Megatron's `reset_position_ids` and transformers'
  `DataCollatorWithFlattening`. So a document gets the same positions as alone, also with learned positions.
- The target of an end token is ignored, because it would be the first token of another document (Megatron's `eod_mask_loss`). torchtitan
  counts it. The weight of a micro-batch compensates for ignored targets: the mean over ranks and micro-batches of `weight * mean loss` is
  the mean over all counted targets of the step, for any number of ranks and micro-batches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

IGNORED = -100  # target to ignore, as in torch


def num_targets(sequence: Tensor, *, end: int) -> int:
    """Returns the number of counted targets in a sequence, tokens [T + 1]."""
    return len(sequence) - 1 - int((sequence[:-1] == end).sum())


def without_borders(targets: Tensor, *, tokens: Tensor, end: int) -> Tensor:
    """Returns `targets`, int64 [B, T], with IGNORED at end tokens. tokens: int64 [B, T]."""
    return targets.masked_fill(tokens == end, IGNORED)


def positions_of(tokens: Tensor, *, end: int) -> Tensor:
    """Returns the position of each token in its document, int64 [B, T]. tokens: int64 [B, T].

    Positions start at 0 at the start of a sequence and after an end token.
    """
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    behind_end = torch.zeros_like(tokens, dtype=torch.bool)
    behind_end[:, 1:] = tokens[:, :-1] == end
    starts = torch.where(behind_end, places, torch.zeros_like(places)).cummax(dim=1).values
    return places - starts


def share_of_targets(own: Sequence[int], *, total: int, parts: int) -> float:
    """Returns the weight of a micro-batch: its share of the step's `total` counted targets, times `parts` micro-batches.

    own: `num_targets` of each of its sequences.
    """
    return sum(own) * parts / max(1, total)
