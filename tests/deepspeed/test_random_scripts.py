"""A dozen of `scripts/compare_plain.py`'s seeds, and its faults planted again."""

import pytest

from tests.deepspeed import random_scripts


@pytest.mark.parametrize("first", [0, 4, 8])
def test_a_random_script_equals_plain_pytorch_or_ends_in_an_error(ranks, first):
    for seed in range(first, first + 4):
        results = ranks(2).run(random_scripts.run_engine, seed=seed)
        assert all(kind in ("equal", "error", "warning") for kind, _ in results), (seed, results)


def test_most_random_scripts_run():
    """The comparison compares: of the dozen, at most half may end in an error."""
    expected_errors = {"data", "attribute", "buffer"}
    drawn = [random_scripts.Script.draw(seed) for seed in range(12)]
    assert sum(script.tie in expected_errors or "assign" in script.actions for script in drawn) <= 6


@pytest.mark.parametrize(("plant", "seed"), random_scripts.CAUGHT.items())
def test_a_planted_fault_is_caught(ranks, plant, seed):
    results = ranks(2).run(random_scripts.run_engine, seed=seed, plant=plant)
    assert any(kind == "differs" for kind, _ in results), results
