"""Helpers for techniques that wrap the forward of a pipeline stage, `(stage, carry, micro-batch)`, and need the sequence length.

They read only `args` and `kwargs` of a micro-batch. Ranks of middle stages may have no micro-batch in training: its arguments are missing
or None.
"""

from dataclasses import Field
from itertools import chain
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Arguments(Protocol):
    """The arguments of one call of a model, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    args: tuple
    kwargs: dict


def argument(batch: Arguments, *, index: int, name: str) -> Tensor | None:
    """One argument, of any shape, by position or by name; None if it is missing."""
    return batch.args[index] if len(batch.args) > index else batch.kwargs.get(name)


def sequence_length(batch: Arguments, *, carry: object, parts: int) -> int:
    """Tokens T of a full sequence: from the micro-batch's first tensor [B, T, ...], else from a training pass's carry [B, T / parts, ...].

    Raises ValueError without a micro-batch outside of training, where the carry may or may not be cut.
    """
    given = next((value for value in chain(batch.args, batch.kwargs.values()) if isinstance(value, Tensor)), None)
    if given is not None:
        return given.shape[1]
    first = next((leaf for leaf in pytree.tree_leaves(carry) if isinstance(leaf, Tensor)), None)
    if first is None or not torch.is_grad_enabled():
        raise ValueError(
            "this rank's micro-batch is None. A first stage needs its tokens; outside of training every stage does if "
            "sequences are cut (topology.sequence above 1, or topology.sequence_parallel=true); pass it on all ranks"
        )
    return first.shape[1] * parts
