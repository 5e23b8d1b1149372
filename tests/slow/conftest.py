"""Slow tests: claims of docs/claims.md. `pytest tests/slow` runs all, `pytest tests/slow/test_identity.py` one.

Elsewhere they run with `--slow` or `-m slow`. A test shows its measurements by `show`; the lines are at the end of pytest's report. Tests that
draw kills, schedules or requests take `--amount N`, which replaces the number of the claim.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slow.browser import Browser, find_browser

LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--amount", type=int, help="number of kills, schedules or requests (default: the claim's)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")


@pytest.fixture
def amount(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """`amount(100)` is 100, or the number after `--amount`."""
    return lambda usual: request.config.getoption("--amount", default=None) or usual


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the report."""
    return request.config.stash.setdefault(LINES, []).append


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Callable[..., Browser]]:
    """`browser(origin=...)` opens a window, which the test's end closes."""
    if (path := find_browser()) is None:
        pytest.skip("needs Chromium: install it (Debian: apt-get install chromium) or give its path in CHROMIUM")
    opened: list[Browser] = []

    def open_window(*, origin: str | None = None) -> Browser:
        opened.append(Browser(path, profile=tmp_path / f"profile{len(opened)}", origin=origin))
        return opened[-1]

    yield open_window
    for each in opened:
        each.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(LINES, []):
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.line(line)
