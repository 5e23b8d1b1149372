"""Divergences of students and teachers by hand, and next to TRL's."""

import pytest
import torch

from ztk.rl.align import DistillPolicy, distill_losses, last_answer

LOGITS = torch.tensor([[0.5, -1.0, 2.0], [1.0, 1.0, -3.0]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 0.0, -0.5], [0.0, 2.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (1.0, 2.0), (0.5, 0.7), (0.1, 1.0)])
def test_divergences_by_hand(beta, temperature):
    own, theirs = (torch.softmax(logits / temperature, -1) for logits in (LOGITS, TEACHER))

    def divergence(first, second):
        return (first * (first / second).log()).sum(-1)

    mixed = (1 - beta) * own + beta * theirs
    expected = {0.0: divergence(theirs, own), 1.0: divergence(own, theirs)}.get(
        beta, beta * divergence(theirs, mixed) + (1 - beta) * divergence(own, mixed)
    )
    policy = DistillPolicy(beta=beta, temperature=temperature)
    torch.testing.assert_close(distill_losses(LOGITS, teacher=TEACHER, policy=policy), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.9, 1.0])
def test_losses_and_gradients_are_trls(beta, temperature):
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    labels = torch.tensor([[3, -100, 7]])
    parts = torch.randn(2, 1, 3, 50, generator=torch.Generator().manual_seed(0))
    own, theirs = parts[0].requires_grad_(), parts[1]
    expected = trainer.generalized_jsd_loss(own, theirs, labels=labels, beta=beta, temperature=temperature)
    (gradient,) = torch.autograd.grad(expected, own)
    counts = labels[0] != -100
    policy = DistillPolicy(beta=beta, temperature=temperature)
    found = distill_losses(own[0][counts], teacher=theirs[0][counts], policy=policy).sum() / counts.sum()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found, own)[0], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("counts", "expected"), [("0011", (2, 4)), ("01011000", (3, 5)), ("11", (0, 2))])
def test_the_last_answer_is_the_last_run_of_tokens_that_count(counts, expected):
    found = last_answer(torch.tensor([letter == "1" for letter in counts]))
    assert (found.start, found.stop) == expected


@pytest.mark.parametrize("values", [{"beta": 1.1}, {"beta": -0.1}, {"temperature": 0.0}])
def test_numbers_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=rf"distill\.{next(iter(values))}=.*must be"):
        DistillPolicy(**values)
