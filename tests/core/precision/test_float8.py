"""Rows in float8 and their product against a plain float64 computation of the same numbers."""

import math

import pytest
import torch

from ztk.core.precision.float8 import (
    CODES,
    dequantised,
    device_fault,
    quantise_columns,
    quantise_rows,
    scaled_product,
    turned,
)

WIDE = torch.float8_e5m2
# Format: largest code, bits of the mantissa, and the exponent of the smallest step.
FORMATS = {CODES: (448.0, 3, -9), WIDE: (57_344.0, 2, -16)}


def _plain(row: torch.Tensor, *, dtype: torch.dtype) -> tuple[list[float], float]:
    """Codes and scale of one row [C], element by element."""
    most, bits, smallest = FORMATS[dtype]
    largest = max(abs(x) for x in row.tolist())
    scale = 2.0 ** math.ceil(math.log2(largest / most)) if largest else 2.0**-100
    scale = max(scale, 2.0**-100)
    codes = []
    for x in row.tolist():
        value = abs(x) / scale
        step = 2.0 ** max(math.floor(math.log2(value)) - bits, smallest) if value else 1.0  # subnormal ones included
        codes.append(math.copysign(round(value / step) * step, x))  # Python's round takes the even one
    return codes, scale


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_have_the_codes_and_scales_of_a_plain_loop(dtype, form):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 37, generator=generator) * torch.logspace(-9, 9, 9)[:, None]
    x[4] *= torch.logspace(-8, 0, 37)  # many small ones
    x[5] = 0.0
    x[6, 0], x[7, 1] = 448.0 * 2.0**70, 3e38  # exactly the largest code, and nearly the largest number
    x = x.to(dtype)
    codes, scales = quantise_rows(x, dtype=form)
    assert codes.dtype is form
    for row, code, scale in zip(x, codes.float(), scales, strict=True):
        expected, expected_scale = _plain(row, dtype=form)
        assert float(scale) == expected_scale
        assert code.tolist() == expected
    columns, of_columns = quantise_columns(x.t(), dtype=form)
    assert columns.shape == (9, 48) and not columns[:, 37:].float().any()
    assert torch.equal(columns[:, :37].contiguous().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(of_columns, scales)
    if form is CODES:
        assert torch.equal(turned(codes).float(), codes.float().t())


def test_quantising_again_changes_nothing():
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 0] = 225.0  # rounds to 224, half of the largest code: the second scale is half of the first
    x[3, 1:] *= 0.5
    codes, scales = quantise_rows(x)
    once = dequantised(codes, scales=scales, dtype=torch.bfloat16)
    again, scales_again = quantise_rows(once)
    assert scales_again[3] == scales[3] / 2
    assert torch.equal(dequantised(again, scales=scales_again, dtype=torch.float32), codes.float() * scales)
    other = quantise_rows(torch.randn(16, 48).bfloat16())
    first, second = (
        scaled_product(other[0], b=part, scales=(other[1], scale))
        for part, scale in ((codes, scales), (again, scales_again))
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize(("M", "N", "K"), [(33, 48, 64), (1, 16, 16), (5, 7, 19)])
def test_a_product_is_rounded_once(M, N, K):
    generator = torch.Generator().manual_seed(M)
    a, of_a = quantise_rows(torch.randn(M, K, generator=generator) * 1e-4)
    b, of_b = quantise_rows(torch.randn(N, K, generator=generator) * 1e5)
    exact = (a.double() * of_a.double()) @ (b.double() * of_b.double()).t()
    out = scaled_product(a, b=b, scales=(of_a, of_b))
    # One rounding to 8 bits of a sum in fp32.
    bound = exact.abs() * 2**-8 + (a.double() * of_a).abs() @ (b.double() * of_b).abs().t() * K * 2**-23
    assert out.dtype is torch.bfloat16
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_infinity_reaches_all_products_of_its_row(value):
    a = torch.randn(4, 32).bfloat16()
    a[2, 5] = value
    codes, scales = quantise_rows(a)
    b, of_b = quantise_rows(torch.randn(16, 32))
    out = scaled_product(codes, b=b, scales=(scales, of_b))
    assert out[2].isnan().all() and out[[0, 1, 3]].isfinite().all()


def test_gpus_without_float8_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert device_fault(torch.device("cuda", 0)) == "sm_80 has no float8 products, which begin with sm_89"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert device_fault(torch.device("cuda", 0)) == device_fault(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "AMD" in device_fault(torch.device("cuda", 0))
