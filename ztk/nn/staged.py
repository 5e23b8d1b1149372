"""A forward of one stage of a pipeline, `(stage, carry, micro-batch)`, for techniques that wrap it and need to know the sequences.

Of a micro-batch they use `args` and `kwargs` alone. Ranks of middle stages may have no micro-batch while they train: its arguments are
missing or None.
"""

from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Arguments(Protocol):
    """The arguments of one call of a model."""

    args: tuple
    kwargs: dict


def argument(batch: Arguments, *, index: int, name: str) -> Tensor | None:
    """One argument, by its place or by its name; None if it is missing."""
    return batch.args[index] if len(batch.args) > index else batch.kwargs.get(name)


def sequence_length(batch: Arguments, *, carry: object, parts: int) -> int:
    """Tokens of a whole sequence: of the micro-batch's first tensor [B, T, ...], else as a training pass's carry [B, T / parts, ...] tells.

    Raises ValueError without a micro-batch when nothing is trained: whether the carry is cut then depends on what is not there.
    """
    given = next((value for value in chain(batch.args, batch.kwargs.values()) if isinstance(value, Tensor)), None)
    if given is not None:
        return given.shape[1]
    first = next((leaf for leaf in pytree.tree_leaves(carry) if isinstance(leaf, Tensor)), None)
    if first is None or not torch.is_grad_enabled():
        raise ValueError(
            "this rank's micro-batch is None: a first stage needs its tokens, and outside of training every stage does where "
            "sequences are cut (topology.sequence above 1, or topology.sequence_parallel=true); pass it on all ranks"
        )
    return first.shape[1] * parts
