"""A sample of `tests/slow/test_random_scripts.py`'s seeds, and its faults planted again."""

import collections

import pytest

from tests.deepspeed import random_edits
from tests.deepspeed.random_plants import CAUGHT, EDITS
from tests.deepspeed.random_runs import Result, run_engine
from tests.deepspeed.random_scripts import Script

ALL = {seed: Script.draw(seed) for seed in range(500)}
OF_EDITS = {kind: [seed for seed, script in ALL.items() if script.edit.kind == kind] for kind in random_edits.KINDS}
FIRST = list(range(24))  # as they come
SHARE = 0.6  # of scripts that must run to their end


@pytest.fixture(scope="module")
def results(ranks) -> dict[int, Result]:
    seeds = dict.fromkeys([*FIRST, *(seed for of_kind in OF_EDITS.values() for seed in of_kind[:4])])
    return {seed: Result.of(ranks(2).run(run_engine, seed=seed)) for seed in seeds}


def test_a_random_script_equals_plain_pytorch_or_ends_in_an_error_of_ztk(results):
    for seed, result in results.items():
        assert result.kind in ("equal", "error", "warning"), (seed, result)


def test_most_random_scripts_run(results):
    """The comparison compares: few end in an error."""
    assert sum(results[seed].kind != "error" for seed in FIRST) >= SHARE * len(FIRST)


@pytest.mark.parametrize("kind", random_edits.KINDS)
def test_scripts_reach_every_kind_of_edit(results, kind):
    """The random choice draws each form of it, and the scripts of the sample that have it come to it and run on."""
    forms = collections.Counter((ALL[seed].edit.how, ALL[seed].edit.heeds) for seed in OF_EDITS[kind])
    assert len(OF_EDITS[kind]) >= 25
    assert {how for how, _ in forms} == set(random_edits.HOW[kind]) and {heeds for _, heeds in forms} == {True, False}
    reached = [results[seed].kind for seed in OF_EDITS[kind] if seed in results and results[seed].is_reached]
    assert len(reached) >= 2 and set(reached) - {"error"}


@pytest.mark.parametrize(("plant", "seed"), CAUGHT.items())
def test_a_planted_fault_is_caught(ranks, plant, seed):
    result = ranks(2).run(run_engine, seed=seed, plant=plant)
    assert any(of_rank.kind == "differs" for of_rank in result), result
    if plant in EDITS:
        assert Script.draw(seed).edit.kind == EDITS[plant] and Result.of(result).is_reached
