"""`pytest -n 3` shares the tests between workers by files: the quick ones first, then the files that take longest.

A file stays on one worker, which makes its fixtures and warms its ranks once; a file of which a part is quick counts as two. pytest-xdist
itself would order files by their number of tests, and a long file that begins last would leave the other worker without work.
"""

import pytest

from tests.quick import is_quick

# From about 30 seconds on, longest first.
LONGEST = (
    "tests/kernels/test_aot.py",
    "tests/planner/test_combinations.py",
    "tests/cli/test_sweep.py",
    "tests/test_examples.py",
    "tests/zero/test_bit_identity.py",
    "tests/parallel/topology/test_matrix.py",
    "tests/experiments/test_elastic.py",
    "tests/parallel/pipeline/test_engine.py",
    "tests/experiments/test_alignment.py",
    "tests/experiments/test_faults.py",
    "tests/kernels/test_ops.py",
    "tests/kernels/test_planted_mistakes.py",
    "tests/config/test_config.py",
    "tests/experiments/test_text.py",
    "tests/cli/test_run.py",
    "tests/experiments/test_limits.py",
    "tests/checkpoint/test_resume.py",
    "tests/checkpoint/test_saving.py",
    "tests/zero/test_behaviour.py",
    "tests/deepspeed/runner/test_run.py",
    "tests/parallel/topology/test_layouts.py",
    "tests/hf/test_scripts.py",
    "tests/parallel/moe/test_parallel.py",
    "tests/hf/test_trl.py",
    "tests/parallel/topology/test_checkpoints.py",
    "tests/zero/test_costs.py",
    "tests/hf/test_rollouts.py",
    "tests/zero/test_compact.py",
    "tests/cli/test_wheel.py",
    "tests/cli/test_calls.py",
    "tests/notebooks/test_notebooks.py",
)


def unit_of(nodeid: str) -> str:
    """The unit of scheduling: the file, and whether the test is a quick one."""
    return nodeid.partition("::")[0] + (" quick" if is_quick(nodeid) else "")


def place(nodeid: str) -> int:
    """The sort key of tests; tests with equal keys stay in the order of collection."""
    file = nodeid.partition("::")[0]
    if is_quick(nodeid):
        return -1
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, without which the tests run, too
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    if config.getvalue("dist") != "load":  # the default of -n
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return ByFiles(config, log)
