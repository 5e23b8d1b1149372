"""Tests that pages, comments and messages name exist, and tests/faults.md has every finding."""

import ast
import functools
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
FAULTS = CHECKOUT / "tests" / "faults.md"
FINDINGS = [
    "0",
    *(
        f"{group}{number}"
        for group, last in (("A", 15), ("B", 9), ("C", 2), ("D", 15))
        for number in range(1, last + 1)
    ),
]
NAMED = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")
TEXTS = [
    *(path for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") for path in [CHECKOUT / name]),
    *(
        path
        for folder in ("docs", "ztk", "experiments", "scripts", "examples", "notebooks", "tests")
        for kind in ("*.md", "*.py", "*.txt")
        for path in sorted((CHECKOUT / folder).rglob(kind))
    ),
]
INVENTED = {"tests/test_quick.py", "tests/test_workers.py"}  # name files of their own folders


@functools.cache
def names_of(path: str) -> frozenset[str]:
    """The functions and classes of a file, without importing it."""
    return frozenset(node.name for node in ast.parse((CHECKOUT / path).read_text()).body if hasattr(node, "name"))


def missing(text: str) -> list[str]:
    """The named files and tests that do not exist."""
    found = []
    for named in sorted(set(NAMED.findall(text))):
        path, _, test = named.partition("::")
        if not (CHECKOUT / path).is_file() or (test and test not in names_of(path)):
            found.append(named)
    return found


def rows() -> list[list[str]]:
    """The cells of every row of tests/faults.md."""
    lines = [line for line in FAULTS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if not line.startswith(("| id |", "| --- |"))
    ]


def test_a_test_that_is_gone_is_found():
    text = "`tests/test_named_tests.py::test_gone`, `tests/gone.py`, `tests/test_named_tests.py::test_a_test_that_is_gone_is_found[1]`"
    assert missing(text) == ["tests/gone.py", "tests/test_named_tests.py::test_gone"]


def test_every_named_test_exists():
    texts = [path for path in TEXTS if str(path.relative_to(CHECKOUT)) not in {*INVENTED, "tests/test_named_tests.py"}]
    assert len(texts) > 500
    found = {str(path.relative_to(CHECKOUT)): missing(path.read_text(encoding="utf-8")) for path in texts}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize("finding", FINDINGS)
def test_every_finding_has_a_commit_and_a_test(finding):
    own = [row for row in rows() if row[0] == finding]
    assert own
    for _, fault, now, commits, tests in own:
        assert fault and now and re.match(r"[0-9a-f]{8} \w", commits)
        assert any("::" in name for name in NAMED.findall(tests))


def test_rows_are_of_findings():
    assert list(dict.fromkeys(row[0] for row in rows())) == FINDINGS
    assert {len(row) for row in rows()} == {5}
