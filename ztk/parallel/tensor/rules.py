"""How one module is cut over the tensor-parallel ranks."""

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
