"""The rank that orthogonalises each matrix: arithmetic."""

from ztk.optim.muon import Muon
from ztk.zero.update.matrices import Matrix, balance, plan_rounds


def matrix(name: str, *, cuts: tuple[int, ...], shape: tuple[int, int]) -> Matrix:
    ends = (0, *cuts, shape[0] * shape[1])
    held = tuple(range(a, b) for a, b in zip(ends, ends[1:], strict=False))
    return Matrix(name=name, shape=shape, held=held, planned=shape[0] * shape[1], cost=Muon().flops(shape))


def test_flops_count_the_products():
    """Five times X X^T of [2, 3], its square, and the product with X, whichever side is longer."""
    assert Muon().flops((2, 3)) == Muon().flops((3, 2)) == 5 * 2 * (2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3)


def test_the_most_expensive_go_first_to_who_has_least():
    assert balance([1, 5, 3, 3], num_ranks=2) == (0, 0, 1, 1)
    assert balance([2, 2, 2], num_ranks=4) == (0, 1, 2)
    costs = [4 * n * n for n in range(1, 60)]
    loads = [0] * 8
    for cost, owner in zip(costs, balance(costs, num_ranks=8), strict=True):
        loads[owner] += cost
    assert max(loads) <= 4 / 3 * max(sum(costs) / 8, max(costs))


def test_rounds_are_limited_and_hold_every_matrix_once():
    matrices = [matrix(f"m{n}", cuts=(6,), shape=(4, 5)) for n in range(5)]
    rounds = plan_rounds(matrices, num_ranks=2, limit=20)
    assert [len(planned.matrices) for planned in rounds] == [2, 2, 1]
    assert [m for planned in rounds for m in planned.matrices] == matrices
    assert len(plan_rounds(matrices, num_ranks=2, limit=1)) == 5  # one matrix may be larger than the limit


def test_sends_match_receives():
    (planned,) = plan_rounds([matrix(f"m{n}", cuts=(3 * n, 12), shape=(4, 5)) for n in range(4)], num_ranks=3)
    for rank in range(3):
        places = planned.places(rank)
        ordered = sorted(planned.matrices, key=lambda m: places[m.name])
        ends = [places[m.name] + len(m.held[rank]) for m in ordered]
        assert [0, *ends[:-1]] == [places[m.name] for m in ordered]
        assert ends[-1] == sum(planned.sent(rank))
    for owner in range(3):
        assert planned.received(owner) == [planned.sent(rank)[owner] for rank in range(3)]
        assert sum(planned.received(owner)) == 20 * len(planned.owned(owner))
