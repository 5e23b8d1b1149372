"""Losses against numbers computed by hand, finite differences, and the same sequences divided differently."""

import math

import pytest
import torch
import torch.nn.functional as F

from ztk.rl.align import (
    DpoPolicy,
    PairLogprobs,
    PairwisePolicy,
    Sequences,
    counted_logprobs,
    dpo_loss,
    dpo_losses,
    last_values,
    pairwise_losses,
    segment_sums,
)

LENGTHS = [5, 3, 4, 6, 5, 4, 3, 7]  # four pairs
# Sums of float64 of at most this many terms of size 10, in another order: 64 * 10 * 2^-53 = 7e-14.
SPLIT = 1e-12


def packed(lengths=LENGTHS, *, vocab=7, seed=0) -> Sequences:
    """Random tokens; all but the first two of a sequence are its answer."""
    drawn = torch.Generator().manual_seed(seed)
    parts = []
    for length in lengths:
        tokens = torch.randint(vocab, (length,), generator=drawn)
        parts.append((tokens, torch.arange(length) >= 2))
    return Sequences.of(parts)


def of_pair(chosen: float, rejected: float, *, chosen_tokens=2, rejected_tokens=4) -> PairLogprobs:
    return PairLogprobs(
        chosen=torch.tensor([chosen], dtype=torch.float64),
        rejected=torch.tensor([rejected], dtype=torch.float64),
        chosen_tokens=torch.tensor([chosen_tokens]),
        rejected_tokens=torch.tensor([rejected_tokens]),
    )


def picked(sequences: Sequences, numbers: list[int]) -> Sequences:
    tokens, answer = (values.split(sequences.lengths.tolist()) for values in (sequences.tokens, sequences.answer))
    return Sequences.of([(tokens[number], answer[number]) for number in numbers])


# Sequences


def test_rows_and_packed_tokens_agree():
    sequences = Sequences.of(
        [
            (torch.tensor([5, 6, 7]), torch.tensor([False, True, True])),
            (torch.tensor([8, 9]), torch.tensor([False, True])),
        ]
    )
    assert sequences.rows(length=4, pad=0).tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert sequences.rows(length=4, pad=0)[sequences.is_token(length=4)].tolist() == [5, 6, 7, 8, 9]
    assert sequences.positions.tolist() == [0, 1, 2, 0, 1]
    assert (sequences.starts.tolist(), sequences.ends.tolist()) == ([0, 3], [2, 4])
    assert sequences.answer_lengths.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("tokens", "lengths", "answer", "says"),
    [
        ([1, 2, 3], [2], [False] * 3, "lengths sum to 2 and there are 3 tokens"),
        ([1, 2, 3], [3, 0], [False] * 3, "each with a token or more"),
        ([1, 2, 3], [2, 1], [False, True, True], "nothing before it"),
        ([1, 2, 3], [3], [False], r"must be \[T\]"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(tokens, lengths, answer, says):
    with pytest.raises(ValueError, match=says):
        Sequences(tokens=torch.tensor(tokens), lengths=torch.tensor(lengths), answer=torch.tensor(answer))
    with pytest.raises(ValueError, match="does not fit into a row of 3"):
        packed([4]).rows(length=3, pad=0)


def logprobs_of(logits: torch.Tensor, *, sequences: Sequences) -> torch.Tensor:
    """From the logits of all tokens, [T, V]."""
    return counted_logprobs(logits[sequences.answer.nonzero().squeeze(1) - 1], sequences=sequences)


def test_log_probabilities_by_hand():
    sequences = Sequences.of([(torch.tensor([0, 1, 0]), torch.tensor([False, True, True]))])
    logits = torch.tensor([[0.0, math.log(3)], [math.log(9), 0.0], [5.0, 5.0]], dtype=torch.float64)
    expected = [0.0, math.log(3 / 4), math.log(9 / 10)]
    assert logprobs_of(logits, sequences=sequences).tolist() == pytest.approx(expected, abs=1e-15)


# DPO


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # Log ratios: chosen -1 - -2 = 1, rejected -4 - -3.5 = -0.5, so the margin is 1.5.
        (DpoPolicy(beta=0.2), math.log1p(math.exp(-0.3))),
        (DpoPolicy(beta=0.2, label_smoothing=0.1), 0.9 * math.log1p(math.exp(-0.3)) + 0.1 * math.log1p(math.exp(0.3))),
        (DpoPolicy(loss="hinge", beta=0.2), 0.7),
        (DpoPolicy(loss="hinge", beta=1.0), 0.0),
        (DpoPolicy(loss="ipo", beta=0.25), (1.5 - 2.0) ** 2),
        # Per token: 1 / 2 - -0.5 / 4 = 0.625.
        (DpoPolicy(beta=0.2, length_normalised=True), math.log1p(math.exp(-0.125))),
        (DpoPolicy(loss="ipo", beta=0.25, length_normalised=True), (0.625 - 2.0) ** 2),
    ],
)
def test_dpo_by_hand(policy, expected):
    found = dpo_losses(of_pair(-1.0, -4.0), policy=policy, reference=of_pair(-2.0, -3.5))
    assert found.losses.item() == pytest.approx(expected, rel=1e-14)
    share = 2 if policy.length_normalised else 1
    assert found.chosen.item() == pytest.approx(policy.beta * 1.0 / share)


