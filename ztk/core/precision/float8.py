"""Float8 matrices with a scale per row, and their product.

[Note: Float8 numerics]
A matrix is stored as codes (float8_e4m3fn, at most 448) and one float32 scale per row, value = code * scale. As in torchao's recipe
`rowwise` (torchao/float8/config.py), a scale is the row's largest magnitude over 448, rounded up to a power of two, and gradients are e4m3,
too: a row's own scale covers its range, so the third bit of the mantissa helps more than the exponents of e5m2. The recipe `rowwise_e5m2`
has codes of float8_e5m2, at most 57,344, for gradients: numbers down to 2^-32 of a row's largest are not zero, instead of 2^-18. They are
always the first matrix of a product, because torch's products on GPUs take e5m2 only there.

Scaling by powers of two is exact, which makes two results independent of the way:

- Quantising a row that was already quantised changes nothing. Stage 3 gathers codes, so its parameters are rounded values, and their
  products have the same bits as products of parameters that were gathered in 16 bits.
- Scales can move between the operands of a product. The gradient of the input multiplies by the codes that the forward used: the weight's
  scale per row is a factor per column of the output's gradient. torchao quantises the weight again, by columns, from its 16-bit values.

Rows of zeros have the smallest scale. A row with an infinity or NaN has the scale NaN, and so have its products, which the check for
overflow finds.
"""

import torch
from torch import Tensor

from ztk.kernels import float8_codes, float8_largest

CODES = torch.float8_e4m3fn


def quantise_rows(x: Tensor, *, dtype: torch.dtype = CODES) -> tuple[Tensor, Tensor]:
    """Codes [R, C] of `dtype` and scales [R, 1] of `x` [R, C], bfloat16 or float32."""
    of_rows, _ = float8_largest(x, columns=False)
    return float8_codes(x, of_rows=of_rows, dtype=dtype)[:2]


def dequantised(codes: Tensor, *, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [R, C] times scales [R, 1]: [R, C] in `dtype`."""
    return (codes.float() * scales).to(dtype)


def scaled_product(
    a: Tensor, *, b: Tensor, scales: tuple[Tensor, Tensor], is_fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """The codes a [M, K] times b [N, K] transposed, times the scales of their rows [M, 1] and [N, 1]: bfloat16 [M, N], rounded once.

    is_fast: NVIDIA's GPUs keep fewer bits of the sum, as in torchao's forward.
    """
    of_a, of_b = scales
    # torch 2.11 has no scales per row on a CPU, and later releases have this speed and these bits there.
    if a.device.type == "cpu":
        product = (a.float() @ b.float().t()).mul_(of_a).mul_(of_b.view(1, -1))
        return product.to(torch.bfloat16) if out is None else out.copy_(product)
    options = {} if out is None else {"out": out}
    return torch._scaled_mm(
        a, b.t(), scale_a=of_a, scale_b=of_b.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=is_fast, **options
    )


def device_fault(device: torch.device) -> str:
    """Why `device` has no float8 products, "" if it has."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return "AMD's GPUs have other float8 formats"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (8, 9) else f"sm_{major}{minor} has no float8 products, which begin with sm_89"
