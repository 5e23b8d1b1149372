"""Rows in float8 and their product against a plain float64 computation of the same numbers."""

import math

import pytest
import torch

from ztk.core.precision.float8 import (
    CODES,
    dequantised,
    device_fault,
    quantise_rows,
    scaled_product,
)
from ztk.kernels import float8_codes, float8_largest, set_backend

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


@pytest.fixture(params=["auto", "triton"])
def backend(request):
    """The CPU's form, and the kernels on the interpreter."""
    set_backend(request.param)
    yield
    set_backend("auto")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_and_columns_have_the_codes_and_scales_of_a_plain_loop(backend, dtype, form):
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
    of_rows, of_columns = float8_largest(x.t())
    bytes_of = codes.view(torch.uint8)
    rows, of_columns_rows, columns, of_columns = float8_codes(x.t(), of_rows=of_rows, of_columns=of_columns, dtype=form)
    assert columns.shape == (9, 48) and not columns[:, 37:].float().any()
    assert torch.equal(columns[:, :37].contiguous().view(torch.uint8), bytes_of)
    assert torch.equal(of_columns, scales)
    again, of_again = quantise_rows(x.t().contiguous(), dtype=form)  # one read gives the two forms that two reads give
    assert torch.equal(rows.view(torch.uint8), again.view(torch.uint8)) and torch.equal(of_columns_rows, of_again)
    turned, *_ = float8_codes(x, of_rows=float8_largest(x, columns=False)[0], turned=True, dtype=form)
    assert turned.shape == (37, 16) and not turned[:, 9:].float().any()
    assert torch.equal(turned[:, :9].contiguous().view(torch.uint8), bytes_of.t())


@pytest.mark.parametrize("form", FORMATS)
def test_scales_are_exact_next_to_a_power_of_two(backend, form):
    """Of the largest code, of the float32 numbers on both sides, of the smallest scale, and of the largest numbers."""
    edge = torch.tensor([FORMATS[form][0] * 2.0**power for power in (-118, -101, -100, -99, 0, 7, 100)])
    largest = torch.cat(
        [edge.nextafter(torch.tensor(0.0)), edge, edge.nextafter(torch.tensor(math.inf)), torch.tensor([3.4e38])]
    )
    _, scales = quantise_rows(largest[:, None], dtype=form)
    most = FORMATS[form][0]
    for number, scale in zip(largest.tolist(), scales[:, 0].tolist(), strict=True):
        assert scale >= 2.0**-100 and math.frexp(scale)[0] == 0.5
        assert number <= most * scale and (scale == 2.0**-100 or number > most * scale / 2)


def test_a_factor_is_the_scale_of_each_column(backend):
    """The gradient's rows are multiplied by the weight's scales and rounded to bfloat16."""
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(size, 48, generator=generator).bfloat16() for size in (37, 48))
    weight *= torch.logspace(-12, 12, 48)[:, None].bfloat16()
    factor, _ = float8_largest(weight, columns=False)
    scaled = x * quantise_rows(weight)[1].t().bfloat16()
    of_rows, _ = float8_largest(x, factor, columns=False)
    codes, scales, *_ = float8_codes(x, factor, of_rows)
    expected, expected_scales = quantise_rows(scaled)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_infinity_is_in_the_scales_of_its_row_and_column(backend, value):
    x = torch.randn(37, 48, generator=torch.Generator().manual_seed(5)).bfloat16()
    x[3, 7] = value
    rows, of_rows, columns, of_columns = float8_codes(x, None, *float8_largest(x))
    assert of_rows.isnan().nonzero()[:, 0].tolist() == [3] and of_columns.isnan().nonzero()[:, 0].tolist() == [7]
    assert rows[3].float().isnan().all() and columns[7, :37].float().isnan().all()
    assert not columns[:, 37:].float().any()  # also of the column of NaN
    assert rows.float().isnan().sum() == 48 and columns.float().isnan().sum() == 37


def test_views_and_empty_matrices(backend):
    wide = torch.randn(20, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    part = wide[1:18, 16:48]
    found = float8_codes(part, None, *float8_largest(part))
    expected = float8_codes(part.clone(), None, *float8_largest(part.clone()))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
    of_rows, of_columns = float8_largest(wide[:0])
    assert of_rows.shape == (0,) and not of_columns.any()
    assert float8_codes(wide[:0], None, of_rows, of_columns)[2].shape == (64, 0)


def test_other_inputs_are_refused():
    x = torch.zeros(4, 16).bfloat16()
    with pytest.raises(ValueError, match="float8_largest: x is .* torch.float16; pass bfloat16 or float32"):
        float8_largest(x.half())
    with pytest.raises(
        ValueError, match=r"float8_codes: of_columns is \(4,\) torch.float32; pass contiguous float32 \[16\]"
    ):
        float8_codes(x, of_columns=torch.zeros(4))
    with pytest.raises(ValueError, match="dtype=torch.int8 is no format of codes"):
        float8_codes(x, of_rows=torch.zeros(4), dtype=torch.int8)


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
