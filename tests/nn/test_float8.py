"""Linear layers in float8: the three products against plain ones of dequantised operands, and which layers take part."""

import math

import pytest
import torch
from torch import nn

from tests.device_tagged import gpu_tensors
from ztk.core.policies.precision import Float8Recipe
from ztk.core.precision.float8 import dequantised, quantise_rows
from ztk.core.runtime.gradient_places import offer_place, withdraw_place
from ztk.nn import Decoder, DecoderConfig
from ztk.nn.deferred import DeferredGradients, finish
from ztk.nn.float8 import Float8Product, use_float8
from ztk.nn.linear import Linear
from ztk.zero.buckets.layout import BucketLayout, ParameterSpec
from ztk.zero.buckets.shard_formats import Float8Shards

ROWWISE, EXACT_WEIGHTS, WIDE = Float8Recipe.rowwise, Float8Recipe.rowwise_with_gw_hp, Float8Recipe.rowwise_e5m2


def _rounded(x: torch.Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """x [R, C] as the float8 values of its rows, float64."""
    codes, scales = quantise_rows(x, dtype=dtype)
    return dequantised(codes, scales=scales, dtype=torch.float64)


def _plain(x, weight, d_out, *, recipe):
    """Output and gradients in float64, of x [M, K], weight [N, K], d_out [M, N]."""
    weight_values, of_gradients = _rounded(weight), torch.float8_e5m2 if recipe is WIDE else torch.float8_e4m3fn
    _, of_weight = quantise_rows(weight)
    scaled = (d_out.double() * of_weight.double().t()).float()
    codes, _ = quantise_rows(weight)
    d_weight = d_out.double().t() @ x.double()
    if recipe is not EXACT_WEIGHTS:
        d_weight = _rounded(d_out.t().contiguous(), dtype=of_gradients) @ _rounded(x.t().contiguous()).t()
    return _rounded(x) @ weight_values.t(), _rounded(scaled, dtype=of_gradients) @ codes.double(), d_weight


def _close(value: torch.Tensor, expected: torch.Tensor, *, sums: int) -> None:
    """Within one rounding to bfloat16, and float32 sums that may cancel."""
    bound = expected.abs() * 2**-8 + expected.abs().max() * sums * 2**-22
    assert ((value.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("recipe", list(Float8Recipe))
@pytest.mark.parametrize("positions", [(2, 24), (37,)])
def test_a_layer_computes_the_products_of_its_recipe(recipe, positions):
    torch.manual_seed(0)
    layer = Linear(48, 32).bfloat16()
    layer.bias = nn.Parameter(torch.randn(32).bfloat16())
    layer.product = Float8Product(recipe=recipe)
    with torch.no_grad():
        layer.weight[3] = 0.0
        layer.weight[4] *= 1e4
    x = torch.randn(*positions, 48).bfloat16()
    x[..., 5] = 0.0
    x.view(-1, 48)[1] = 0.0
    x.view(-1, 48)[2] *= 1e6
    x.requires_grad_()
    d_out = torch.randn(*positions, 32).bfloat16() * 1e-6
    out = layer(x)
    out.backward(d_out)
    flat, d_flat = x.detach().view(-1, 48), d_out.view(-1, 32)
    y, d_x, d_weight = _plain(flat, layer.weight.detach(), d_flat, recipe=recipe)
    _close((out.detach() - layer.bias.detach()).view(-1, 32)[3:], y[3:] * 1.0, sums=4096)  # the bias rounds again
    _close(x.grad.view(-1, 48), d_x, sums=32)
    _close(layer.weight.grad, d_weight, sums=64)
    assert torch.equal(layer.bias.grad, d_flat.sum(0)) or (layer.bias.grad - d_flat.sum(0)).abs().max() < 1e-7


def test_gradients_as_e5m2_reach_further_down():
    """A number of 2^-20 of its row's largest is zero in e4m3. Weights and inputs stay e4m3, so the forward has the same bits."""
    x, d_out = torch.eye(16).bfloat16(), torch.eye(16).bfloat16()
    d_out[3, 5] = 2.0**-20
    found = {}
    for recipe in (ROWWISE, WIDE):
        layer = Linear(16, 16).bfloat16()
        layer.product = Float8Product(recipe=recipe)
        layer.weight.data.copy_(torch.eye(16))
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.backward(d_out)
        found[recipe] = out.detach(), inputs.grad[3, 5], layer.weight.grad[5, 3]
    assert torch.equal(found[ROWWISE][0], found[WIDE][0])
    assert found[ROWWISE][1:] == (0, 0) and found[WIDE][1:] == (2.0**-20, 2.0**-20)


@pytest.mark.parametrize("recipe", [ROWWISE, WIDE])
def test_an_overflow_is_not_hidden(recipe):
    layer = Linear(16, 16).bfloat16()
    layer.product = Float8Product(recipe=recipe)
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    d_out = torch.randn(4, 16).bfloat16()
    d_out[1, 2] = math.inf
    layer(x).backward(d_out)
    assert x.grad[1].isnan().all() and layer.weight.grad[2].isnan().all()
    assert x.grad[0].isfinite().all() and layer.weight.grad[0].isfinite().all()


def test_weight_gradients_wait_and_find_their_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32, bias=False)), nn.Sequential(nn.Linear(32, 16, bias=False)))
    model = model.bfloat16()
    use_float8(model, recipe=ROWWISE)
    x, d_out = torch.randn(8, 32).bfloat16(), torch.randn(8, 16).bfloat16()
    model(x).backward(d_out)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    deferred = DeferredGradients()
    deferred.attach(model)
    deferred.collecting = collected = []
    model(x).backward(d_out)
    assert all(parameter.grad is None for parameter in model.parameters()) and len(collected) == 2
    deferred.collecting = None
    finish(collected)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("recipe", [ROWWISE, EXACT_WEIGHTS])
