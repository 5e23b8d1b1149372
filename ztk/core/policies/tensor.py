"""How a model and its modules are cut over the tensor-parallel ranks. The topology has the number of ranks that share a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ztk.core.policies.key import When, key


class Style(Enum):
    """The cut of a module's weight [out, in] (an embedding's: [vocabulary, width])."""

    column = "column"  # each rank computes some of the outputs
    row = "row"  # each rank reads some of the inputs; results are summed
    vocabulary = "vocabulary"  # each rank has some of the rows; results are summed
    head = "head"  # as column; the logits stay cut for the loss, and are gathered without a loss
    column_gathered = "column_gathered"  # as column, and the outputs are gathered
    row_split = "row_split"  # as row, from full inputs on every rank
    partial = "partial"  # a copy on every rank inside layers that are cut; each rank computes a part of its gradient
    loss = "loss"  # a module without weights that takes cut logits: see `ztk.parallel.tensor.loss`


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRule:
    """How one module is cut: in multiples of `grain` elements, such as a head's size."""

    style: Style
    grain: int = 1


TENSOR_STYLES = tuple(style.value for style in Style if style is not Style.loss)  # the words of a plan


_TENSOR = When(
    "topology=tp2 and others with topology.tensor above 1", lambda config, machine: config.topology.tensor > 1
)


@dataclass(frozen=True, kw_only=True)
class TensorPolicy:
    """How layers are cut over the tensor-parallel ranks.

    plan: module patterns to one of `TENSOR_STYLES`, with a grain as in "column:64", or to a `TensorRule`.
    sequence_parallel: the same bytes on the wire, and 1/n of the activations between tensor-parallel layers (Korthikanti et al. 2022,
        https://arxiv.org/abs/2205.05198).
    """

    plan: Mapping[str, str | TensorRule] | None = key(
        "tensor plan of an own or a transformers model: patterns of module names (* for a part of a name) to "
        f"{', '.join(TENSOR_STYLES)}, with :N for multiples of N outputs or inputs, such as a head's size; null: the model's attribute "
        "tensor_plan, its tp_plan, or a plan that follows from its modules",
        optional=True,
        acts=_TENSOR,
        line=dict[str, Any],
    )
    sequence_parallel: bool = key(
        "norms and residuals work on a part of the sequence per tensor-parallel rank (Megatron's sequence parallelism)",
        default=False,
        acts=_TENSOR,
    )


def tensor_rule(pattern: str, *, text: object) -> tuple[str, int]:
    """Returns style and grain of a tensor plan's entry, such as "column" or "column:64". Raises ValueError for other entries."""
    style, has_grain, grain = str(text).partition(":")
    if style not in TENSOR_STYLES or (has_grain and not (grain.isdecimal() and int(grain))):
        raise ValueError(
            f"tensor plan {pattern}={text}: must be one of {', '.join(TENSOR_STYLES)}, or with :N, N from 1 on"
        )
    return style, int(grain or 1)
