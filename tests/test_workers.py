"""How `pytest --workers 3` shares the tests: files stay together, quick tests and long files come first."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
    write_tests(tmp_path, text="def test_one(): pass\ndef test_two(): pass\n")
    done, places = run(tmp_path)
    assert done.returncode == 0 and "8 passed" in done.stdout
    assert len(places) == 8 and 1 <= len(set(places.values())) <= 2
    for name in "abcd":
        assert places[f"test_{name}.py::test_one"] == places[f"test_{name}.py::test_two"]
    for worker in set(places.values()):
        own = [test[len("test_")] for test in places if places[test] == worker]
        assert own == sorted(own, key="bdca".index)  # quick, long, other
    for name in "bd":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): print('printed in it'); assert False\n")
    done, places = run(tmp_path, workers=1)  # a second one may have begun the others
    assert done.returncode == 1 and "a quick test failed; the others were not run" in done.stdout
    assert "def test_one(): print('printed in it'); assert False" in done.stdout
    assert "Captured stdout call" in done.stdout and done.stdout.count("printed in it") % 2 == 0  # the line, its output
    assert places.keys() == {"test_b.py::test_one", "test_d.py::test_one"}


def test_a_worker_that_dies_is_named_with_its_test(tmp_path):
    write_tests(tmp_path, text="import os\ndef test_one(): pass\ndef test_two(): os._exit(3)\n")
    done, _ = run(tmp_path)
    assert done.returncode == 1 and re.search(r"ended with exit code 3 in test_[bd]\.py::test_two", done.stdout)


def write_tests(folder: Path, *, text: str) -> None:
    """Four files. `test_b.py` and `test_d.py` are quick, `test_c.py` is long."""
    for name in "abcd":
        (folder / f"test_{name}.py").write_text(text)
    (folder / "conftest.py").write_text(
        "import os\n"
        "from tests import quick, workers\n"
        "from tests.quick import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_teardown\n"
        "quick.QUICK, workers.LONGEST = ('test_d.py', 'test_b.py'), ('test_c.py',)\n"
        "def pytest_configure(config): config.pluginmanager.register(workers)\n"
        "def pytest_runtest_call(item):\n"
        "    with open('places', 'a') as file: file.write(f'{item.nodeid} {os.getpid()}\\n')\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    quick: of this test\n")


def run(folder: Path, *, workers: int = 2) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """pytest's end, and test -> its process, in the order in which they began."""
    file = folder / "places"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--workers={workers}", "--quick-first"]
    variables = {"PYTHONPATH": str(CHECKOUT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    return done, dict(line.split() for line in file.read_text().splitlines())
