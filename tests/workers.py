"""`pytest --workers 3` shares the tests among forks by files: the quick ones first, then the files that take longest.

One process imports and collects all tests, which takes half a minute, and forks the workers. A file stays in one worker, which makes its
fixtures and warms its ranks once; a file of which a part is quick counts as two. Warnings of the tests are not shown.
"""

import multiprocessing
from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, wait

import pytest

from tests.quick import is_quick

# From about 30 seconds on, longest first.
LONGEST = (
    "tests/planner/test_combinations.py",
    "tests/kernels/test_aot.py",
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
    if config.getoption("--workers"):
        items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the collected tests in forks, and handles their reports as if the tests had run here."""
    count = session.config.getoption("--workers")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # one for all forks
    units = (
        list(items)
        for _, items in groupby(range(len(session.items)), key=lambda index: unit_of(session.items[index].nodeid))
    )
    context = multiprocessing.get_context("fork")
    workers, running = {}, {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(session, theirs, [ours, *workers]))
            process.start()
            theirs.close()
            workers[ours] = process
        while workers:
            for pipe in wait(list(workers)):
                _answer(session, pipe, units=units, running=running, workers=workers)
                if session.shouldfail or session.shouldstop:
                    raise (session.Failed if session.shouldfail else session.Interrupted)(
                        session.shouldfail or session.shouldstop
                    )
    finally:
        for process in workers.values():
            process.terminate()
        for process in workers.values():
            process.join()
    return True


def _answer(
    session: pytest.Session, pipe: Connection, *, units: Iterator[list[int]], running: dict, workers: dict
) -> None:
    """Handles one message of a worker. running: each worker's test. workers: those that have not ended."""
    try:
        kind, value = pipe.recv()
    except EOFError:
        process = workers.pop(pipe)
        process.join()
        session.shouldfail = f"a worker ended with exit code {process.exitcode} in {running.get(pipe)}"
        return
    hook = session.config.hook
    if kind == "next":
        pipe.send(next(units, None))
    elif kind == "begins":
        running[pipe] = value
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=value)
        hook.pytest_runtest_logreport(report=report)
    else:
        workers.pop(pipe).join()
        session.shouldfail = session.shouldfail or value


def _work(session: pytest.Session, pipe: Connection, others: list[Connection]) -> None:
    """Runs the tests of a worker. Asks for the next file before the last test of a file, whose fixtures the next one may use. others: ends
    of the parent, open in its forks, too."""
    for other in others:
        other.close()
    manager = session.config.pluginmanager
    manager.unregister(name="terminalreporter")
    manager.register(_Reports(session.config, pipe))
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into a file of this process

    def items() -> Iterator[pytest.Item]:
        while True:
            pipe.send(("next", None))
            if (unit := pipe.recv()) is None:
                return
            yield from (session.items[index] for index in unit)

    for item, following in pairwise(chain(items(), [None])):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    session._setupstate.teardown_exact(None)
    pipe.send(("ends", session.shouldfail or session.shouldstop))


class _Reports:
    """Sends a worker's reports."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._pipe.send(("begins", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))