def test_dpo_without_reference_and_with_a_supervised_term():
    policy, pairs = DpoPolicy(beta=0.5, sft_weight=0.3), of_pair(-1.0, -4.0)
    found = dpo_losses(pairs, policy=policy, reference=None)
    assert found.losses.item() == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-14)
    loss = dpo_loss(found, pairs=pairs, policy=policy, num_pairs=1, num_tokens=2)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1.5)) + 0.3 * 0.5, rel=1e-14)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss": "mse"}, "must be one of sigmoid, ipo, hinge, simpo, orpo, kto"),
        ({"beta": 0.0}, "dpo.beta=0.0: must be above 0"),
        ({"label_smoothing": 0.5}, "dpo.label_smoothing=0.5: must be 0 or more and at most 0.499"),
        (
            {"label_smoothing": 0.1, "loss": "ipo"},
            "dpo.label_smoothing=0.1 has no effect here, only with task=dpo with dpo.loss=sigmoid or simpo",
        ),
        ({"sft_weight": -1.0}, "dpo.sft_weight=-1.0"),
        ({"sft_weight": math.nan}, "dpo.sft_weight=nan"),
    ],
)
def test_dpo_refuses(values, says):
    with pytest.raises(ValueError, match=says):
        DpoPolicy(**values)


# Reward models


def pair_values(chosen: list[float], rejected: list[float]) -> tuple[torch.Tensor, Sequences]:
    """A pair that differs from its third token on."""
    first, second = torch.arange(len(chosen)), torch.arange(len(rejected)) + 10 * (torch.arange(len(rejected)) >= 2)
    parts = [(tokens, torch.arange(len(tokens)) >= 1) for tokens in (first, second)]
    return torch.tensor(chosen + rejected, dtype=torch.float64), Sequences.of(parts)


@pytest.mark.parametrize(
    ("policy", "margin", "expected"),
    [
        (PairwisePolicy(), None, math.log1p(math.exp(-(3.0 - 1.0)))),
        (PairwisePolicy(margin=0.5), None, math.log1p(math.exp(-1.5))),
        (PairwisePolicy(margin=0.5), math.nan, math.log1p(math.exp(-1.5))),
        (PairwisePolicy(margin=0.5), 1.0, math.log1p(math.exp(-1.0))),
        (PairwisePolicy(centring=0.1), None, math.log1p(math.exp(-2.0)) + 0.1 * 16.0),
        # From the third token on: 2.5 - 1, and 3 - 1 with the last value of the shorter.
        (PairwisePolicy(loss="per_token"), None, (math.log1p(math.exp(-1.5)) + math.log1p(math.exp(-2.0))) / 2),
    ],
)
def test_pairs_by_hand(policy, margin, expected):
    values, sequences = pair_values([9.0, 9.0, 2.5, 3.0], [-9.0, -9.0, 1.0])
    margins = None if margin is None else torch.tensor([margin], dtype=torch.float64)
    found = pairwise_losses(values, sequences=sequences, policy=policy, margins=margins)
    assert found.losses.item() == pytest.approx(expected, rel=1e-14)
    assert (found.chosen.item(), found.rejected.item()) == (3.0, 1.0)


