"""Habits of public scripts at every stage: plain PyTorch's numbers, or an error with the line to write instead."""

import pytest
import torch

from tests.deepspeed.habits import HABITS, NOT_AT_STAGE_3, run_engine, run_plain

# fp32, two orders of summation over a few steps, values up to 10.
TOLERANCE = 2e-5


def _assert_alike(found: dict, expected: dict) -> None:
    assert isinstance(found, dict), found
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_gives_plain_pytorchs_numbers(ranks, habit):
    expected = run_plain(HABITS[habit])
    for stage in range(4):
        for found in ranks(2).run(run_engine, habit=HABITS[habit], stage=stage):
            _assert_alike(found, expected)


@pytest.mark.parametrize("habit", NOT_AT_STAGE_3)
def test_a_habit_that_needs_full_parameters_is_an_error_at_stage_3(ranks, habit):
    script, names = NOT_AT_STAGE_3[habit]
    expected = run_plain(script)
    for stage in range(3):
        for found in ranks(2).run(run_engine, habit=script, stage=stage):
            _assert_alike(found, expected)
    for said in ranks(2).run(run_engine, habit=script, stage=3):
        assert isinstance(said, str) and "GatheredParameters" in said and names in said
