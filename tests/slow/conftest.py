"""Slow tests: claims of docs/claims.md. `pytest tests/slow` runs all, `pytest tests/slow/test_identity.py` one.

Elsewhere they run with `--slow` or `-m slow`. A test shows its measurements by `show`; the lines are at the end of pytest's report.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

LINES = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the report."""
    return request.config.stash.setdefault(LINES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(LINES, []):
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.line(line)
