"""Initial values: any slice of any parameter is the slice of the full parameter."""

import dataclasses
import itertools
import math

import pytest
import torch

from ztk.core.runtime.seed import generator
from ztk.nn import Decoder, DecoderConfig, initial, initial_values, initialise

CONFIG = DecoderConfig(vocab_size=256, dim=256, layers=3, heads=4, kv_heads=2, hidden_dim=384, max_seq_len=32)


@pytest.fixture(scope="module")
def model() -> Decoder:
    with torch.device("meta"):
        return Decoder(CONFIG)


def full_values(model: Decoder, name: str, *, seed: int = 0) -> torch.Tensor:
    return initial_values(model, name=name, start=0, stop=model.get_parameter(name).numel(), seed=seed)


def test_random_slices_equal_the_full_parameter(model):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = full_values(model, name)
        cuts = torch.randint(parameter.numel() + 1, (6,), generator=generator).sort().values.tolist()
        edges = [0, *cuts, parameter.numel()]
        for start, stop in itertools.pairwise(edges):
            assert torch.equal(initial_values(model, name=name, start=start, stop=stop, seed=0), values[start:stop])


def test_threads_draw_the_same_values(monkeypatch):
    one = initial._normal(5, stop=40 * initial._CHUNK, parts=(0, "x"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(initial._normal(5, stop=40 * initial._CHUNK, parts=(0, "x")), one)


def test_statistics(model):
    std = math.sqrt(2 / (5 * CONFIG.dim))
    for name, parameter in model.named_parameters():
        values = full_values(model, name)
        assert values.dtype == torch.float32
        assert values.device.type == "cpu"
        if "norm" in name:
            assert torch.equal(values, torch.ones(parameter.numel()))
            continue
        expected = std / math.sqrt(2 * CONFIG.layers) if name.endswith(("out.weight", "down.weight")) else std
        n = values.numel()
        assert float(values.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * n)), name  # four standard errors
        assert abs(float(values.mean())) < 4 * expected / math.sqrt(n), name


def test_parameters_seeds_and_chunks_differ(model):
    names = [name for name, _ in model.named_parameters() if "norm" not in name]
    firsts = torch.stack([full_values(model, name)[:1000] for name in names])
    firsts /= firsts.std(1, keepdim=True)
    correlation = torch.corrcoef(firsts) - torch.eye(len(names))
    assert correlation.abs().max() < 5 / math.sqrt(1000)
    assert not torch.equal(full_values(model, names[0], seed=0), full_values(model, names[0], seed=1))
    row = full_values(model, "blocks.0.mlp.gate.weight")
    assert not torch.equal(row[: 1 << 15], row[1 << 15 : 2 << 15])


def test_values_are_fixed_for_good(model):
    """Runs of old checkpoints and seeds must stay repeatable: a change here is a change of every run."""
    values = initial_values(model, name="blocks.1.mlp.up.weight", start=70_000, stop=70_004, seed=7)
    assert torch.equal(values, initial_values(model, name="blocks.1.mlp.up.weight", start=70_000, stop=70_004, seed=7))


def test_cost_follows_the_range_not_the_parameter(monkeypatch):
    with torch.device("meta"):
        huge = Decoder(dataclasses.replace(CONFIG, dim=16384, hidden_dim=65536, heads=64, layers=1))
    drawn = []
    monkeypatch.setattr(initial, "generator", lambda *parts: drawn.append(parts[-1]) or generator(*parts))
    initial_values(huge, name="blocks.0.mlp.gate.weight", start=10**9, stop=10**9 + 1000, seed=0)  # of 1.07e9
    assert drawn == [10**9 // 2**15]  # one chunk


def test_tied_head_has_the_values_of_the_embedding():
    with torch.device("meta"):
        tied = Decoder(dataclasses.replace(CONFIG, tie_embeddings=True))
    assert torch.equal(full_values(tied, "head.weight"), full_values(tied, "embedding.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("tied", [False, True])
def test_initialise_fills_a_model(device, dtype, tied):
    with torch.device(device):
        model = Decoder(dataclasses.replace(CONFIG, tie_embeddings=tied))
    model.norm.weight.requires_grad_(False)
    assert initialise(model, seed=5, dtype=dtype) is model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.flatten(), full_values(model, name, seed=5).to(dtype)), name
    assert (model.head.weight is model.embedding.weight) == tied
    assert not model.norm.weight.requires_grad
    assert model.blocks[0].mlp.up.weight.requires_grad
    logits = model(torch.arange(32).view(1, 32)).float()
    assert logits.var() < 1.0  # an untrained model
