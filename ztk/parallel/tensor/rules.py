"""How a model and its modules are cut over the tensor-parallel ranks. The topology has the number of ranks that share a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPolicy:
    """How layers are cut over the tensor-parallel ranks.

    plan: module patterns to "column", "row", "vocabulary", "head", "column_gathered", "row_split", "partial", with a grain as in "column:64",
        or to a `TensorRule`. Defaults to the model's attribute `tensor_plan`, its `tp_plan`, or a plan derived from its modules.
    sequence_parallel: between tensor-parallel layers, norms and residuals work on each rank's part of the sequence: the same bytes on the
        wire, 1/n of the activations there (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
    """

    plan: Mapping[str, str | TensorRule] | None = None
    sequence_parallel: bool = False
