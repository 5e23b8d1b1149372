"""Computes products with a model's weights by ztk's row kernels, on the compute device."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.placement import Placement
from ztk.inference.products import Affine, Product, in_groups, largest_of
from ztk.kernels import linear_rows, quantise_weight
from ztk.kernels.shared.fitting import GROUP
from ztk.kernels.shared.weight_formats import BLOCK


class RowsProduct(Product):
    """x [M, K] -> [M, N]. weight [N, K], or [E, N, K] of experts, in `form`, a format of `ztk.kernels`, with its scales, and bias [N]. Rows
    of int4 begin with `front` columns of another rank. wide: the result is fp32, for any dtype of x."""

    def __init__(self, affine: Affine, *, form: str, placement: Placement, wide: bool = False) -> None:
        if form == "plain":
            self.weight, self.scales = affine.weight.to(placement.device, placement.dtype).contiguous(), None
        else:
            full, own, self.front = in_groups(affine, group=BLOCK if form == "int4" else 1)
            full = full.to(placement.device, torch.float32)
            largest = None if form == "int4" or (found := largest_of(affine)) is None else found.to(full.device)
            weight, scales = quantise_weight(full, kind=form, moments=affine.moments, largest=largest)
            assert scales is not None, "formats of 8 and 4 bits have them"
            each = weight.shape[1] / full.shape[1]  # bytes of an input
            self.weight = weight[:, int(own.start * each) : int(own.stop * each)].contiguous()
            self.scales = scales if form != "int4" else scales[own.start // GROUP : own.stop // GROUP].clone()
        self.bias = None if affine.bias is None else affine.bias.to(placement.device, placement.dtype)
        self.shape = (affine.weight.shape[-2], affine.weight.shape[-1])
        self._exact, self._wide = placement.exact, wide
        self.nbytes = self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, activation: str = "none") -> Tensor:
        options = {"activation": activation, "exact": self._exact, "wide": self._wide}
        return linear_rows(self.padded(x), self.weight, self.scales, self.bias, residual, **options)

    def padded(self, x: Tensor) -> Tensor:
        """x [M, K] after zeros for the inputs of another rank."""
        return F.pad(x, (self.front, 0)) if self.front else x

    def tensors(self) -> dict[str, Tensor]:
        """Its memory by name, [*] of any dtype, on the device."""
        found = {name: getattr(self, name) for name in ("weight", "scales", "bias")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces its memory by tensors [*] of the same shapes and dtypes."""
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def settle(self, *, doubles: bool) -> None:
        """Does nothing: the kernels have one path for every number of rows."""

    @staticmethod
    def of(product: Product | None) -> "RowsProduct":
        """A product of a model whose placement has blocks."""
        assert isinstance(product, RowsProduct), "the placement's products are the kernels'"
        return product

    @classmethod
    def stacked(cls, products: "list[RowsProduct]") -> "RowsProduct":
        """The products of all experts as one."""
        first, found = products[0], cls.__new__(cls)
        found.weight, found.shape, found.front = torch.stack([one.weight for one in products]), first.shape, first.front
        found.scales, found.bias = (
            torch.stack([getattr(one, name) for one in products]) if getattr(first, name) is not None else None
            for name in ("scales", "bias")
        )
        found.nbytes = sum(one.nbytes for one in products)
        return found
