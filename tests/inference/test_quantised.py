"""Weights of 8 and 4 bits: their distance from the stored ones, exactness, and the cost for a trained model."""

import pytest
import torch

from tests.inference.models import build, build_decoder
from tests.inference.schedules import alone, run_schedule
from tests.inference.trained import held_out, trained_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams, perplexity
from ztk.inference.products import Affine, Product
from ztk.inference.quantised import GROUP, Int4Product, Int8Product, largest_step, quantise_int4
from ztk.kernels import quantise_weight

FORMATS = ("int8", "int4")
PRODUCTS = {"int8": Int8Product, "int4": Int4Product}
BF16 = 2.0**-8  # rounding to bf16, relative


def weights(*, out: int, columns: int) -> torch.Tensor:
    """Some rows are far larger, one is constant, one is zero, one has an outlier."""
    drawn = torch.randn(out, columns, generator=torch.Generator().manual_seed(out + columns))
    drawn[::3] *= 100
    drawn[1], drawn[2], drawn[4, 7] = 0.3, 0.0, 50.0
    return drawn


def dequantise_int4(steps: torch.Tensor, *, scales: torch.Tensor) -> torch.Tensor:
    """Decodes the steps into weights, fp32 [out, in]. scales: from `quantise_int4`."""
    out, columns = steps.shape
    scale, zero = (part.float().t().unsqueeze(2) for part in scales.unbind(-1))  # [out, groups, 1]
    return ((steps.view(out, columns // GROUP, GROUP) - 8) * scale + zero).view(out, columns)


def test_an_int8_weight_is_within_half_a_step():
    weight = weights(out=48, columns=320)
    steps, scale = quantise_weight(weight, kind="int8")
    assert steps.abs().max() <= 127 and (steps.abs().amax(1)[weight.abs().amax(1) > 0] >= 126).all()
    error = (weight.double() - steps.double() * scale.double().unsqueeze(1)).abs()
    # The product and quotient in fp32: 2^-22 of the weight in addition to the half step.
    assert (error <= scale.double().unsqueeze(1) / 2 + 2.0**-22 * weight.abs()).all()


def error_of(weight: torch.Tensor) -> torch.Tensor:
    """Sum of squared errors of each group, float64 [out, groups]."""
    steps, scales = quantise_int4(weight)
    assert steps.min() >= 0 and steps.max() <= 15
    away = dequantise_int4(steps, scales=scales).double() - weight.double()
    return away.square().unflatten(1, (-1, GROUP)).sum(-1)


def test_no_int4_group_is_worse_than_its_range_in_15_steps():
    """A weight is within half a step of the range, and the bf16 rounding of the zero, at most."""
    weight = weights(out=48, columns=384)
    groups = weight.double().unflatten(1, (-1, GROUP))
    least, greatest = groups.aminmax(dim=-1)
    step = (greatest - least) / 15 * 1.016
    most = step / 2 + (least + 8 * step).abs() / 255 + 2.0**-22 * groups.abs().amax(-1)
    assert (error_of(weight) <= GROUP * most.square()).all()


def test_the_search_lowers_the_error_of_normal_weights():
    """Clipping and the fitted line reduce the error of 15 equal steps over the range by a tenth or more."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    groups = weight.double().unflatten(1, (-1, GROUP))
    least, greatest = groups.aminmax(dim=-1, keepdim=True)
    step = (greatest - least) / 15
    rounded = ((groups - least) / step).round() * step + least
    assert error_of(weight).sum() < 0.9 * (rounded - groups).square().sum()


def test_weights_on_a_grid_of_16_steps_are_found_again():
    """Values with a scale and zero that bf16 holds, as a file of Q4_1 has them: the fit gives them back."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (40, 8, GROUP), generator=generator).float()
    steps[..., 0], steps[..., 1] = 0, 15
    scale = torch.rand(40, 8, 1, generator=generator).add(0.5).bfloat16().float()
    weight = ((steps - 8) * scale + torch.randn(40, 8, 1, generator=generator).bfloat16().float()).flatten(1)
    # Rounding to bf16 removes the fp32 error of the fitted scale and zero.
    assert not error_of(weight).any()


@pytest.mark.parametrize("columns", [32, 128, 200, 768])
@pytest.mark.parametrize("format", FORMATS)
def test_a_product_is_that_of_the_rounded_weights(format, columns):
    """Compared with float64 over the same rounded weights: rows in two planes or in bf16, sums of integers or in fp32."""
    weight, bias = weights(out=40, columns=columns), torch.randn(40)
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    found = PRODUCTS[format](Affine(weight=weight, bias=bias))(x)
    if format == "int8":
        steps, scale = quantise_weight(weight, kind="int8")
        stored = steps.double() * scale.double().unsqueeze(1)
        rows, sums, rounding = x.double(), 4, 0.0
        # An input is off by half a step of the lower plane at most, of which one of the upper plane has 2 p.
        lost = x.double().abs().amax(1, keepdim=True) / (4 * largest_step() ** 2) * stored.abs().sum(1)
    else:
        padded = torch.nn.functional.pad(weight, (0, -columns % GROUP))
        steps, scales = quantise_int4(padded)
        stored = dequantise_int4(steps, scales=scales).double()[:, :columns]
        rows, sums, rounding, lost = x.bfloat16().double(), columns + 8, BF16, 0
    expected = rows @ stored.t()
    size = rows.abs() @ stored.abs().t()
    # One rounding of the result to bf16, if any, and roundings of fp32.
    bound = lost + 1.01 * rounding * expected.abs() + sums * 2.0**-23 * size + 2.0**-22 * (bias.abs() + expected.abs())
    assert ((found.double() - bias.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    "name, format", [("native", "int8"), ("native", "int4"), ("mixtral", "int4"), ("gpt2", "int8")]
)
def test_random_schedules_change_no_bit(name, format):
    model = build_decoder() if name == "native" else build(name)
    expected = alone(model, weights=format)
    assert expected != alone(model)
    for seed in range(3):
        assert run_schedule(model, seed=seed, weights=format)[0] == expected, seed


def test_a_scale_that_follows_the_rows_is_noticed(monkeypatch):
    """Planted: rows are rounded with a scale of all of them, as a quantiser of activations per tensor does."""
    multiply = Int8Product.multiply
    scaled = lambda self, x: multiply(self, (x / x.abs().max() * 127).round() * x.abs().max() / 127)  # noqa: E731
    monkeypatch.setattr(Int8Product, "multiply", scaled)
    with pytest.raises(ValueError, match="differ between"):
        Generator(build_decoder(), policy=InferencePolicy(weights="int8"))


@pytest.fixture(scope="module")
def trained():
    return trained_decoder()


@pytest.mark.parametrize("format, most", [("int8", 0.01), ("int4", 0.03)])
def test_a_trained_model_stays_near(trained, format, most):
    """Of the greedy tokens after 8 prompts of held-out text, and its perplexity."""
    tokens = held_out()
    stored, chosen = Generator(trained), Generator(trained, policy=InferencePolicy(weights=format))
    expected, found = perplexity(stored, tokens=tokens), perplexity(chosen, tokens=tokens)
    assert expected < 64  # it has learned: a uniform guess has 256
    assert found != expected and abs(found / expected - 1) < most
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    prompts = [tokens[start : start + 32] for start in range(0, 1600, 25)]
    pairs = [
        (one[0].tokens, other[0].tokens)
        for one, other in zip(
            stored.generate(prompts, sampling=sampling), chosen.generate(prompts, sampling=sampling), strict=True
        )
    ]
    assert sum(one == other for one, other in pairs) >= {"int8": 62, "int4": 50}[format]  # of 64


def test_memory_is_a_quarter_and_an_eighth():
    """Fractions of the fp32 size of the linear layers: int8 has 4 bytes more per row, int4 4 per group of 32 inputs."""
    affine = Affine(weight=torch.randn(256, 1024))
    stored = Product(affine).nbytes
    assert Int8Product(affine).nbytes == stored // 4 + 4 * 256
    assert Int4Product(affine).nbytes == stored // 8 + 4 * 256 * 32


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="inference.weights=int2: must be stored, int8, int4, bf16 or fp8"):
        InferencePolicy(weights="int2")
