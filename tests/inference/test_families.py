"""Every family: greedy tokens and log-probabilities equal transformers', for prompts of different lengths at once."""

import pytest
import torch

from tests.inference.models import FAMILIES, VOCABULARY, build, build_decoder, greedy
from ztk.inference import Generator, InferencePolicy, SamplingParams

PROMPTS = [[3, 1, 4], [5] * 20, [(7 * i + 3) % VOCABULARY for i in range(70)]]
COUNT = 64


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family):
    model = build(family)
    generator = Generator(model, policy=InferencePolicy(max_step_tokens=48))
    answers = generator.generate(PROMPTS, sampling=SamplingParams(max_tokens=COUNT, temperature=0))
    for prompt, [answer] in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == greedy(model, prompt=prompt, count=COUNT), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_log_probabilities_of_the_module(family):
    model = build(family)
    for prompt, found in zip(PROMPTS, Generator(model).score(PROMPTS), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        expected = torch.log_softmax(logits.double(), -1)[range(len(prompt) - 1), prompt[1:]]
        # Logits of size 30 at most, three layers: some hundred roundings of 2^-24 relative each.
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"experts": 4, "expert_hidden_dim": 40},
        {"experts": 4, "experts_every": 2, "experts_per_token": 1, "shared_hidden_dim": 24},
    ],
    ids=["all", "every second, with a shared expert"],
)
def test_scores_of_the_native_decoder_with_experts(options):
    model = build_decoder(**options)
    for prompt, found in zip(PROMPTS, Generator(model).score(PROMPTS), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]))[0]
        expected = torch.log_softmax(logits.double(), -1)[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)  # as above


def test_layers_without_experts_between_others():
    model = build("qwen3_moe", mlp_only_layers=[1])
    [[answer]] = Generator(model).generate([PROMPTS[1]], sampling=SamplingParams(max_tokens=16, temperature=0))
    assert answer.tokens == greedy(model, prompt=PROMPTS[1], count=16)
