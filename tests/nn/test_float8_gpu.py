"""Float8 layers on a GPU against the CPU, whose numbers have a reference. `pytest -m gpu tests/nn/test_float8_gpu.py`."""

import pytest
import torch

from ztk.core.policies.precision import Float8Recipe
from ztk.core.precision.float8 import device_fault
from ztk.kernels import float8_codes, float8_largest
from ztk.nn.float8 import Float8Product
from ztk.nn.linear import Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(device_fault(torch.device("cuda"))),
        reason="needs a GPU with float8 products",
    ),
]


def _hostile(rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * torch.logspace(-9, 9, rows)[:, None]
    x[1] = 0.0
    x[2, 3] = float("inf")
    x[4, 0] = 3e38
    return x.bfloat16()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(37, 48), (400, 200)])
def test_codes_and_scales_have_the_bits_of_the_cpu(shape, dtype):
    x = _hostile(*shape)
    factor, _ = float8_largest(_hostile(shape[1], 16), columns=False)
    of_rows, of_columns = float8_largest(x, factor)
    there = float8_largest(x.cuda(), factor.cuda())
    for here, other in zip((of_rows, of_columns), there, strict=True):
        assert torch.equal(other.cpu().nan_to_num(), here.nan_to_num())
    for turned in (False, True):
        expected = float8_codes(x, factor, of_rows, of_columns, turned=turned, dtype=dtype)
        found = float8_codes(x.cuda(), factor.cuda(), *there, turned=turned, dtype=dtype)
        for here, other in zip(expected, found, strict=True):
            numbers, others = here.float(), other.cpu().float()
            assert torch.equal(others.isnan(), numbers.isnan()) and torch.equal(
                others.nan_to_num(), numbers.nan_to_num()
            )


@pytest.mark.parametrize("recipe", list(Float8Recipe))
@pytest.mark.parametrize("positions", [1, 37, 512])
def test_a_layer_agrees_with_the_cpu(recipe, positions):
    torch.manual_seed(0)
    layer = Linear(256, 384).bfloat16()
    layer.product = Float8Product(recipe=recipe)
    x, d_out = torch.randn(positions, 256).bfloat16(), torch.randn(positions, 384).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        layer.to(device).zero_grad()
        own = x.to(device).requires_grad_()
        out = layer(own)
        out.backward(d_out.to(device))
        found.append([value.float().cpu() for value in (out.detach(), own.grad, layer.weight.grad)])
    for here, there in zip(*found, strict=True):
        # Two roundings to 8 bits, and sums that keep 14 bits with fast accumulation.
        assert (here - there).abs().max() <= 2**-6 * here.abs().max()
