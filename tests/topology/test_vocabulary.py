"""Cross entropy on sharded logits: the values of full ones, in the memory of the logits."""

import pytest
import torch
from torch.nn import functional as F

from ztk.nn.loss import IGNORED
from ztk.runtime import Process, Topology
from ztk.tensor.loss import vocabulary_parallel_cross_entropy

ROWS, WORDS = 24, 10


def cross_entropy(process: Process) -> tuple[float, torch.Tensor, bool, str]:
    """The loss, the own columns' gradient, whether it lies where the logits lay, and what a second backward says."""
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
