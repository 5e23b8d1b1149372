"""The decoder compared with a plain implementation, and properties of every language model."""

import dataclasses
import shutil

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.plain_decoder import plain_decoder
from tests.nn.plain import plain_logits, plain_loss
from tests.rounding import Bounds
from ztk.nn import Decoder, DecoderConfig, initialise
from ztk.nn.linear import HAS_ONEDNN

SMALL = DecoderConfig(vocab_size=61, dim=48, layers=2, heads=6, kv_heads=2, hidden_dim=72, max_seq_len=160)
VARIANTS = {
    "grouped": SMALL,
    "one_kv_head": dataclasses.replace(SMALL, kv_heads=1),
    "all_kv_heads": dataclasses.replace(SMALL, kv_heads=6),
    "tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "theta": dataclasses.replace(SMALL, rope_theta=500.0, norm_eps=1e-3),
}


def built(config: DecoderConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    initialise(model, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():  # norms of one and tiny weights would hide mistakes
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_((0.3 if "norm" in name else 0.1) * noise.to(dtype))
    return model


def batch(*, length: int = 19, rows: int = 3, vocab_size: int = 61) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(length))
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -100
    return tokens[:, :-1], targets


def rms(x: torch.Tensor) -> float:
    return x.detach().double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 19, 150])
def test_forward_and_gradients_equal_the_plain_implementation(variant, length):
    config = VARIANTS[variant]
    model = built(config)
    tokens, targets = batch(length=length)
    targets = targets if length > 3 else targets.abs() % 61
    loss = model(tokens, targets)
    loss.backward()

    bounds = plain_bounds(config, model=model, tokens=tokens, targets=targets)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    bounds.check("loss", loss)
    bounds.check("logits", model(tokens))
    for name, parameter in model.named_parameters():
        bounds.check(name, parameter.grad)


def plain_bounds(config: DecoderConfig, *, model: Decoder, tokens: torch.Tensor, targets: torch.Tensor) -> Bounds:
    """Loss, logits and gradients of the plain implementation, with bounds on their rounding errors."""

    def compute() -> dict[str, torch.Tensor]:
        weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        logits = plain_logits(config, weights=weights, tokens=tokens)
        loss = plain_loss(logits, targets)
        loss.backward()
        return {"loss": loss, "logits": logits} | {name: weight.grad for name, weight in weights.items()}

    # a weight's gradient sums over tokens, a product of a Linear over its inputs, the loss over tokens or words
    return Bounds(compute=compute, longest_sum=max(tokens.numel(), config.hidden_dim, config.vocab_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_stay_near_the_plain_implementation(dtype):
    model = built(SMALL, dtype=dtype)
    tokens, targets = batch(length=140)
    loss = model(tokens, targets)
    loss.backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = plain_loss(plain_logits(SMALL, weights=weights, tokens=tokens), targets)
    expected.backward()
    eps = torch.finfo(dtype).eps
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2 * eps)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == dtype
        # about ten roundings stand between a loss and the furthest gradient
        assert rms(parameter.grad - weights[name].grad) < 10 * eps * rms(weights[name].grad), name


def test_the_benchmarks_twin_in_torchs_modules_is_the_same_model():
    for config in VARIANTS.values():
        model = built(config)
        twin = plain_decoder(model)
        tokens, targets = torch.randint(config.vocab_size, (2, 3, 160), generator=torch.Generator().manual_seed(2))
        losses = [each(tokens, targets) for each in (model, twin)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for name, parameter in twin.named_parameters():
            expected = model.get_parameter(name).grad
            assert (parameter.grad - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_token_sees_the_future(dtype):
    model = built(SMALL, dtype=dtype)
    tokens, _ = batch(length=140)
    changed = tokens.clone()
    changed[:, 70] = (changed[:, 70] + 1) % 61
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :70], after[:, :70])
    assert (before[:, 70:] != after[:, 70:]).any(-1).all()


def test_positions_matter_and_only_their_distance_does():
    config = dataclasses.replace(SMALL, layers=1)
    model = built(config)
    tokens, _ = batch(length=8)
    with torch.no_grad():
        assert not torch.allclose(model(tokens)[:, -1], model(tokens.flip(1).roll(1, 1))[:, -1])
        model.rope_cos, model.rope_sin = model.rope_cos[100:], model.rope_sin[100:]  # as if 100 positions later
        shifted = model(tokens)
        model.materialise_buffers("cpu")
        torch.testing.assert_close(shifted, model(tokens), rtol=1e-4, atol=1e-5)


def test_tied_head_shares_one_parameter_and_adds_both_gradients():
    tied, untied = built(VARIANTS["tied"]), built(dataclasses.replace(VARIANTS["tied"], tie_embeddings=False))
    assert tied.head.weight is tied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())
    untied.load_state_dict(tied.state_dict())
    tokens, targets = batch()
    tied(tokens, targets).backward()
    untied(tokens, targets).backward()
    both = untied.head.weight.grad + untied.embedding.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both)


