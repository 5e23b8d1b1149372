"""`pytest -m quick`: a broad part of the tests in about 3 minutes on 2 cores; `pytest --quick-first` runs it before the others.

Tests marked `slow` and the tests of tests/long.py are left out; `pytest -m slow` runs them alone, `pytest --slow` with the others.
`pytest -m real` runs tests that need a real model, which `scripts/get_model.py` fetches.

The quick tests need no ranks, or few steps on two, and together touch every package.
"""

import pytest

from tests.long import long_ones

# Folders, files and tests. tests/test_quick.py finds entries that match nothing.
QUICK = (
    "tests/rl/align",
    "tests/test_architecture.py",
    "tests/test_hostile_records.py",
    "tests/test_library.py",
    "tests/test_named_tests.py",
    "tests/test_quick.py",
    "tests/core/runtime/test_boxes.py",
    "tests/checkpoint/test_saving.py::test_files_are_the_same_for_every_tier",
    "tests/checkpoint/test_saving.py::test_retention_keeps_the_newest_and_every_nth",
    "tests/cli/test_help.py",
    "tests/cli/test_jobs.py",
    "tests/report/test_compare.py",
    "tests/report/test_status.py",
    "tests/cli/test_sweep_line.py",
    "tests/cli/test_run.py::test_a_run_writes_its_record",
    "tests/config/test_arguments.py",
    "tests/config/test_config.py::test_names_are_refused_all_at_once_with_what_was_meant",
    "tests/config/test_config.py::test_resolved_configurations_are_the_recorded_ones",
    "tests/data",
    "tests/deepspeed/test_config.py",
    "tests/documents/test_pages.py",
    "tests/deepspeed/test_convert.py",
    "tests/deepspeed/test_engine.py::test_what_an_engine_answers",
    "tests/deepspeed/test_schedules.py",
    "tests/kernels/test_ops.py::test_op_names_are_unique",
    "tests/kernels/test_step_control.py",
    "tests/core/launch/test_errors.py",
    "tests/planner/test_plan.py::test_figure_1_of_zero",
    "tests/core/launch/test_external.py",
    "tests/core/launch/test_messages.py",
    "tests/core/launch/test_tee.py",
    "tests/parallel/moe/test_gate.py",
    "tests/nn/test_decoder.py::test_forward_and_gradients_equal_the_plain_implementation",
    "tests/nn/test_initial.py",
    "tests/nn/test_linear.py",
    "tests/zero/offload/test_policy.py",
    "tests/zero/offload/test_pool.py",
    "tests/zero/offload/test_stores.py",
    "tests/optim",
    "tests/parallel/pipeline/test_partition.py",
    "tests/parallel/pipeline/test_schedule.py",
    "tests/core/precision",
    "tests/parallel/recompute/test_policy.py",
    "tests/report/test_report.py",
    "tests/rl/rollout/test_parts.py",
    "tests/core/runtime/test_comm.py::test_collectives",
    "tests/core/runtime/test_counting.py",
    "tests/core/runtime/test_mesh.py",
    "tests/zero/test_behaviour.py::test_step_without_backward_says_so",
    "tests/zero/test_bit_identity.py::test_persistent_parameters_change_nothing",
    "tests/zero/buckets/test_layout.py",
)


def is_quick(nodeid: str) -> bool:
    """Whether an entry is this test, or a folder, file or function above it."""
    return any(nodeid == entry or nodeid.startswith((f"{entry}/", f"{entry}::", f"{entry}[")) for entry in QUICK)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick-first", action="store_true", help="run the quick tests first, and the others only if they pass"
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = tuple(argument for argument in config.args if "::" in argument)
    long = {nodeid for nodeid in long_ones(item.nodeid for item in items) if not nodeid.startswith(named)}
    for item in items:
        if is_quick(item.nodeid):
            item.add_marker("quick")
        if item.nodeid in long:
            item.add_marker("slow")
    for marker, is_asked in (("slow", config.getoption("--slow")), ("real", False)):
        marked = {item for item in items if item.get_closest_marker(marker)}
        is_asked = is_asked or marker in config.getoption("markexpr")
        if marked and not is_asked and not any(f"tests/{marker}" in argument for argument in config.args):
            config.hook.pytest_deselected(items=list(marked))
            items[:] = [item for item in items if item not in marked]
    if config.getoption("--quick-first"):
        items.sort(key=lambda item: not is_quick(item.nodeid))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the session between the quick tests and the others if one has failed."""
    last = nextitem is not None and is_quick(item.nodeid) and not is_quick(nextitem.nodeid)
    if last and item.config.getoption("--quick-first") and item.session.testsfailed:
        item.session.shouldfail = "a quick test failed; the others were not run"
