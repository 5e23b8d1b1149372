"""Float8 layers on a GPU against the CPU, whose numbers have a reference. `pytest -m gpu tests/nn/test_float8_gpu.py`."""

import pytest
import torch

from ztk.core.policies.precision import Float8Recipe
from ztk.core.precision.float8 import device_fault, quantise_columns, quantise_rows
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


def test_codes_and_scales_have_the_bits_of_the_cpu():
    x = _hostile(37, 48)
    for quantise in (quantise_rows, quantise_columns):
        (codes, scales), (there, of_there) = quantise(x), quantise(x.cuda())
        finite = scales.isfinite().flatten()
        assert torch.equal(of_there.cpu()[finite], scales[finite]) and of_there.cpu()[~finite].isnan().all()
        assert torch.equal(there.cpu().view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


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
