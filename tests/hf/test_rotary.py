"""Rotary positions by the kernel, only where a model was replaced for it."""

from unittest import mock

import pytest
import torch

from tests.parallel.topology.families import VOCABULARY, make
from ztk.hf import rotary
from ztk.hf.kernels import inject_kernels
from ztk.kernels import rope

# fp32 through two layers: a few dozen roundings of 6e-8 of logits of size 1.
ABSOLUTE = 1e-5
TOKENS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "family", ["Llama", "Cohere", "Phi3", "GPTNeoX"]
)  # halves, neighbours, one projection, part of a head
def test_logits_and_gradients_are_the_same(family):
    found = []
    for is_replaced in (False, True):
        model = make(family)
        if is_replaced:
            inject_kernels(model)
        with mock.patch.object(rotary, "rope", wraps=rope) as op:
            logits = model(input_ids=TOKENS, position_ids=torch.arange(3, 15)[None]).logits
        assert op.call_count == (4 if is_replaced else 0)  # query and key of two layers; the other model is unchanged
        logits.pow(2).mean().backward()
        found.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for plain, kernel in zip(*found, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=0, atol=ABSOLUTE * max(1.0, float(plain.abs().max())))


def test_another_rotation_is_left_alone(monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, rotary.FUNCTION, lambda q, k, cos, sin: (q * cos, k * cos))
    assert "rope" not in str(inject_kernels(make("Llama")))


def test_undo_gives_the_rotation_back():
    model = make("Llama")
    inject_kernels(model).undo()
    with mock.patch.object(rotary, "rope", wraps=rope) as op:
        model(input_ids=TOKENS)
    assert not op.called
