"""Weights in 8 and 4 bits, and products with them.

[Note: Quantised weights]
int8: one scale per output channel, w = s q with q in [-127, 127]. int4: groups of 32 inputs, w = s (q - 8) + z with q in [0, 15], 5 bits
per weight with s and z, which [Note: Fitting int4] in ztk/kernels/shared/fitting.py chooses. Scales and zeros are bf16, and a weight is
rounded with the scale as it is stored, so the scale's rounding adds nothing: |w - stored| <= s / 2 for int8.

If ranks share the inputs of a layer, scales are computed over all inputs, and groups begin at one rank's groups, so they compute with the
same weights as one rank: a rank's part of the first group follows zeros.

The products are torch's for bf16 rows: rows are rounded to bf16 (2^-8 relative), multiplied by the widened weights, summed in fp32 and
rounded to bf16; the bias is added in fp32. Measured with 1 to 600 rows, a row has the same bits for every number of rows; the probe checks
it when a model is loaded. Their fp32 forms take 5 to 20 times as long. Embeddings, norms, routers and biases stay in fp32, and the head is
int8 in both, because its errors go straight into the logits.

Measured on one core of an EPYC with AVX512, weight 16000 x 768, milliseconds for 1 / 8 / 32 / 512 rows: fp32 3.6 / 4.3 / 9.0 / 115, int8
1.0 / 3.6 / 11.9 / 208, int4 0.6 / 2.3 / 9.1 / 145. So they speed few rows up, and slow long prompts down.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.products import Affine, Product, in_groups
from ztk.kernels.shared.fitting import GROUP, fit_weight

_COLUMNS = 64  # int8: the product reads inputs in vectors
_OUTPUTS = 16  # int4: outputs are packed by so many
_STEPS8 = 127


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight fp32 [out, in] -> int8 [out, in] and scales bf16 [out]."""
    scale = (weight.abs().amax(1) / _STEPS8).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    steps = (weight / scale.float().unsqueeze(1)).round_().clamp_(-_STEPS8, _STEPS8)
    return steps.to(torch.int8), scale


def quantise_int4(weight: Tensor, *, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight fp32 [out, in], in a multiple of 32 -> int32 [out, in] of 0 to 15, and scale and zero bf16 [in / 32, out, 2]. moments: of the
    inputs, as in `fit_weight`."""
    steps, scales = fit_weight(weight, moments=moments)
    return steps.flatten(1).to(torch.int32), scales.transpose(0, 1).contiguous()


class Int8Product(Product):
    """A product with int8 weights, one scale per output channel. See [Note: Quantised weights]."""

    parts = ("steps", "scale", "bias")
    opaque = frozenset()

    def __init__(self, affine: Affine) -> None:
        out, columns = affine.weight.shape
        self.shape, self.doubles, self._bias = (out, columns), True, affine.bias
        self._extra = -columns % _COLUMNS
        full, own, _ = in_groups(affine, group=1)
        steps, self._scale = quantise_int8(full)
        self._steps = F.pad(steps[:, own.start : own.stop], (0, self._extra)).contiguous()
        self.nbytes = self._steps.nbytes + self._scale.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        found = torch._weight_int8pack_mm(_bf16(x, extra=self._extra), self._steps, self._scale).float()
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


def _bf16(x: Tensor, *, extra: int, front: int = 0) -> Tensor:
    return F.pad(x.bfloat16(), (front, extra)) if extra or front else x.to(torch.bfloat16).contiguous()


# Formats in `InferencePolicy.weights`: the products of the layers, and of the head.
FORMATS: dict[str, tuple[type[Product], type[Product]]] = {
    "stored": (Product, Product),
    "int8": (Int8Product, Int8Product),
    "int4": (Int4Product, Int8Product),
}
