"""Sampling: deterministic, bounded context, faithful to the probabilities."""

import pytest
import torch

from ztk.nn import sample_text


def successor(tokens: torch.Tensor) -> torch.Tensor:
    """A model sure that every byte is followed by the next one."""
    return torch.nn.functional.one_hot((tokens + 1) % 256, 300).float() * 100


def test_follows_the_model():
    assert sample_text(successor, prompt="a", num_bytes=5, max_seq_len=8) == "abcdef"
    assert sample_text(successor, prompt="x", num_bytes=1, max_seq_len=8, temperature=0) == "xy"


def test_same_seed_same_text_and_the_context_is_bounded():
    lengths = []

    def coin(tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        logits = torch.full((*tokens.shape, 256), -1e9)
        logits[..., [ord("0"), ord("1")]] = 0.0
        return logits

    texts = [sample_text(coin, prompt="", num_bytes=400, max_seq_len=16, temperature=1.0, seed=s) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert max(lengths) == 16
    assert set(texts[0][1:]) == {"0", "1"}
    assert abs(texts[0].count("1") - 200) < 40  # four standard deviations


def test_temperature_sharpens():
    def three_to_one(tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*tokens.shape, 256), -1e9)
        logits[..., ord("a")], logits[..., ord("b")] = torch.log(torch.tensor(3.0)), 0.0
        return logits

    def share(temperature: float) -> float:
        text = sample_text(three_to_one, prompt="-", num_bytes=400, max_seq_len=4, temperature=temperature)
        return text.count("a") / 400

    assert share(1.0) == pytest.approx(0.75, abs=0.09)
    assert share(0.2) > 0.95


def test_leaves_no_graph_and_refuses_negative_temperature():
    weight = torch.zeros(256, requires_grad=True)
    sample_text(lambda tokens: weight.expand(*tokens.shape, 256), prompt="a", num_bytes=2, max_seq_len=4)
    with pytest.raises(ValueError, match="temperature=-1"):
        sample_text(successor, prompt="a", num_bytes=1, max_seq_len=4, temperature=-1)
