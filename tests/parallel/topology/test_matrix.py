"""A short form of tests/slow/test_layouts.py: every layout once, the strategies shared out among them."""

import functools

import pytest

from tests.parallel.topology.faults import follow_with_fault
from tests.parallel.topology.matrix import (
    LAYOUTS,
    RELATIVE_FP32,
    STAGES,
    TIERS,
    Cell,
    Distance,
    Walk,
    cut_of,
    deviation,
    distance,
    follow,
    run_alone,
    run_cell,
    walk_twice,
)

STEPS = 4
STEPS_16_BIT = 4
STRATEGIES = [(stage, tier) for stage in STAGES for tier in TIERS]


# Of the layouts with experts, one for every way to cut a batch.
CUT_BY = {cut_of(layout): layout for layout, (_, topology) in LAYOUTS.items() if topology.expert > 1}


def experts_of(layout: str) -> str | None:
    """The key of the one-rank run that `layout` is compared with."""
    return CUT_BY[cut_of(layout)] if LAYOUTS[layout][1].expert > 1 else None


@pytest.fixture(scope="module")
def reference(ranks):
    """layout -> the one-rank run that it is compared with."""

    @functools.cache
    def of(experts: str | None) -> Cell:
        return ranks(1).run(run_alone, layout=experts, dtype="fp32", steps=STEPS)[0]

    return lambda layout: of(experts_of(layout))


@pytest.fixture(scope="module")
def walked(ranks, tmp_path_factory):
    """layout, dtype -> the folder of the one-rank run's states, its steps, and its error against fp32."""

    @functools.cache
    def of(experts: str | None, dtype: str) -> tuple[str, Walk, Distance]:
        folder = str(tmp_path_factory.mktemp("states"))
        own, exact = walk_twice(ranks(1), layout=experts, dtype=dtype, folder=folder, steps=STEPS_16_BIT)
        return folder, own, distance(own, reference=exact)

    return lambda layout, dtype: of(experts_of(layout), dtype)


@pytest.mark.parametrize("number, layout", enumerate(LAYOUTS))
def test_every_layout_equals_one_rank(ranks, reference, number, layout):
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


@pytest.mark.parametrize("number, layout", enumerate(LAYOUTS))
def test_a_step_in_16_bits_is_as_exact_as_on_one_rank(ranks, walked, number, layout):
    (world, _), dtype = LAYOUTS[layout], ("bf16", "fp16")[number % 2]
    stage, tier = STRATEGIES[number % len(STRATEGIES)]
    folder, own, error = walked(layout, dtype)
    where = {"layout": layout, "stage": stage, "tier": tier, "dtype": dtype, "folder": folder, "steps": STEPS_16_BIT}
    walk = ranks(world).run(follow, **where)[0]
    assert distance(walk, reference=own).within(error)


@pytest.mark.parametrize(
    "fault, layout, dtype",
    [
        ("one replica weighs more", "dp2", "bf16"),
        ("gradients in 8 bits", "dp2", "fp16"),
        ("activations in 8 bits", "tp2", "bf16"),
    ],
)
def test_the_matrix_sees_a_small_mistake(ranks, walked, fault, layout, dtype):
    folder, own, error = walked(layout, dtype)
    where = {"layout": layout, "stage": 1, "tier": "none", "dtype": dtype, "folder": folder, "steps": STEPS_16_BIT}
    walk = ranks(2).run(follow_with_fault, fault=fault, **where)[0]
    assert not distance(walk, reference=own).within(error)
