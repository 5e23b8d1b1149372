"""A short form of scripts/check_layouts.py: every layout once, the strategies shared out among them."""

import pytest

from tests.topology.matrix import (
    LAYOUTS,
    RELATIVE_FP32,
    STAGES,
    TIERS,
    Cell,
    deviation,
    run_alone,
    run_cell,
)

STEPS = 6
STRATEGIES = [(stage, tier) for stage in STAGES for tier in TIERS]


@pytest.fixture(scope="module")
def references(ranks) -> dict[bool, Cell]:
    """The one-rank runs, without and with experts."""
    return {
        experts: ranks(1).run(run_alone, experts=experts, dtype="fp32", steps=STEPS)[0] for experts in (False, True)
    }


@pytest.mark.parametrize("number, layout", enumerate(LAYOUTS))
def test_every_layout_computes_what_one_rank_computes(ranks, references, number, layout):
    world, topology = LAYOUTS[layout]
    digests = set()
    for stage, tier in (STRATEGIES[number % len(STRATEGIES)], STRATEGIES[-1 - number % len(STRATEGIES)]):
        cells = ranks(world).run(run_cell, layout=layout, stage=stage, tier=tier, dtype="fp32", steps=STEPS)
        reference = references[topology.expert > 1]
        for cell in cells:
            assert deviation(cell, reference=reference) <= RELATIVE_FP32
            assert cell.grad_norms == pytest.approx(reference.grad_norms, rel=RELATIVE_FP32)
        digests.add(tuple(cell.digest for cell in cells))
    assert len(digests) == 1
