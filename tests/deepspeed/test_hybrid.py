"""The hybrid engine: texts from the training shards, and the other attributes that DeepSpeed-Chat's scripts read."""

import pytest
import torch

from tests.deepspeed import hybrid
from ztk.deepspeed.config import DeepSpeedConfigError, parse_config
from ztk.rl.rollout.weights import RolloutWeights

CASES = {
    "stage 0": {"stage": 0},
    "stage 2, offloaded": {"stage": 2, "offload": True},
    "stage 3": {"stage": 3},
    "stage 3, offloaded, a unit at a time": {"stage": 3, "offload": True, "pin_parameters": False},
    "stage 3, buffers given back": {"stage": 3, "release_inference_cache": True, "inference_tp_size": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_transformers_on_the_full_weights(ranks, name):
    config = hybrid.settings(**CASES[name])
    found = ranks(2).run(hybrid.train_and_generate, config=config)
    silent = ranks(2).run(hybrid.train_and_generate, config=config, generates=False)
    for own, other in zip(found, silent, strict=True):
        assert own["same"] == [True] * 3 and own["modes"] == [False, True] * 3
        assert own["losses"] == other["losses"]  # texts change nothing about the training
        assert all(torch.equal(value, other["weights"][key]) for key, value in own["weights"].items())


@pytest.mark.parametrize("name", ["stage 0", "stage 3", "stage 3, offloaded, a unit at a time"])
def test_with_adapters(ranks, name):
    """Merged while a text is drawn, and the base weights keep their bits."""
    base = {key: value.detach() for key, value in hybrid.tiny(adapters=True).named_parameters()}
    config = hybrid.settings(**CASES[name])
    for found in ranks(2).run(hybrid.train_and_generate, config=config, adapters=True):
        assert found["same"] == [True] * 3
        kept = [key for key in base if key.endswith(("fc1.weight", "fc2.weight"))]
        assert len(kept) == 4 and all(torch.equal(found["weights"][key], base[key]) for key in kept)


def test_ranks_may_draw_in_different_ways_and_follow_torchs_seed(ranks):
    for found in ranks(2).run(hybrid.disagrees):
        assert found["same"]
        assert torch.equal(*found["drawn"][:2]) and not torch.equal(*found["drawn"][1:])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_are_merged_by_hand_and_taken_out(ranks, stage):
    for found in ranks(2).run(hybrid.merges, stage=stage):
        # One product of four terms below 1, and one sum, in float32; logits are sums of 32 terms below 10 after two such layers.
        assert found["fused"] < 1e-6 < 1e-3 < found["moved"] and found["logits"] < 1e-3
        assert "unfuse_lora_weight()" in found["refused"] and found["bits"] and not found["flag"]


def test_what_is_refused(ranks):
    for errors in ranks(2).run(hybrid.refusals):
        assert "Linear has no generate()" in errors["model"]
        assert "may have 9 tokens, and hybrid_engine.max_out_tokens is 8" in errors["new"]
        assert "may have 9 tokens" in errors["all"] and errors["restored"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_is_seen_before_the_step_and_a_step_is_skipped(ranks, stage):
    for found in ranks(2).run(hybrid.overflow, stage=stage):
        assert found["rows"] == [
            (False, False, True, 16.0, 0, 1),
            (True, True, False, 8.0, 1, 2),
            (False, True, False, 8.0, 2, 3),
            (False, False, True, 8.0, 2, 4),
        ]
        assert found["timed"] == 4


def test_the_section():
    def parse(stage: int = 3, *, ranks: int = 4, **keys):
        config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, "hybrid_engine": keys}
        return parse_config(config, world_size=ranks)

    assert parse(enabled=False, max_out_tokens=64).hybrid is None
    made = parse(enabled=True, max_out_tokens=64, release_inference_cache=True, tp_gather_partition_size=4)
    assert (made.hybrid.max_out_tokens, made.hybrid.weights, made.hybrid.release_inference_cache) == (
        64,
        RolloutWeights.whole,
        True,
    )
    assert any("tp_gather_partition_size=4" in note for note in made.notes)
    assert parse(enabled=True, pin_parameters=False).hybrid.weights is RolloutWeights.streamed
    made = parse(enabled=True, inference_tp_size=2)
    assert made.hybrid.weights is RolloutWeights.streamed and any("no layer is cut" in note for note in made.notes)
    made = parse(0, enabled=True, inference_tp_size=2, pin_parameters=False)
    assert sum("acts at stage 3; this is stage 0" in note for note in made.notes) == 2
    for keys, message in (
        ({"inference_tp_size": 3}, "4 ranks cannot be divided by it; 2 would fit"),
        ({"max_out_token": 4}, "did you mean max_out_tokens"),
        ({"enable_cuda_graph": True}, "enable_cuda_graph=True: not offered"),
        ({"max_out_tokens": 0}, "max_out_tokens=0"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=message):
            parse(enabled=True, **keys)


def test_frozen_parameters_are_gathered_as_int8_and_trained_ones_as_they_are(ranks):
    """`zero_quantized_nontrainable_weights`, DeepSpeed-Chat's --enable_mixed_precision_lora."""
    exact = ranks(2).run(hybrid.frozen_as_int8, zero={})
    short = ranks(2).run(hybrid.frozen_as_int8, zero={"zero_quantized_nontrainable_weights": True})
    assert "zero_quantized_nontrainable_weights" in exact[0]["refused"] and not short[0]["refused"]
    largest = max(value.abs().max() for value in exact[0]["weights"].values())
    for found, plain in zip(short, exact, strict=True):
        assert found["losses"] == pytest.approx(plain["losses"], rel=0.05) and found["losses"] != plain["losses"]
        rounded = 0
        for name, value in found["weights"].items():
            same = torch.equal(value, plain["weights"][name])
            assert torch.equal(value, short[0]["weights"][name])  # all ranks compute with the same
            assert same or name not in found["trained"], name
            assert (value - plain["weights"][name]).abs().max() <= largest / 254
            rounded += not same
        assert rounded > len(found["weights"]) / 4
