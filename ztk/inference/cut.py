"""The part of each weight that a tensor-parallel rank computes with: heads, inner columns and a part of the vocabulary (Shoeybi et al.
2019, https://arxiv.org/abs/1909.08053). It follows from the description alone, so every family can be cut, independent of its modules'
names."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch.nn.functional as F

from ztk.inference.describe import Description
from ztk.inference.products import Affine, UnreadAffine

Linear = TypeVar("Linear", Affine, UnreadAffine)  # an unread one stays unread
_GROUP = 128  # a block of int4: a rank has full blocks where there are enough


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def own(self, description: Description) -> Description:
        """The description of this rank's part of the model: its heads.

        Raises:
            ValueError: the heads cannot be divided.
        """
        queries, keys = self.heads(description)
        return replace(description, heads=len(queries), kv_heads=len(keys))

    def heads(self, description: Description, *, equal: bool = False) -> tuple[range, range]:
        """This rank's query heads, and the key heads that they read: as even as possible: 9 and 3 heads on two ranks are 6 and 2, 3 and 1.
        Several ranks have one key head if there are fewer of them. equal: every rank needs as many heads.

        Raises:
            ValueError: the heads cannot be divided.
        """
        heads, keys, size = description.heads, description.kv_heads, self.size
        equal = equal or keys < size or description.qk_norm == "all"  # such a norm joins equal parts of all ranks
        if equal and (heads % size or (keys % size and size % keys)):
            raise ValueError(
                f"topology.tensor={size}: {heads} query heads and {keys} key heads cannot be divided by it; use a common divisor of both"
            )
        if keys < size:
            key = self.rank * keys // size
            return range(self.rank * heads // size, (self.rank + 1) * heads // size), range(key, key + 1)
        # Rounded up: the first rank, which decides how much memory all have, has the most heads.
        first, stop = (-(-rank * keys // size) for rank in (self.rank, self.rank + 1))
        return range(first * heads // keys, stop * heads // keys), range(first, stop)

    def query(self, full: Linear, *, description: Description) -> Linear:
        """The rows of this rank's query heads."""
        return self.outputs(full, part=_elements(self.heads(description)[0], of=description))

    def key(self, full: Linear, *, description: Description) -> Linear:
        """The rows of the key (or value) heads that this rank's query heads read."""
        return self.outputs(full, part=_elements(self.heads(description)[1], of=description))

    def out(self, full: Linear, *, description: Description) -> Linear:
        """The columns of this rank's query heads. One rank adds the bias."""
        return self.inputs(full, part=_elements(self.heads(description)[0], of=description))

    def inner(self, *, gate: Linear | None, up: Linear, down: Linear) -> tuple[Linear | None, Linear, Linear]:
        """This rank's inner columns of an MLP: gate, up, down."""
        part = self.inner_of(up.weight.shape[0])
        own = None if gate is None else self.outputs(gate, part=part)
        return own, self.outputs(up, part=part), self.inputs(down, part=part)

    def vocabulary(self, full: Affine) -> Affine:
        """This rank's rows of the head, padded with zeros to the same number on all ranks."""
        return self.padded(self.tokens(full), vocabulary=full.weight.shape[0])

    def tokens(self, full: Linear) -> Linear:
        """This rank's rows of the head or of the embedding; fewer on the last ranks."""
        total = full.weight.shape[0]
        rows = -(-total // self.size)
        return self.outputs(full, part=range(min(self.rank * rows, total), min((self.rank + 1) * rows, total)))

    def padded(self, own: Affine, *, vocabulary: int) -> Affine:
        """Adds rows of zeros to the rows of `tokens`, so that all ranks have the same number. vocabulary: rows of all ranks together."""
        if not (missing := -(-vocabulary // self.size) - own.weight.shape[0]):
            return own
        bias = None if own.bias is None else F.pad(own.bias, (0, missing))
        return Affine(weight=F.pad(own.weight, (0, 0, 0, missing)), bias=bias)

    def inner_of(self, width: int) -> range:
        """This rank's part of inner columns: groups divided as evenly as possible, so that no rank is empty."""
        grain = _GROUP if width >= self.size * _GROUP else 1
        groups = -(-width // grain)
        start, stop = (rank * groups // self.size * grain for rank in (self.rank, self.rank + 1))
        return range(start, min(stop, width))

    def outputs(self, full: Linear, *, part: range) -> Linear:
        """The part of a linear layer for these outputs."""
        if self.size == 1:
            return full
        rows = slice(part.start, part.stop)
        return replace(full, weight=full.weight[rows], bias=None if full.bias is None else full.bias[rows])

    def inputs(self, full: Linear, *, part: range) -> Linear:
        """The part of a linear layer for these inputs, with the full weight for steps of all inputs. One rank adds the bias."""
        if self.size == 1:
            return full
        bias = full.bias if self.rank == 0 else None
        own = full.weight[:, part.start : part.stop]
        return replace(full, weight=own, bias=bias, full=full.weight, start=part.start, columns=len(part))


def _elements(heads: range, *, of: Description) -> range:
    return range(heads.start * of.head_dim, heads.stop * of.head_dim)
