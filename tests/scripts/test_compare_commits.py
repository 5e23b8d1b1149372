"""The pure parts of scripts/compare_commits.py: the list of configurations, differences and refusals."""

import itertools
import json

import pytest

from scripts.compare_commits import (
    CONFIGURATIONS,
    LAYOUTS,
    PRECISIONS,
    STAGES,
    STEPS,
    TIERS,
    Record,
    comparability_fault,
    differences,
    read_values,
    subject_of,
)

MACHINE = {"device_name": "A", "cpu_count": 2, "torch": "2.13.0"}


def test_the_configurations_cover_every_strategy_and_every_layout_has_every_choice():
    assert len({each.name for each in CONFIGURATIONS}) == len(CONFIGURATIONS) == 40
    strategies = {(each.stage, each.tier, each.precision) for each in CONFIGURATIONS}
    assert strategies == set(itertools.product(STAGES, TIERS, PRECISIONS))
    for layout in LAYOUTS:
        own = [each for each in CONFIGURATIONS if each.layout == layout]
        assert len(own) == 8
        assert {each.stage for each in own} == set(STAGES)
        assert {each.tier for each in own} == set(TIERS)
        assert {each.precision for each in own} == set(PRECISIONS)
    assert {each.accumulation_steps for each in CONFIGURATIONS} == {1, 2}


@pytest.mark.parametrize(
    ("key", "value", "subject"),
    [
        ("loss_digest", "b", "numbers"),
        ("grad_norm", [1.0, 2.5], "numbers"),
        ("comm.send_bytes", [8, 9], "wire"),
        ("memory.host_bytes", [1, 0], "memory"),
        ("peak_memory.host_bytes", 1, "peak memory"),
        ("io.read_bytes", [0, 1], "disk"),
    ],
)
def test_each_kind_of_difference_is_found_and_has_its_column(key, value, subject):
    before = {
        "loss_digest": "a",
        "grad_norm": [1.0, 2.0],
        "comm.send_bytes": [8, 8],
        "memory.host_bytes": [0, 0],
        "peak_memory.host_bytes": 0,
        "io.read_bytes": [0, 0],
    }
    assert differences(before, after=dict(before)) == {}
    assert differences(before, after=before | {key: value}) == {key: (before[key], value)}
    assert subject_of(key) == subject


def test_a_counter_that_one_tree_lacks_counts_as_zero():
    assert differences({}, after={"comm.new_bytes": [0, 0]}) == {}
    assert differences({"comm.old_bytes": [0, 4]}, after={}) == {"comm.old_bytes": ([0, 4], None)}


@pytest.mark.parametrize("key", MACHINE)
def test_a_record_of_another_machine_is_refused_and_the_key_named(key):
    assert comparability_fault(MACHINE, here=MACHINE) is None
    assert key in comparability_fault(MACHINE | {key: "other"}, here=MACHINE)


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = Record(origin=MACHINE, values={"one": {"loss": [0.1]}, "two": {"loss": [0.2]}})
    record.save(tmp_path / "new" / "record.json")
    assert Record.load(tmp_path / "new" / "record.json") == record


@pytest.mark.parametrize("text", ["", "[]", '{"origin": {}}'])
def test_a_file_that_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match="not a record of values"):
        Record.load(tmp_path / "record.json")


@pytest.mark.parametrize("fault", ["status", "rows", "key"])
def test_a_run_that_is_not_complete_is_refused(tmp_path, fault):
    summary = {"status": "done", "steps": STEPS, "parameters": 1, "loss_digest": "a", "peak_memory.host_bytes": 0}
    row = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "loss_scale": 1.0, "skipped": 0, "comm.send_bytes": 0}
    rows = [row] * STEPS
    folder = tmp_path
    write(folder, summary=summary, rows=rows)
    assert read_values(folder)["comm.send_bytes"] == [0] * STEPS
    if fault == "status":
        summary["status"] = "failed"
    elif fault == "rows":
        rows = rows[1:]
    else:
        rows = [*rows[1:], {key: value for key, value in row.items() if key != "grad_norm"}]
    write(folder, summary=summary, rows=rows)
    with pytest.raises(ValueError, match="failed|rows|grad_norm"):
        read_values(folder)


def write(folder, *, summary, rows):
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