def test_the_place_in_a_bucket_is_written_on_gpus(recipe):
    torch.manual_seed(0)
    product, numbers = Float8Product(recipe=recipe), torch.randn(32, 16).bfloat16()
    x, d_out = torch.randn(8, 16).bfloat16(), torch.randn(8, 32).bfloat16()
    expected = nn.Parameter(numbers)
    product(x, weight=expected).backward(d_out)
    with gpu_tensors():
        weight, place = nn.Parameter(numbers.to("cuda:0")), torch.zeros(32, 16, dtype=torch.bfloat16, device="cuda:0")
        offer_place(weight, place=lambda: place)
        try:
            product(x.to("cuda:0"), weight=weight).backward(d_out.to("cuda:0"))
        finally:
            withdraw_place(weight)
        written = place.cpu()
    assert torch.equal(written, expected.grad)


def _decoder(**options) -> Decoder:
    sizes = {"vocab_size": 48, "dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "hidden_dim": 48, "max_seq_len": 16}
    return Decoder(DecoderConfig(**sizes | options))


def test_layers_inside_blocks_take_part():
    model = _decoder(experts=4, experts_per_token=2, expert_hidden_dim=16, shared_hidden_dim=16)
    names = use_float8(model, recipe=ROWWISE)
    parts = {"attention.query", "attention.key", "attention.value", "attention.out"}
    shared = {"mlp.shared.gate", "mlp.shared.up", "mlp.shared.down"}
    assert names == {f"blocks.{number}.{part}.weight" for number in range(2) for part in parts | shared}
    assert not isinstance(model.head.product, Float8Product)
    odd = use_float8(_decoder(hidden_dim=40), recipe=ROWWISE)
    assert odd == {f"blocks.{number}.{part}.weight" for number in range(2) for part in parts}


def test_models_without_such_layers_are_refused():
    with pytest.raises(ValueError, match="precision.float8=rowwise: the model has no block"):
        use_float8(nn.Sequential(nn.Linear(32, 32)), recipe=ROWWISE)
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)))
    layer = model[0][0]
    layer.forward = lambda x: x
    with pytest.raises(ValueError, match="the forward of 0.0 was replaced"):
        use_float8(model, recipe=ROWWISE)


def test_a_gpu_has_the_bits_of_a_cpu():
    torch.manual_seed(0)
    weight, x, d_out = torch.randn(32, 48).bfloat16(), torch.randn(37, 48).bfloat16(), torch.randn(37, 32).bfloat16()
    layout = BucketLayout.plan([ParameterSpec(name="weight", shape=(32, 48))], num_shards=2)
    full = torch.zeros(layout.size, dtype=torch.bfloat16)
    full[: weight.numel()] = weight.view(-1)

    def found(device: str) -> list[torch.Tensor]:
        own, inputs = weight.to(device).requires_grad_(), x.to(device).requires_grad_()
        out = Float8Product(recipe=ROWWISE)(inputs, weight=own)
        gradients = torch.autograd.grad(out, (inputs, own), d_out.to(device))
        form, buffer = Float8Shards(layout), full.to(device)
        messages = torch.empty(2, form.nbytes, dtype=torch.int8, device=device)
        for rank in range(2):
            form.pack(buffer, rank=rank, out=messages[rank])
        form.unpack(messages, full=buffer)
        return [value.detach().cpu() for value in (out, *gradients, buffer)]

    here = found("cpu")
    with gpu_tensors():
        there = found("cuda:0")
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_models_of_transformers_take_part():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=False)
    ).bfloat16()
    names = {name.rpartition(".layers.0.")[2] for name in use_float8(model, recipe=ROWWISE)}
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert names == {f"self_attn.{name}.weight" for name in attention} | {f"mlp.{name}.weight" for name in mlp}
    tokens = torch.arange(16)[None]
    model(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
