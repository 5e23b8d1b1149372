"""Combinations of stage, tier, precision, recompute mode and layout run two steps on tensors without values, as on a GPU.

A part of them in every run of the tests, all 1,512 with `--slow`.

The steps run on a model of streams, so every use of a buffer is checked to be ordered behind the one before it.
"""

import gc
import itertools
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.planner.combinations import DTYPES, LAYOUTS, MODES, STAGES, TIERS, case_of, every, faults, sample
from tests.planner.measure import Case, planned
from ztk.planner import Plan


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_plans_alone() -> Iterator[None]:
    """Every plan runs one garbage collection per rank. Objects of earlier tests in this process would make it five times as slow."""
    gc.collect()
    gc.freeze()
    yield


def test_the_sample_has_every_pair_and_every_triple():
    rows = sample()
    assert len(set(rows)) == len(rows) == 504 and set(rows) < set(every())
    for layout, stage in itertools.product(LAYOUTS, STAGES):
        triples = {row[2:] for row in rows if row[:2] == (layout, stage)}
        for first, second in itertools.combinations((0, 1, 2), 2):
            assert len({(triple[first], triple[second]) for triple in triples}) == 9
    assert {row[2:] for row in rows} == set(itertools.product(TIERS, DTYPES, MODES))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_of_combinations_runs(tmp_path, layout, stage):
    run([row for row in sample() if row[:2] == (layout, stage)], folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_combination_runs(tmp_path, layout, stage):
    rows = [row for row in every() if row[:2] == (layout, stage)]
    assert len(rows) * len(LAYOUTS) * len(STAGES) == len(every()) == 1512
    run(rows, folder=tmp_path)


def run(rows, *, folder) -> None:
    """Plans each row on the model of streams; none may have a fault."""
    module = sys.modules["ztk.planner.plan"]
    kinds_of_ranks = module.kinds_of_ranks

    def first_kind(*args, **kwargs) -> list[list[int]]:
        """Four heads and two of keys are cut evenly: the last tensor-parallel rank is like the first."""
        return kinds_of_ranks(*args, **kwargs)[:1]

    with mock.patch.object(module, "kinds_of_ranks", first_kind):
        assert not [fault for row in rows for fault in faults(row, plan_of=lambda case: at(folder, case=case))]


def at(folder, *, case: Case) -> Plan:
    return planned(case, folder=str(folder))


def test_what_is_wrong_is_noticed(tmp_path):
    row = ("dp2", 1, "cpu", "fp32", "none")

    def elsewhere(case) -> Plan:
        return at(tmp_path, case=case_of(("dp2", 1, "none", "fp32", "none")))

    def refused(case) -> Plan:
        raise ValueError("this one is refused")

    before = at(tmp_path, case=case_of(row))
    assert [fault.split(": ")[1] for fault in faults(row, plan_of=elsewhere)] == ["optimizer states by tier"]
    assert [fault.split(": ")[1] for fault in faults(row, plan_of=refused)] == ["ValueError"]
    assert [fault.split(": ")[1] for fault in faults(row, plan_of=lambda case: before)] == [
        "no use of memory was looked at"
    ]
