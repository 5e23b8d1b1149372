"""Advantages, and losses of policy and critic, by hand; gradients against finite differences, sums against every split."""

import math

import pytest
import torch
from torch import Tensor

from ztk.rl.align import (
    Mismatch,
    Packing,
    PolicyLoss,
    divergence,
    equal_groups,
    generalised_advantages,
    group_advantages,
    importance_weights,
    mismatch_sums,
    policy_loss,
    token_weights,
    value_loss,
)

GROUPS = torch.tensor([4, 4, 4, 9, 9, 9])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 5.0], dtype=torch.float64)
ALL = torch.ones(6, dtype=torch.bool)
EXACT = {"rtol": 0, "atol": 1e-12}


def close(found: Tensor, expected) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), **EXACT)


def advantages(baseline: str, *, scale: str, included: Tensor = ALL) -> Tensor:
    return group_advantages(REWARDS, groups=GROUPS, included=included, baseline=baseline, scale=scale)


def test_advantages_of_groups():
    close(advantages("mean", scale="none"), [2 / 3, -1 / 3, -1 / 3, -1, -1, 2])
    close(advantages("leave_one_out", scale="none"), [1, -0.5, -0.5, -1.5, -1.5, 3])
    first, second = math.sqrt(1 / 3) + 1e-4, math.sqrt(3) + 1e-4  # deviations over n - 1
    scaled = [2 / 3 / first, -1 / 3 / first, -1 / 3 / first, -1 / second, -1 / second, 2 / second]
    close(advantages("mean", scale="group"), scaled)
    deviation = math.sqrt((4 + 1 + 1 + 9 + 9 + 36) / 9 / 6) + 1e-8
    close(advantages("mean", scale="batch"), [value / deviation for value in (2 / 3, -1 / 3, -1 / 3, -1, -1, 2)])


def test_large_rewards_of_small_spread_have_the_advantages_of_their_differences():
    groups, included = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool)
    options = {"groups": groups, "included": included, "baseline": "mean", "scale": "group"}
    rewards = torch.tensor([0.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    close(group_advantages(rewards + 1e9, **options), group_advantages(rewards, **options).tolist())


def test_a_sample_without_a_reward_changes_no_other():
    included = torch.tensor([True, True, False, True, True, True])
    close(advantages("mean", scale="none", included=included), [0.5, -0.5, 0, -1, -1, 2])
    close(advantages("leave_one_out", scale="none", included=included), [1, -1, 0, -1.5, -1.5, 3])


def test_groups_with_equal_rewards_are_found():
    rewards = torch.tensor([1.0, 1.0, 7.0, 2.0, 2.0, 2.5], dtype=torch.float64)
    included = torch.tensor([True, True, False, True, True, True])
    assert equal_groups(rewards, groups=GROUPS, included=included).tolist() == [True] * 3 + [False] * 3


def test_generalised_advantages_by_hand():
    mask = torch.tensor([[False, True, True, False], [False, True, True, True], [False] * 4])
    rewards = torch.tensor([[0, 0, 1, 0], [0, 0.5, 0, 2], [3] * 4], dtype=torch.float64)
    values = torch.tensor([[9, 0.25, 0.5, 9], [9, 1, 0.5, 0.25], [9] * 4], dtype=torch.float64)
    packing = Packing.of(mask)
    options = {"values": packing.pack(values), "lengths": packing.lengths, "gamma": 0.5, "lam": 0.5}
    found = packing.unpack(generalised_advantages(packing.pack(rewards), **options), length=4)
    last = [1 - 0.5, 2 - 0.25]
    middle = 0 + 0.5 * 0.25 - 0.5 + 0.25 * last[1]
    first = [0 + 0.5 * 0.5 - 0.25 + 0.25 * last[0], 0.5 + 0.5 * 0.5 - 1 + 0.25 * middle]
    close(found, [[0, first[0], last[0], 0], [0, first[1], middle, last[1]], [0] * 4])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", 0.2),
        ("k2", 0.02),
        ("k3", math.exp(-0.2) - 1 + 0.2),
        ("k3_weighted", (math.exp(-0.2) - 1 + 0.2) * math.exp(0.1)),
    ],
)
def test_divergences_by_hand(estimator, expected):
    logprobs, reference, old = (torch.tensor([[value]], dtype=torch.float64) for value in (-1.0, -1.2, -1.1))
    close(divergence(logprobs, reference=reference, old=old, estimator=estimator), [[expected]])


