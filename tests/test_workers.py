"""How `pytest -n 3` shares the tests: files stay together, quick tests and long files come first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import workers

CHECKOUT = Path(__file__).parents[1]


def test_every_long_file_is_there():
    assert not [file for file in workers.LONGEST if not (CHECKOUT / file).is_file()]
    assert len(set(workers.LONGEST)) == len(workers.LONGEST)


def test_quick_tests_then_long_files_then_the_others(monkeypatch):
    monkeypatch.setattr("tests.quick.QUICK", ("tests/b.py::test_q",))
    monkeypatch.setattr(workers, "LONGEST", ("tests/d.py", "tests/c.py"))
    collected = [
        "tests/a.py::test_a",
        "tests/b.py::test_b",
        "tests/b.py::test_q[1]",
        "tests/c.py::test_c",
        "tests/d.py::test_d",
    ]
    assert sorted(collected, key=workers.place) == [collected[index] for index in (2, 4, 3, 0, 1)]
    assert [workers.unit_of(test) for test in collected[:3]] == ["tests/a.py", "tests/b.py", "tests/b.py quick"]


def test_a_file_stays_on_one_worker_and_a_failed_quick_test_ends_all(tmp_path):
    pytest.importorskip("xdist")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "conftest.py").write_text(
        "from tests import quick, workers\n"
        "from tests.quick import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_teardown\n"
        "quick.QUICK, workers.LONGEST = ('test_d.py', 'test_b.py'), ('test_c.py',)\n"
        "def pytest_configure(config): config.pluginmanager.register(workers)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    quick: of this test\n")
    places = places_of(tmp_path)
    assert places.keys() == {f"test_{name}.py::test_{number}" for name in "abcd" for number in ("one", "two")}
    for name in "abcd":
        assert places[f"test_{name}.py::test_one"] == places[f"test_{name}.py::test_two"]
    for worker in set(places.values()):
        own = [test[len("test_")] for test in places if places[test] == worker]
        assert own == sorted(own, key="bdca".index)  # quick, long, other
    for name in "bd":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): assert False\n")
    ran = places_of(tmp_path).keys()  # the worker that is slower may not have begun when the other one ends all
    assert ran and ran <= {"test_b.py::test_one", "test_d.py::test_one"}


def places_of(folder: Path) -> dict[str, str]:
    """Test -> its worker, in the order in which they ended."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "2", "--quick-first"]
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    found = re.findall(r"^\[(gw\d)\] \[ *\d+%\] (?:PASSED|FAILED) (\S+)", done.stdout, flags=re.MULTILINE)
    return {test: worker for worker, test in found}