def test_ignored_targets_do_not_count():
    model = built(SMALL)
    tokens, targets = batch()
    targets[1:] = -100
    torch.testing.assert_close(model(tokens, targets), model(tokens[:1], targets[:1]))


def test_built_on_meta_holds_no_memory_and_names_are_stable():
    with torch.device("meta"):
        model = Decoder(SMALL)
    assert all(p.is_meta for p in model.parameters())
    assert not [name for name in model.state_dict() if "rope" in name]  # tables are computed, not saved
    assert {name for name, _ in model.blocks[0].named_parameters()} == {
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "out")),
        *(f"mlp.{name}.weight" for name in ("gate", "up", "down")),
        "attention_norm.weight",
        "mlp_norm.weight",
    }
    assert model(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, 61)
    model.materialise_buffers("cpu")
    assert model.rope_cos.device.type == "cpu"
    assert model.rope_cos.shape == model.rope_sin.shape == (160, 4)


class Called(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_built_on_meta_computes_nothing():
    """torch's Python forms of normal_, arange and others import its compiler, which takes every rank seconds."""
    with torch.device("meta"), Called() as called:
        Decoder(dataclasses.replace(SMALL, tie_embeddings=True))
    assert called.names == {"empty", "ones", "uniform_"}


def test_built_in_memory_is_ready_to_use():
    loss = Decoder(SMALL)(*batch()).item()
    assert 1 < loss < 20


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match=r"161 tokens.*model\.max_seq_len=160"):
        built(SMALL)(torch.zeros(1, 161, dtype=torch.int64))


def test_learns_a_repeating_text():
    model = built(dataclasses.replace(SMALL, vocab_size=8), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(33).repeat(4, 1) % 7
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3  # log 7 = 1.95 for one who only counts


def test_autocast_multiplies_in_16_bits_and_keeps_the_rest():
    model = built(SMALL)
    tokens, targets = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        loss = model(tokens, targets)
    loss.backward()
    full = built(SMALL)(tokens, targets)
    assert loss.item() != full.item()
    assert loss.item() == pytest.approx(full.item(), rel=torch.finfo(torch.bfloat16).eps)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_trains_under_torch_compile():
    model, compiled = built(SMALL), built(SMALL)
    tokens, targets = batch()
    model(tokens, targets).backward()
    torch.compile(compiled, backend="aot_eager", fullgraph=True)(tokens, targets).backward()
    for (name, a), (_, b) in zip(model.named_parameters(), compiled.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_compiled_products_have_no_lowering_of_inductor():
    """TorchInductor refuses oneDNN's product of a weight that is no constant, so a graph has ztk's op in its place."""
    if not HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    names = []

    def record(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    model = built(SMALL)
    torch.compile(model, backend=aot_autograd(fw_compiler=record), fullgraph=True)(*batch()).backward()
    assert names.count("ztk.linear.default") >= 2 * 7 * SMALL.layers and not [
        name for name in names if "mkldnn" in name
    ]


@pytest.mark.slow
def test_trains_under_inductor():
    """By the default backend of torch.compile, which needs a C++ compiler on a CPU."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler was found")
    model, compiled = built(SMALL), built(SMALL)
    tokens, targets = batch()
    model(tokens, targets).backward()
    torch.compile(compiled, fullgraph=True)(tokens, targets).backward()
    for (name, a), (_, b) in zip(model.named_parameters(), compiled.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_trains_under_torch_checkpoint():
    from torch.utils.checkpoint import checkpoint

    model, again = built(SMALL), built(SMALL)
    tokens, targets = batch()
    model(tokens, targets).backward()
    for block in again.blocks:
        block.forward = lambda x, *, cos, sin, f=block.forward: checkpoint(f, x, cos=cos, sin=sin, use_reentrant=False)
    again(tokens, targets).backward()
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
