"""A short form of scripts/check_layouts.py: every layout once, the strategies shared out among them."""

import functools

import pytest

from tests.topology.matrix import (
    LAYOUTS,
    RELATIVE_FP32,
    STAGES,
    TIERS,
    Cell,
    cut_of,
    deviation,
    run_alone,
    run_cell,
)

STEPS = 6
STRATEGIES = [(stage, tier) for stage in STAGES for tier in TIERS]


@pytest.fixture(scope="module")
def reference(ranks):
    """layout -> the one-rank run that it is compared with."""

    @functools.cache
    def with_cut(cut: tuple[int, int] | None, layout: str | None) -> Cell:
        return ranks(1).run(run_alone, layout=layout, dtype="fp32", steps=STEPS)[0]

    same = {cut_of(layout): layout for layout, (_, topology) in LAYOUTS.items() if topology.expert > 1}

    def of(layout: str) -> Cell:
        if LAYOUTS[layout][1].expert == 1:
            return with_cut(None, None)
        return with_cut(cut_of(layout), same[cut_of(layout)])

    return of


@pytest.mark.parametrize("number, layout", enumerate(LAYOUTS))
def test_every_layout_computes_what_one_rank_computes(ranks, reference, number, layout):
    world, _ = LAYOUTS[layout]
    digests = set()
    for stage, tier in (STRATEGIES[number % len(STRATEGIES)], STRATEGIES[-1 - number % len(STRATEGIES)]):
        cells = ranks(world).run(run_cell, layout=layout, stage=stage, tier=tier, dtype="fp32", steps=STEPS)
        expected = reference(layout)
        for cell in cells:
            assert deviation(cell, reference=expected) <= RELATIVE_FP32
            assert cell.grad_norms == pytest.approx(expected.grad_norms, rel=RELATIVE_FP32)
        digests.add(tuple(cell.digest for cell in cells))
    assert len(digests) == 1