def test_per_token_equals_deepspeed_chat_for_equal_lengths():
    """The loop of DeepSpeed-Chat's RewardModel.forward, from its formulas, over pairs without padding."""
    sequences, values = packed([6] * 8), torch.randn(48, dtype=torch.float64)
    tokens, rewards = sequences.tokens.view(8, 6), values.view(8, 6)
    expected = []
    for pair in range(4):
        start = int((tokens[pair] != tokens[pair + 4]).nonzero()[0])
        expected.append(-F.logsigmoid(rewards[pair][start:] - rewards[pair + 4][start:]).mean())
    found = pairwise_losses(values, sequences=sequences, policy=PairwisePolicy(loss="per_token"))
    assert torch.allclose(found.losses, torch.stack(expected), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss": "mse"}, "must be one of bradley_terry, per_token"),
        ({"centring": -0.1}, "reward.centring=-0.1"),
        ({"margin": 1.0, "loss": "per_token"}, "reward.margin=1.0"),
    ],
)
def test_pairwise_refuses(values, says):
    with pytest.raises(ValueError, match=says):
        PairwisePolicy(**values)
    with pytest.raises(ValueError, match="3 sequences are no pairs"):
        pairwise_losses(torch.zeros(12), sequences=packed([4, 4, 4]), policy=PairwisePolicy())


# Gradients, and how sequences are divided

POLICIES = [
    DpoPolicy(beta=0.3, label_smoothing=0.2, sft_weight=0.5),
    DpoPolicy(loss="ipo", beta=0.3),
    DpoPolicy(loss="hinge", beta=0.3, sft_weight=0.1),
    DpoPolicy(beta=0.3, length_normalised=True),
    PairwisePolicy(margin=0.3, centring=0.05),
    PairwisePolicy(loss="per_token"),
]


def loss_of(values: torch.Tensor, *, sequences: Sequences, policy, pairs: int, tokens: int) -> torch.Tensor:
    """The part of a step's loss; values: logits [T, V] for DPO, else rewards [T]."""
    if isinstance(policy, PairwisePolicy):
        return pairwise_losses(values, sequences=sequences, policy=policy).losses.sum() / pairs
    logprobs = PairLogprobs.of(logprobs_of(values, sequences=sequences), sequences=sequences)
    reference = PairLogprobs.of(logprobs_of(values.detach().sin(), sequences=sequences), sequences=sequences)
    found = dpo_losses(logprobs, policy=policy, reference=reference)
    return dpo_loss(found, pairs=logprobs, policy=policy, num_pairs=pairs, num_tokens=tokens)


def values_for(policy, *, sequences: Sequences) -> torch.Tensor:
    shape = (len(sequences.tokens),) if isinstance(policy, PairwisePolicy) else (len(sequences.tokens), 7)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_equal_finite_differences(policy):
    sequences = packed([4, 3, 3, 5])
    values = values_for(policy, sequences=sequences).requires_grad_()
    reference = values.detach().sin()

    def loss(values):
        if isinstance(policy, PairwisePolicy):
            return pairwise_losses(values, sequences=sequences, policy=policy).losses.sum() / 2
        pairs = PairLogprobs.of(logprobs_of(values, sequences=sequences), sequences=sequences)
        frozen = PairLogprobs.of(logprobs_of(reference, sequences=sequences), sequences=sequences)
        found = dpo_losses(pairs, policy=policy, reference=frozen)
        return dpo_loss(found, pairs=pairs, policy=policy, num_pairs=2, num_tokens=5)

    assert torch.autograd.gradcheck(loss, values)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]], [[1], [3, 2, 0]]], ids=str)
def test_losses_and_gradients_do_not_depend_on_how_pairs_are_divided(policy, parts):
    sequences = packed()
    values = values_for(policy, sequences=sequences)
    tokens = int(sequences.answer_lengths[:4].sum())
    full = values.clone().requires_grad_()
    expected = loss_of(full, sequences=sequences, policy=policy, pairs=4, tokens=tokens)
    expected.backward()
    divided, total = values.clone().requires_grad_(), 0.0
    for part in parts:
        numbers = part + [pair + 4 for pair in part]
        own = torch.cat([divided.split(LENGTHS)[number] for number in numbers])
        loss = loss_of(own, sequences=picked(sequences, numbers), policy=policy, pairs=4, tokens=tokens)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), abs=SPLIT)
    assert (divided.grad - full.grad).abs().max() < SPLIT


def test_sums_do_not_depend_on_the_other_sequences():
    """Bit for bit, in float32."""
    values, lengths = torch.randn(37), torch.tensor([5, 12, 7, 13])
    apart = [segment_sums(part, lengths=torch.tensor([len(part)])) for part in values.split(lengths.tolist())]
    assert torch.equal(segment_sums(values, lengths=lengths), torch.cat(apart))
    sequences = packed([5, 12, 7, 13])
    assert torch.equal(last_values(values, sequences=sequences), values[torch.tensor([4, 16, 23, 36])])
