"""Tests of quantised buckets beyond the generic ones: the bytes, overflow, and the error bound."""

import pytest
import torch

from ztk.kernels import set_backend
from ztk.kernels.ops.quantize import dequantize, dequantize_reduce, quantize, quantized_bytes

CASES = [(8, 32), (8, 256), (4, 32), (4, 128)]


@pytest.fixture(params=["triton", "auto"])
def backend(request):
    set_backend(request.param)
    yield request.param
    set_backend("auto")


@pytest.mark.parametrize("bits, group", CASES)
def test_kernel_and_cpu_write_the_same_bytes(bits, group):
    x = torch.randn(3, 4 * group + 16)
    rows = {}
    for name in ("triton", "auto"):
        set_backend(name)
        rows[name] = quantize(x, bits=bits, group=group)
    set_backend("auto")
    used = 5 * group * bits // 8 + 4 * 5
    assert torch.equal(rows["triton"][:, :used], rows["auto"][:, :used])
    assert rows["auto"].shape[1] == quantized_bytes(x.shape[1], bits=bits, group=group)


@pytest.mark.parametrize("bits, group", CASES)
def test_error_is_at_most_half_a_step(backend, bits, group):
    x = torch.randn(2, 8 * group)
    back = dequantize(quantize(x, bits=bits, group=group), numel=x.shape[1], bits=bits, group=group)
    largest = x.view(2, 8, group).abs().amax(dim=2, keepdim=True)
    step = (largest / (127 if bits == 8 else 7)).expand(2, 8, group).reshape(2, -1)
    assert ((back - x).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("bits, group", CASES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_overflow_survives_the_wire_in_its_own_group_only(backend, bits, group, bad):
    x = torch.randn(1, 4 * group)
    x[0, group + 5] = bad
    packed = quantize(x, bits=bits, group=group)
    for back in (
        dequantize(packed, numel=4 * group, bits=bits, group=group)[0],
        dequantize_reduce(packed, numel=4 * group, bits=bits, group=group),
    ):
        finite = back.isfinite().view(4, group)
        assert not finite[1].any() and finite[[0, 2, 3]].all()


def test_zero_groups_and_cuts(backend):
    """A zero group comes back as zero, and a row's bytes depend on that row only."""
    x = torch.zeros(2, 512)
    x[1] = torch.randn(512)
    packed = quantize(x, group=256)
    assert torch.equal(dequantize(packed, numel=512, group=256)[0], x[0])
    assert torch.equal(quantize(x[1], group=256)[0, :520], packed[1, :520])


def test_reduce_sums_in_row_order(backend):
    x = torch.randn(4, 512)
    packed = quantize(x)
    rows = dequantize(packed, numel=512)
    expected = ((rows[0] + rows[1]) + rows[2] + rows[3]) * 0.25
    assert torch.allclose(dequantize_reduce(packed, numel=512, factor=0.25), expected, rtol=0, atol=1e-6)


def test_refuses_unsupported_arguments():
    with pytest.raises(ValueError, match="bits=5"):
        quantize(torch.zeros(16), bits=5)
    with pytest.raises(ValueError, match="group=48"):
        quantize(torch.zeros(96), group=48)
    with pytest.raises(ValueError, match="numel=64"):
        dequantize(torch.zeros(1, 80, dtype=torch.int8), numel=64)
