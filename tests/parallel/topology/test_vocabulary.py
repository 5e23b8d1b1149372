"""Cross entropy on sharded logits: the values of full ones, in the memory of the logits."""

import pytest
import torch
from torch.nn import functional as F

from tests.parallel.topology.runs import Strategy, train, train_alone
from ztk.core.runtime import Process, Topology
from ztk.nn.loss import IGNORED, LanguageLoss
from ztk.parallel.tensor.loss import vocabulary_parallel_cross_entropy

ROWS, WORDS = 24, 10


def cross_entropy(process: Process) -> tuple[float, torch.Tensor, bool, str]:
    """The loss, the own columns' gradient, whether it reuses the logits' memory, and the error of a second backward."""
    comm = process.arrange(Topology(tensor=2)).mesh.comm("tp")
    full, targets = problem()
    own = full.chunk(2, dim=1)[comm.rank].clone().requires_grad_()
    logits = own * 1
    place, found = logits.data_ptr(), []
    logits.register_hook(lambda gradient: found.append(gradient.data_ptr()))
    loss = vocabulary_parallel_cross_entropy(logits, targets=targets, first=comm.rank * WORDS // 2, comm=comm)
    loss.backward(retain_graph=True)
    gradient = own.grad.clone()
    with pytest.raises(RuntimeError) as again:
        loss.backward()
    return float(loss.detach()), gradient, found == [place], str(again.value)


def z_loss_of_parts(process: Process, *, weight: float) -> tuple[float, torch.Tensor]:
    """The loss and the own columns' gradient."""
    comm = process.arrange(Topology(tensor=2)).mesh.comm("tp")
    full, targets = problem()
    own = full.chunk(2, dim=1)[comm.rank].clone().requires_grad_()
    first = comm.rank * WORDS // 2
    loss = vocabulary_parallel_cross_entropy(own * 1, targets=targets, first=first, comm=comm, z_loss=weight)
    loss.backward()
    return float(loss.detach()), own.grad


def exact_z_loss(weight: float) -> tuple[float, torch.Tensor]:
    """By autograd in float64."""
    full, targets = problem()
    logits = full.double().requires_grad_()
    counted = targets != IGNORED
    squares = logits.logsumexp(dim=1).square()[counted]
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED) + weight * squares.mean()
    loss.backward()
    return float(loss.detach()), logits.grad


# A gradient is p (1 + 2 z lse) - onehot, over 19 targets, with |lse| < 10: p has a relative error of a few roundings of lse and of x - lse,
# 20 of 2^-24 each, and 1 + 2 z lse < 3 for z = 0.1.
Z_WEIGHT, ROUNDING = 0.1, 3 * 40 * 2**-24 / 19


def test_z_loss_of_columns_on_ranks(ranks):
    value, gradient = exact_z_loss(Z_WEIGHT)
    assert (gradient - exact_z_loss(0.0)[1]).abs().max() > 1000 * ROUNDING
    results = ranks(2).run(z_loss_of_parts, weight=Z_WEIGHT)
    for loss, _ in results:
        assert loss == pytest.approx(value, rel=1e-6)  # a few roundings of fp32
    torch.testing.assert_close(torch.cat([own for _, own in results], dim=1).double(), gradient, atol=ROUNDING, rtol=0)


def test_z_loss_is_trained_with_and_not_evaluated_with():
    value, gradient = exact_z_loss(Z_WEIGHT)
    full, targets = problem()
    logits, module = full.clone().requires_grad_(), LanguageLoss(z_loss=Z_WEIGHT)
    loss = module((logits * 1)[None], targets[None])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), gradient, atol=ROUNDING, rtol=0)
    plain = LanguageLoss()(full[None].clone(), targets[None])
    assert torch.equal(module.eval()(full[None].clone(), targets[None]), plain)
    assert float(plain) < value


@pytest.mark.parametrize("topology", [Topology(tensor=2), Topology(pipeline=2), Topology(sequence=2)])
def test_z_loss_at_every_cut_of_the_model(ranks, topology):
    """Losses and gradient norms as on one rank, and others than without it."""
    plain, alone = (ranks(1).run(train_alone, strategy=Strategy(z_loss=weight), steps=3)[0] for weight in (0.0, 0.01))
    assert min(a - b for a, b in zip(alone.losses, plain.losses, strict=True)) > 0.01
    for outcome in ranks(2).run(train, strategy=Strategy(topology=topology, stage=2, z_loss=0.01), steps=3):
        assert outcome.losses == pytest.approx(alone.losses, rel=1e-5)  # see test_layouts.py
        assert outcome.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(WORDS, (ROWS,), generator=generator)
    targets[::5] = IGNORED
    return 3 * torch.randn(ROWS, WORDS, generator=generator), targets


def test_the_gradient_takes_the_logits_memory(ranks):
    full, targets = problem()
    full.requires_grad_()
    expected = F.cross_entropy(full, targets)
    expected.backward()
    results = ranks(2).run(cross_entropy)
    for loss, _, is_same_place, again in results:
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6)  # a few roundings of fp32
        assert is_same_place and "an earlier backward" in again
    torch.testing.assert_close(torch.cat([gradient for _, gradient, *_ in results], dim=1), full.grad)
