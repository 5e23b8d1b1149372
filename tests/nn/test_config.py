"""Sizes: parameter and FLOP counts, and that the named sizes match their names."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from ztk.nn import Decoder, DecoderConfig

MODELS = Path(__file__).parents[2] / "conf" / "model"
OWN = sorted(path.stem for path in MODELS.glob("*.yaml") if path.stem not in ("hf", "own"))  # theirs are elsewhere
CALLED = {"10m": 10e6, "30m": 30e6, "100m": 100e6, "1b": 1e9, "7b": 7e9, "70b": 70e9, "175b": 175e9}


def named(name: str) -> DecoderConfig:
    fields = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    return DecoderConfig(**{key: value for key, value in fields.items() if key != "name"})


@pytest.mark.parametrize("name", OWN)
def test_counted_without_building_equals_built(name):
    config = named(name)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()


@pytest.mark.parametrize("name,parameters", CALLED.items())
def test_named_sizes_are_near_their_names(name, parameters):
    assert named(name).parameter_count() == pytest.approx(parameters, rel=0.1)


def test_flops_are_counted_by_hand_for_a_small_shape():
    config = DecoderConfig(vocab_size=10, dim=8, layers=3, heads=2, kv_heads=1, hidden_dim=12, max_seq_len=16)
    block = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 12
    assert config.flops_per_token(16) == 6 * (3 * block + 10 * 8) + 3 * 12 * 8 * 16
    with torch.device("meta"):
        model = Decoder(config)
    assert model.flops_per_token(16) == config.flops_per_token(16)
    tied = dataclasses.replace(config, tie_embeddings=True)
    assert tied.flops_per_token(16) == config.flops_per_token(16)  # the shared weight is multiplied all the same


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dim": 0}, r"model\.dim=0: must be at least 1"),
        ({"dim": 50}, r"model\.dim=50 with model\.heads=4.*multiple of 8"),
        ({"kv_heads": 3}, r"model\.kv_heads=3: must divide model\.heads=4"),
        ({"layers": -1}, r"model\.layers=-1"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    sizes = {
        "vocab_size": 10, "dim": 64, "layers": 1, "heads": 4, "kv_heads": 2, "hidden_dim": 16, "max_seq_len": 8,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**sizes, **change})
