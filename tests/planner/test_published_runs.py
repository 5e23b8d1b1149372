"""The table of published runs and its page."""

from pathlib import Path

from scripts import published_runs

BEFORE_THE_RULE = 69  # runs whose third was picked by hand


def test_a_hash_of_the_description_holds_out_a_third():
    rows = published_runs.read_table()[BEFORE_THE_RULE:]
    assert all((row["held_out"] == "true") == published_runs.held_out(row) for row in rows)
    assert 0.25 < sum(map(published_runs.held_out, rows)) / len(rows) < 0.42


def test_every_run_names_its_source_and_can_be_written_as_a_command_line():
    for row in published_runs.read_table():
        assert row["source"] and row["project"] and float(row["tokens_per_second_per_gpu"]) > 0
        assert bool(row["peak_gib"]) == bool(row["peak_kind"])
        assert len({word.split("=")[0] for word in published_runs.words(row)}) == len(published_runs.words(row))


def test_the_page_is_that_of_the_table():
    rows = published_runs.read_table()
    page = Path(published_runs.PAGE).read_text(encoding="utf-8")
    assert page == "\n".join(published_runs.page(rows)) + "\n"
    assert page.count("\n| ") > len(rows)
