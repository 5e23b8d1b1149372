"""The page of published runs: generated from its table, with the errors that it names."""

import statistics

import pytest

import ztk
from scripts.published_runs import PAGE, PLANNED, error, page, read_table, words

ROWS = read_table()


def test_the_page_is_that_of_the_table_and_its_errors_are_small():
    assert PAGE.read_text() == "\n".join(page(ROWS)) + "\n"
    held_out = [row for row in ROWS if row["held_out"] == "true"]
    assert len(ROWS) >= 40 and 3 * len(held_out) >= len(ROWS) and all(row["source"] for row in ROWS)
    planned = [row for row in ROWS if row[PLANNED[0]]]
    assert len(planned) >= 40
    for some in (planned, [row for row in held_out if row in planned]):
        assert statistics.median([abs(error(row)) for row in some]) < 0.12 and near(some) >= 0.9


def near(rows):
    """The share of rows whose seconds are planned within 25 %."""
    return sum(abs(error(row)) <= 0.25 for row in rows) / len(rows)


@pytest.mark.parametrize(
    "model, gpus, way, published",
    [
        ("llama3-8b", 8, "eager", 5762),
        ("llama3-8b", 8, "compiled", 6667),
        ("llama3-8b", 64, "eager", 2876),
        ("llama3-70b", 64, "eager", 323),
    ],
)
def test_torchtitans_runs_take_as_long_as_planned(model, gpus, way, published):
    """Tokens per second and GPU. 2,876 and 323 are of another version than the rows of the table."""
    (row,) = [
        row
        for row in ROWS
        if (row["model"], row["gpus"], row["way"], row["fp8"]) == (model, str(gpus), way, "false")
        and row["tensor"] == "1"
        and "pull request" not in row["source"]
    ]
    plan = ztk.plan_run(*words(row))
    assert plan.tokens_per_second_per_gpu == pytest.approx(published, rel=0.12)
    assert f"{plan.tokens_per_second_per_gpu:.0f}" == f"{float(row[PLANNED[0]]):.0f}"
