"""The part of each weight that a tensor-parallel rank computes with: heads, inner columns and a part of the vocabulary (Shoeybi et al.
2019, https://arxiv.org/abs/1909.08053). It follows from the description alone, so every family can be cut, independent of its modules'
names."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from ztk.inference.describe import Description
from ztk.inference.products import Affine

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
        heads, keys = description.heads, description.kv_heads
        if heads % self.size or (keys % self.size and self.size % keys):
            raise ValueError(
                f"topology.tensor={self.size}: {heads} query heads and {keys} key heads cannot be divided by it; use a common divisor of both"
            )
        return replace(description, heads=heads // self.size, kv_heads=max(1, keys // self.size))

    def query(self, full: Affine, *, description: Description) -> Affine:
        """The rows of this rank's query heads."""
        rows = description.heads * description.head_dim // self.size
        return self.outputs(full, part=range(self.rank * rows, (self.rank + 1) * rows))

    def key(self, full: Affine, *, description: Description) -> Affine:
        """The rows of the key (or value) heads that this rank's query heads read; several ranks have one if there are fewer of them."""
        keys, size = description.kv_heads, description.head_dim
        first = self.rank * keys // self.size * size
        return self.outputs(full, part=range(first, first + max(1, keys // self.size) * size))

    def out(self, full: Affine, *, description: Description) -> Affine:
        """The columns of this rank's query heads. One rank adds the bias."""
        columns = description.heads * description.head_dim // self.size
        return self.inputs(full, part=range(self.rank * columns, (self.rank + 1) * columns))

    def inner(self, *, gate: Affine | None, up: Affine, down: Affine) -> tuple[Affine | None, Affine, Affine]:
        """This rank's inner columns of an MLP: gate, up, down."""
        part = self.inner_of(up.weight.shape[0])
        own = None if gate is None else self.outputs(gate, part=part)
        return own, self.outputs(up, part=part), self.inputs(down, part=part)

    def vocabulary(self, full: Affine) -> Affine:
        """This rank's rows of the head, padded with zeros to the same number on all ranks."""
        if self.size == 1:
            return full
        total = full.weight.shape[0]
        rows = -(-total // self.size)
        start, stop = min(self.rank * rows, total), min((self.rank + 1) * rows, total)
        part, missing = self.outputs(full, part=range(start, stop)), rows - (stop - start)
        bias = None if part.bias is None else F.pad(part.bias, (0, missing))
        return Affine(weight=F.pad(part.weight, (0, 0, 0, missing)), bias=bias)

    def inner_of(self, width: int) -> range:
        """This rank's part of inner columns: groups divided as evenly as possible, so that no rank is empty."""
        grain = _GROUP if width >= self.size * _GROUP else 1
        groups = -(-width // grain)
        start, stop = (rank * groups // self.size * grain for rank in (self.rank, self.rank + 1))
        return range(start, min(stop, width))

    def outputs(self, full: Affine, *, part: range) -> Affine:
        """The part of a linear layer for these outputs."""
        if self.size == 1:
            return full
        bias = None if full.bias is None else full.bias[part.start : part.stop]
        return Affine(weight=full.weight[part.start : part.stop], bias=bias)

    def inputs(self, full: Affine, *, part: range) -> Affine:
        """The part of a linear layer for these inputs, with steps of all inputs if it is quantised. One rank adds the bias."""
        if self.size == 1:
            return full
        weight = full.weight[:, part.start : part.stop].contiguous()
        return Affine(weight=weight, bias=full.bias if self.rank == 0 else None, full=full.weight, start=part.start)


def own_slopes(slopes: Tensor, *, cut: Cut) -> Tensor:
    """ALiBi's slopes, fp32 [H], of this rank's heads."""
    return slopes.chunk(cut.size)[cut.rank]
