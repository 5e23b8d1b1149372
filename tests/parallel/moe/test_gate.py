"""Choices and capacity against a plain loop over tokens."""

import math

import pytest
import torch

from ztk.parallel.moe.gate import GatePolicy, Gating, assign

T, E = 40, 5


def policy(k: int, **options) -> GatePolicy:
    defaults = {
        "capacity_factor": 1.0,
        "eval_capacity_factor": 2.0,
        "min_capacity": 1,
        "noise": None,
        "drop_tokens": True,
        "random_selection": False,
        "sample_second": False,
    }
    return GatePolicy(k=k, **defaults | options)


def gating(k: int, *, training: bool = True, used_token=None, **options) -> Gating:
    return Gating(
        policy=policy(k, **options),
        training=training,
        largest_load=lambda counts: int(counts.max()),
        used_token=used_token,
    )


def skewed_logits(seed: int) -> torch.Tensor:
    """Every token prefers expert 0, and none prefers expert 4."""
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) + torch.tensor([2.0, 0.5, 0.0, 0.0, -30.0])


def loop(logits: torch.Tensor, *, k: int, capacity: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """(experts, places or -1 where dropped, weights), token by token and choice by choice."""
    probabilities = [[math.exp(x) for x in row] for row in logits.double().tolist()]
    probabilities = [[x / sum(row) for x in row] for row in probabilities]
    experts = [sorted(range(E), key=lambda e, row=row: -row[e])[:k] for row in probabilities]
    places = [[-1] * k for _ in range(T)]
    taken = [0] * E
    if k <= 2:  # first come first served, all first choices before the second ones
        for choice in range(k):
            for token in range(T):
                expert = experts[token][choice]
                if taken[expert] < capacity:
                    places[token][choice] = taken[expert]
                taken[expert] += 1
    else:  # the experts choose
        for expert in range(E):
            wanting = [token for token in range(T) if expert in experts[token]]
            best = sorted(wanting, key=lambda token: -probabilities[token][expert])[:capacity]
            for place, token in enumerate(sorted(best)):
                places[token][experts[token].index(expert)] = place
    weights = []
    for token in range(T):
        kept = [probabilities[token][e] if p >= 0 else 0.0 for e, p in zip(experts[token], places[token], strict=True)]
        total = 1.0 if k == 1 else max(sum(kept), 1e-30)
        weights.append([w / total for w in kept])
    return experts, places, weights


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_choices_places_and_weights_equal_a_loop(k, factor):
    logits = skewed_logits(k)
    made = assign(logits, gating=gating(k, capacity_factor=factor))
    assert made.capacity == math.ceil(T / E * k * factor)
    experts, places, weights = loop(logits, k=k, capacity=made.capacity)
    assert made.experts.tolist() == experts
    assert torch.where(made.kept, made.places, -1).tolist() == places
    torch.testing.assert_close(made.weights, torch.tensor(weights), rtol=1e-5, atol=1e-7)  # fp32 against fp64
    assert made.exp_counts.tolist() == [sum(e in row for row in experts) for e in range(E)]
    share = torch.tensor([sum(e in row[: 1 if k <= 2 else k] for row in experts) / T for e in range(E)])
    balance = E * (logits.softmax(1).mean(0) * share).sum() / (1 if k <= 2 else k)
    torch.testing.assert_close(made.l_aux, balance)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_dropping_every_choice_has_a_place_of_its_own(k):
    made = assign(skewed_logits(7), gating=gating(k, drop_tokens=False))
    assert made.kept.all() and made.capacity == made.exp_counts.max() and made.places.max() < made.capacity
    slots = made.experts * made.capacity + made.places
    assert slots.unique().numel() == T * k


def test_chance_decides_who_is_dropped_and_capacity_is_used_up():
    logits = skewed_logits(9)
    torch.manual_seed(0)
    kept = torch.stack([assign(logits, gating=gating(1, random_selection=True)).kept[:, 0] for _ in range(20)])
    made = assign(logits, gating=gating(1, random_selection=True))
    for expert in range(E):
        mine = made.experts[:, 0] == expert
        assert made.kept[mine].sum() == min(int(mine.sum()), made.capacity)
    favourite = made.experts[:, 0] == 0
    assert kept[:, favourite].float().mean(0).max() < 1, "nobody has a right to a place"
    assert kept[:, favourite].any(0).float().mean() > 0.9, "nearly everybody has one some time"


def test_evaluation_has_its_own_capacity_and_a_minimum_holds():
    assert assign(skewed_logits(1), gating=gating(1, training=False)).capacity == 2 * T // E
    assert assign(skewed_logits(1), gating=gating(1, min_capacity=30)).capacity == 30


def test_unused_tokens_go_nowhere():
    used = (torch.arange(T) % 2).float()
    made = assign(skewed_logits(2), gating=gating(1, used_token=used, capacity_factor=9.0))
    assert torch.equal(made.kept[:, 0], used.bool()) and made.exp_counts.sum() == used.sum()
    with pytest.raises(ValueError, match=r"k=1 only \(have k=2\)"):
        assign(skewed_logits(2), gating=gating(2, used_token=used))


def test_noise_is_for_training():
    logits = torch.zeros(T, E)  # all equal: without noise everybody takes the first expert
    torch.manual_seed(0)
    noisy = assign(logits, gating=gating(1, noise="RSample"))
    assert noisy.experts.unique().numel() == E
    assert assign(logits, gating=gating(1, noise="RSample", training=False)).experts.unique().tolist() == [0]
    sampled = assign(logits, gating=gating(2, sample_second=True))
    assert set(sampled.experts[:, 1].tolist()) == {1, 2, 3, 4}
