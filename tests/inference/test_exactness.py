"""A sequence's tokens and log-probabilities depend on nothing but the sequence, the weights and the seed."""

import pytest
import torch

from tests.inference.models import build, build_decoder
from tests.inference.schedules import alone, run_schedule
from ztk.inference import Generator, SamplingParams, attention, engine

MODELS = {
    "native": build_decoder,
    "gemma3": lambda: build("gemma3"),
    "mixtral": lambda: build("mixtral"),
    "bloom": lambda: build("bloom"),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_schedules_change_no_bit(name):
    model = MODELS[name]()
    expected, reused = alone(model), 0
    for seed in range(6 if name == "native" else 2):
        found, tokens = run_schedule(model, seed=seed)
        assert found == expected, seed
        reused += tokens
    assert reused > 300


def test_a_scrambled_cache_entry_is_noticed(monkeypatch):
    """The same check fails when a prefix that is reused has one wrong number in one layer."""
    model = build_decoder()
    expected = alone(model)
    copy = engine.Cache.copy

    def scrambled(self, source, *, target, positions):
        copy(self, source, target=target, positions=positions)
        self.keys[1][target, 0, positions // 2, 0] += 0.5

    monkeypatch.setattr(engine.Cache, "copy", scrambled)
    assert any(run_schedule(model, seed=seed)[0] != expected for seed in range(4))


def test_sums_that_follow_the_number_of_rows_are_noticed(monkeypatch):
    """Planted: tiles that begin at the first query of a step instead of at a fixed position."""
    model = build_decoder()
    expected = alone(model)
    monkeypatch.setattr(attention, "BLOCK", 32)
    assert run_schedule(model, seed=3)[0] != expected


@pytest.mark.parametrize("window, softcap, alibi", [(None, None, False), (20, 3.0, False), (None, None, True)])
def test_attention_equals_its_definition(window, softcap, alibi):
    """In float64, key by key; two sequences at different positions."""
    torch.manual_seed(0)
    S, T, H, K, D, N = 2, 9, 4, 2, 8, 192
    query, keys, values = torch.randn(S, T, H, D), torch.randn(S, K, N, D), torch.randn(S, K, N, D)
    starts, slopes = torch.tensor([101, 3]), torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    options = {"scale": 0.3, "window": window, "softcap": softcap, "slopes": slopes}
    found = attention.attend(query, keys=keys, values=values, starts=starts, **options)
    for s in range(S):
        for t in range(T):
            last = int(starts[s]) + t
            first = 0 if window is None else max(0, last - window + 1)
            for h in range(H):
                past = slice(first, last + 1)
                scores = keys[s, h // 2, past].double() @ query[s, t, h].double() * 0.3
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if slopes is not None:
                    scores = scores + slopes[h].double() * torch.arange(first, last + 1)
                expected = torch.softmax(scores, 0) @ values[s, h // 2, past].double()
                # Scores below 40 by 2^-24 relative each way; values below 4.
                torch.testing.assert_close(found[s, t, h].double(), expected, rtol=0, atol=4 * 80 * 2**-24)


def test_a_step_of_one_row_has_the_bits_of_many():
    model = build_decoder()
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)
    text = list(range(60))
    full = Generator(model).generate([text], sampling=sampling)[0][0].prompt_logprobs
    pieces = (
        Generator(model, policy=engine.InferencePolicy(max_step_tokens=1))
        .generate([text], sampling=sampling)[0][0]
        .prompt_logprobs
    )
    assert torch.equal(full, pieces)
