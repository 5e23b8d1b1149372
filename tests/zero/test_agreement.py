"""Writes into full parameters are the same on every rank, or an error on every rank."""

import pytest
import torch
from torch import Tensor, nn

from tests.zero.models import Layout, make_engine
from ztk.zero.parameters.bits import digest_of


class Looked(nn.Module):
    def __init__(self, *, max_norm: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(10, 8, max_norm=max_norm), nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(tokens)), tokens)


def _on_one(head: nn.Linear, rank: int) -> None:
    if rank == 0:
        head.weight.mul_(0.5)


def _data_on_one(head: nn.Linear, rank: int) -> None:
    if rank == 1:
        head.weight.data.mul_(0.5)


def _differing(head: nn.Linear, rank: int) -> None:
    head.weight.add_(1e-3 * rank)


def _other_memory(head: nn.Linear, rank: int) -> None:
    if rank == 1:
        head.weight.data = head.weight * 0.5


def _replaced_on_one(head: nn.Linear, rank: int) -> None:
    if rank == 1:
        head.bias = nn.Parameter(torch.ones(10))


def _alike(head: nn.Linear, rank: int) -> None:
    head.weight.data.clamp_(-0.2, 0.2)


def _read_on_one(head: nn.Linear, rank: int) -> None:
    if rank == 0:
        head.weight.data.norm()


WRITES = {
    "max_norm": (None, r"parameter embedding.weight: an embedding with max_norm"),
    "on one": (_on_one, "parameter head.weight: the ranks wrote different values"),
    "data on one": (_data_on_one, "parameter head.weight: the ranks wrote different values"),
    "differing": (_differing, "parameter head.weight: the ranks wrote different values"),
    "other memory": (_other_memory, "parameter head.weight: the ranks wrote different values"),
    "replaced on one": (_replaced_on_one, "parameter head.bias was replaced by another object"),
    "alike": (_alike, "trained"),
    "read on one": (_read_on_one, "trained"),
}


def written(process, *, stage: int, is_late: bool, name: str) -> tuple[str, int]:
    """The step's error after a write between the second backward and the step, and the number of small collectives in a step without one."""
    write, _ = WRITES[name]
    model = Looked(max_norm=1.0 if write is None else None)
    engine = make_engine(process, layout=Layout(stage=stage), model=model)
    engine.zero._writes.agreement.is_late = is_late
    said, calls = "trained", 0
    try:
        for step in range(4):
            before = process.comm.counters.calls.get("scalars", 0)
            tokens = torch.randint(10, (8,), generator=torch.Generator().manual_seed(step)).chunk(2)[process.rank]
            engine.backward(engine(tokens))
            if step == 1 and write is not None:
                with torch.no_grad():
                    write(model.head, process.rank)
            engine.step()
            calls = process.comm.counters.calls.get("scalars", 0) - before
    except RuntimeError as error:
        said = str(error)
    engine.close()
    return said, calls


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_writes_that_differ_between_ranks_are_an_error_on_every_rank(ranks, stage):
    for name, (_, expected) in WRITES.items():
        for said, calls in ranks(2).run(written, stage=stage, is_late=False, name=name):
            assert expected in said, name
            assert calls == 1 or said != "trained"  # the norm's alone


def test_where_the_host_reads_late_the_error_comes_one_step_late(ranks):
    """As on a GPU. A write that leaves no trace but a read of `.data` on one rank cannot be distinguished from a read there."""
    for name, (_, expected) in WRITES.items():
        if name not in ("data on one", "replaced on one"):
            for said, _ in ranks(2).run(written, stage=1, is_late=True, name=name):
                assert expected in said, name


def test_a_digest_tells_bits_and_places():
    values = torch.randn(3, 700_000)
    digests = {int(digest_of(values)), int(digest_of(values.flip(0))), int(digest_of(values.flip(1)))}
    one = values.clone()
    one[2, 5] = torch.nextafter(one[2, 5], torch.tensor(9.0))
    assert len(digests | {int(digest_of(one))}) == 4
    assert int(digest_of(values.clone())) in digests
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.bool):
        assert int(digest_of(torch.ones(3, dtype=dtype))) != int(digest_of(torch.zeros(3, dtype=dtype)))
    assert int(digest_of(torch.empty(0, 3))) == 0
