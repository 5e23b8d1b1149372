"""Weights in 8 and 4 bits, and products with them.

[Note: Quantised weights]
int8: one scale per output channel, w = s q with q in [-127, 127]. int4: groups of 32 inputs, w = s (q - 8) + z with q in [0, 15], 5 bits
per weight with s and z, which [Note: Fitting int4] in ztk/kernels/shared/fitting.py chooses; there scales and zeros are bf16, and a weight
is rounded with the scale as it is stored.

If ranks share the inputs of a layer, scales are computed over all inputs, and groups begin at one rank's groups, so they compute with the
same weights as one rank: a rank's part of the first group follows zeros.

int8 products are exact sums of integers, so a row has the same bits for every number of rows. A row of inputs becomes x = t (u + l / 2p)
with one step t and integers u and l in [-p, p], two rows of one product, |x - rounded| <= t / 4p, with p = 127. Processors without VNNI add
two products in 16 bits, into which only those with p = 63 fit. int4 products are torch's for bf16 rows: rows are rounded to bf16
(2^-8 relative), multiplied by the widened weights, summed in fp32 and rounded to bf16. The bias is added in fp32. Embeddings, norms, routers
and biases stay in fp32, and the head is int8 in both, because its errors go straight into the logits.

Measured on one core of a Xeon with AMX, weight 3072 x 768, milliseconds for 1 / 8 / 32 / 512 rows: fp32 0.75 / 0.96 / 1.7 / 16, int8
0.32 / 0.49 / 0.90 / 11, with bf16 rows in place of two planes 0.39 / 0.94 / 2.8 / 40 and 20 times the error. A call costs 0.05 ms.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.products import Affine, Product, in_groups, largest_of
from ztk.kernels import quantise_weight
from ztk.kernels.shared.fitting import GROUP, fit_weight

_OUTPUTS = 16  # int4: outputs are packed by so many
_STEPS8 = 127


def _int8_linear(rows: Tensor, *, steps: Tensor, scale: Tensor, plane: int) -> Tensor:
    """rows uint8 [M, in] with `plane` + 1 for 0, packed steps int8 [out, in], scale fp32 [out] -> fp32 [M, out]."""
    zeros = torch.zeros(1, dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise.default(
        rows, 1.0, plane + 1, steps, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def largest_step() -> int:
    """p of [Note: Quantised weights] on this processor: the sum of the largest products shows whether it is exact with 127."""
    steps = torch.ops.onednn.qlinear_prepack(torch.full((16, 64), _STEPS8, dtype=torch.int8), None)
    found = _int8_linear(torch.full((2, 64), 255, dtype=torch.uint8), steps=steps, scale=torch.ones(16), plane=127)
    return 127 if found.eq(64 * 127 * _STEPS8).all() else 63


def quantise_int4(weight: Tensor, *, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight fp32 [out, in], in a multiple of 32 -> int32 [out, in] of 0 to 15, and scale and zero bf16 [in / 32, out, 2]. moments: the
    inputs', as in `fit_weight`."""
    steps, scales = fit_weight(weight, moments=moments)
    return steps.flatten(1).to(torch.int32), scales.transpose(0, 1).contiguous()


class Int8Product(Product):
    """A product with int8 weights, one scale per output channel. See [Note: Quantised weights]."""

    parts = ("steps", "scale", "bias")
    opaque = frozenset({"steps"})

    def __init__(self, affine: Affine) -> None:
        out, columns = affine.weight.shape
        self.shape, self.doubles, self._bias = (out, columns), True, affine.bias
        steps, scale = quantise_weight(affine.weight, kind="int8", largest=largest_of(affine))
        assert scale is not None, "int8 has scales"
        self._scale = scale
        self._steps = torch.ops.onednn.qlinear_prepack(steps.contiguous(), None)
        self.nbytes = out * columns + self._scale.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        plane = largest_step()
        step, rows = _in_two_planes(x, plane=plane)
        found = _int8_linear(rows, steps=self._steps, scale=self._scale, plane=plane)
        upper, lower = found.split(x.shape[0])
        found = lower.mul_(0.5 / plane).add_(upper).mul_(step)
        return found if self._bias is None else found.add_(self._bias)


class Int4Product(Product):
    """A product with int4 weights in groups of 32 inputs. See [Note: Quantised weights]."""

    parts = ("steps", "scales", "bias")
    opaque = frozenset()

    def __init__(self, affine: Affine) -> None:
        out, columns = affine.weight.shape
        self.shape, self.doubles, self._bias = (out, columns), True, affine.bias
        more = -out % _OUTPUTS
        full, own, self.front = in_groups(affine, group=GROUP)
        self._extra = len(own) - self.front - columns
        steps, scales = quantise_int4(F.pad(full, (0, 0, 0, more)), moments=affine.moments)
        steps, self._scales = steps[:, own.start : own.stop], scales[own.start // GROUP : own.stop // GROUP].clone()
        self._steps = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.contiguous(), 1)
        self.nbytes = self._steps.nbytes + self._scales.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        rows = _bf16(x, extra=self._extra, front=self.front)
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._steps, GROUP, self._scales)
        found = found[:, : self.shape[0]].float()
        return found if self._bias is None else found.add_(self._bias)


def _in_two_planes(x: Tensor, *, plane: int) -> tuple[Tensor, Tensor]:
    """x fp32 [M, in] -> step fp32 [M, 1], and uint8 [2 M, in] of the upper and the lower integers plus `plane` + 1."""
    step = x.abs().amax(1, keepdim=True).div_(plane).clamp_(min=torch.finfo(torch.float32).tiny)
    values = x / step
    upper = values.round()
    lower = values.sub_(upper).mul_(2 * plane).round_()
    return step, torch.cat((upper, lower)).add_(plane + 1).to(torch.uint8)


def _bf16(x: Tensor, *, extra: int, front: int = 0) -> Tensor:
    return F.pad(x.bfloat16(), (front, extra)) if extra or front else x.to(torch.bfloat16).contiguous()


# Formats in `InferencePolicy.weights`: the products of the layers, and of the head.
FORMATS: dict[str, tuple[type[Product], type[Product]]] = {
    "stored": (Product, Product),
    "int8": (Int8Product, Int8Product),
    "int4": (Int4Product, Int8Product),
}