def test_the_gradient_of_weighted_k3_is_the_divergences_own():
    """Exact over a distribution: sum_x p_old ratio k3, at p = p_old, against d KL(p, q) by hand: p_i (log p_i/q_i - KL)."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.2, 0.4], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    old = logprobs.detach()
    (old.exp() * divergence(logprobs, reference=reference, old=old, estimator="k3_weighted")).sum().backward()
    log_ratio = old - reference
    close(logits.grad, old.exp() * (log_ratio - (old.exp() * log_ratio).sum()))


# Losses

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(4, 4, 4, generator=generator, dtype=torch.float64)
    old = -numbers[0].abs() - 0.1
    return {
        "old": old,
        "logprobs": old + 0.3 * numbers[1],  # ratios on both sides of both clips
        "advantages": numbers[2],
        "reference": old + 0.2 * numbers[3],
    }


POLICIES = [
    PolicyLoss(),
    PolicyLoss(ratio="sequence", average="sequence"),
    PolicyLoss(form="cispo", average="constant"),
    PolicyLoss(dual_clip=1.05),
    PolicyLoss(kl_coef=0.3),
    PolicyLoss(kl_coef=0.3, kl_estimator="k2"),
    PolicyLoss(kl_coef=0.3, kl_estimator="k3", average="sequence"),
]


def loss_of(policy: PolicyLoss, *, rows: slice = slice(None), logprobs: Tensor | None = None) -> Tensor:
    """Of packed answers, from values in rows."""
    packing = Packing.of(MASK[rows])
    given = {name: packing.pack(value[rows]) for name, value in batch().items()}
    if logprobs is not None:
        given["logprobs"] = packing.pack(logprobs[rows])
    own = given.pop("logprobs")
    return policy_loss(
        own, policy=policy, weights=weights_of(rows, policy.average), lengths=packing.lengths, **given
    ).loss


def weights_of(rows: slice, average: str) -> Tensor:
    lengths = MASK[rows].sum(1)
    counts = torch.ones(len(lengths), dtype=torch.bool)
    return token_weights(lengths, counts=counts, average=average, samples=4, tokens=8, max_tokens=5).double()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_loss_does_not_depend_on_how_samples_are_split(policy):
    logprobs = batch()["logprobs"].requires_grad_()
    loss = loss_of(policy, logprobs=logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    parts = [slice(0, 1), slice(1, 3), slice(3, 4)]
    split = [loss_of(policy, rows=rows, logprobs=logprobs) for rows in parts]
    torch.testing.assert_close(sum(split), loss, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(sum(split), logprobs)[0], gradient, **EXACT)
    assert (gradient[~MASK] == 0).all()


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.form != "cispo"], ids=repr)
def test_gradients_are_the_finite_differences(policy):
    """cispo's clipped ratio is a constant by definition, so its gradient is no loss's."""
    logprobs = batch()["logprobs"].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(policy, logprobs=x), logprobs)


def test_the_clipped_loss_by_hand():
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    old = torch.zeros(4, dtype=torch.float64)
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    found = policy_loss(ratios.log(), policy=PolicyLoss(clip_high=0.3), old=old, advantages=signs, weights=weights)
    close(found.loss, (-1.3 + 1.5 - 0.5 + 0.8) / 4)
    assert found.clipped == 4
    dual = policy_loss(ratios.log(), policy=PolicyLoss(dual_clip=1.2), old=old, advantages=signs, weights=weights)
    close(dual.loss, (-1.2 + 1.2 - 0.5 + 0.8) / 4)


def test_a_ratio_of_sequences_by_hand():
    """Two answers of two tokens and one; the second does not count."""
    ratios = torch.tensor([1.5, 0.8, 7.0], dtype=torch.float64)
    ratio = math.sqrt(1.5 * 0.8)
    found = policy_loss(
        ratios.log(),
        policy=PolicyLoss(ratio="sequence", clip_high=0.05),
        old=torch.zeros(3, dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64),
        weights=torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64),
        lengths=torch.tensor([2, 1]),
    )
    close(found.loss, (-1.05 + ratio) / 2)
    assert found.clipped == 2


def test_the_gradient_of_cispo_is_the_clipped_ratio_times_the_advantage():
    logprobs = torch.tensor([math.log(1.5), math.log(0.5)], dtype=torch.float64, requires_grad=True)
    weights = torch.ones(2, dtype=torch.float64)
    policy = PolicyLoss(form="cispo", clip_low=1.0, clip_high=0.28)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    policy_loss(
        logprobs, policy=policy, old=torch.zeros_like(logprobs), advantages=advantages, weights=weights
    ).loss.backward()
    close(logprobs.grad, [-1.28 * 2, 0.5 * 3])


def test_a_correction_weighs_the_policys_part():
    weights, old = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    correction = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = policy_loss(
        old, policy=PolicyLoss(), old=old, advantages=advantages, weights=weights, correction=correction
    )
    close(found.loss, -(0.5 * 2) + 2 * 3)


# The trainer's probabilities divided by the drawn ones: two answers of two tokens, one of one token.
RATIOS = torch.tensor([[0.5, 3.0], [1.05, 1.2], [0.8, 7.0]], dtype=torch.float64)
DRAWN = torch.tensor([[0.5, 0.125], [0.25, 0.5], [0.5, 1.0]], dtype=torch.float64).log()
ANSWERED = torch.tensor([[True, True], [True, True], [True, False]])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("token_truncate", [[0.5, 1.25], [1.05, 1.2], [0.8, 1]]),
        ("token_mask", [[0.5, 0], [1.05, 1.2], [0.8, 1]]),
        ("sequence_truncate", [[1.25, 1.25], [1.25, 1.25], [0.8, 1]]),
        ("sequence_mask", [[0, 0], [0, 0], [0.8, 1]]),
    ],
)
def test_weights_of_answers_that_another_forward_has_drawn(form, expected):
    trainer = DRAWN + RATIOS.log()
    close(importance_weights(trainer, drawn=DRAWN, mask=ANSWERED, form=form, most=1.25), expected)


def test_how_far_draws_are_from_the_trainer_by_hand():
    """Sums of two ranks give the figures of one."""
    trainer = DRAWN + RATIOS.log()
    sums = [mismatch_sums(trainer[rows], drawn=DRAWN[rows], mask=ANSWERED[rows]) for rows in (slice(1), slice(1, 3))]
    found, ratios = Mismatch.of(sums[0] + sums[1]), [0.5, 3.0, 1.05, 1.2, 0.8]
    assert found.k1 == pytest.approx(-sum(map(math.log, ratios)) / 5, abs=1e-12)
    assert found.k3 == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 5, abs=1e-12)
    assert found.perplexity == pytest.approx((1.5**-0.5 + 1.26**-0.5 + 1 / 0.8) / 3, abs=1e-12)
    assert found.outside == 4 / 5
    same = Mismatch.of(mismatch_sums(DRAWN, drawn=DRAWN, mask=ANSWERED))
    assert same == Mismatch(k1=0, k3=0, perplexity=1, outside=0)


def test_averages():
    lengths, counts = torch.tensor([2, 3, 1, 2]), torch.tensor([True, True, False, True])

    def weights(average: str) -> Tensor:
        return token_weights(lengths, counts=counts, average=average, samples=3, tokens=7, max_tokens=5)

    counted = torch.tensor([1.0] * 5 + [0.0] + [1.0] * 2)
    assert torch.equal(weights("tokens"), counted / 7) and torch.equal(weights("constant"), counted / 15)
    sequence = weights("sequence")
    torch.testing.assert_close(sequence, torch.tensor([1 / 6] * 2 + [1 / 9] * 3 + [0] + [1 / 6] * 2))


def test_the_value_loss_by_hand():
    values, old = torch.tensor([[1.0, 3.0]], dtype=torch.float64), torch.tensor([[0.5, 2.9]], dtype=torch.float64)
    returns, weights = torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.full((1, 2), 0.5, dtype=torch.float64)
    close(value_loss(values, old=old, returns=returns, clip=0.0, weights=weights), (0 + 4) / 4)
    close(value_loss(values, old=old, returns=returns, clip=0.2, weights=weights), (0.3**2 + 4) / 4)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_has_the_gradients_of_finite_differences_and_any_split(clip):
    given = batch()
    values, old, returns = given["logprobs"].requires_grad_(), given["old"], given["reference"]

    def loss(rows: slice, values: Tensor) -> Tensor:
        packing = Packing.of(MASK[rows])
        own = {"old": packing.pack(old[rows]), "returns": packing.pack(returns[rows])}
        return value_loss(packing.pack(values[rows]), clip=clip, weights=weights_of(rows, "tokens"), **own)

    assert torch.autograd.gradcheck(lambda x: loss(slice(None), x), values)
    split = sum(loss(slice(row, row + 1), values) for row in range(4))
    torch.testing.assert_close(split, loss(slice(None), values), **EXACT)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_weighted"])
def test_divergences_have_the_gradients_of_finite_differences(estimator):
    given = batch()
    given.pop("advantages")
    logprobs = given.pop("logprobs").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: divergence(x, estimator=estimator, **given), logprobs)
