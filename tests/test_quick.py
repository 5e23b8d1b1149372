"""The list of quick tests: its entries match, and the quick part runs first."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.long import LONG, SAMPLED
from tests.quick import QUICK, is_quick

CHECKOUT = Path(__file__).parents[1]


def test_every_entry_names_a_folder_a_file_or_a_test():
    for entry in (*QUICK, *LONG, *SAMPLED):
        path, _, name = entry.partition("::")
        place = CHECKOUT / path
        assert place.is_file() if name else place.exists(), entry
        functions = [node.name for node in ast.parse(place.read_text()).body if hasattr(node, "name")] if name else []
        assert not name or name in functions, entry


def test_an_entry_includes_the_tests_below_it(monkeypatch):
    monkeypatch.setattr(
        "tests.quick.QUICK", ("tests/nn", "tests/zero/test_a.py", "tests/parallel/moe/test_b.py::test_c")
    )
    assert is_quick("tests/nn/test_x.py::test_y") and is_quick("tests/zero/test_a.py::test_y[1]")
    assert is_quick("tests/parallel/moe/test_b.py::test_c[2]") and not is_quick("tests/parallel/moe/test_b.py::test_cd")
    assert not is_quick("tests/nn_more/test_x.py::test_y")


def test_the_others_run_only_if_the_quick_ones_pass(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_slow(): pass\n")
    (tmp_path / "test_b.py").write_text("def test_quick(): pass\n")
    (tmp_path / "conftest.py").write_text(
        "from tests import quick\nfrom tests.quick import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_teardown\n"
        "quick.QUICK = ('test_b.py',)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    quick: of this test\n")
    assert lines_of(tmp_path) == ["test_b.py::test_quick PASSED", "test_a.py::test_slow PASSED"]
    (tmp_path / "test_b.py").write_text("def test_quick(): assert False\n")
    assert lines_of(tmp_path) == ["test_b.py::test_quick FAILED"]


def test_slow_tests_run_on_request(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_other(): pass\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.quick import pytest_addoption, pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: of this test\n")
    assert lines_of(tmp_path) == ["test_a.py::test_other PASSED"]
    assert lines_of(tmp_path, "--slow") == ["test_a.py::test_slow PASSED", "test_a.py::test_other PASSED"]
    assert lines_of(tmp_path, "-m", "slow") == ["test_a.py::test_slow PASSED"]


def test_a_part_of_the_cases_stays_and_a_test_that_is_named_runs(tmp_path, monkeypatch):
    (tmp_path / "test_a.py").write_text(
        "import pytest\n@pytest.mark.parametrize('x', range(9))\ndef test_many(x): pass\ndef test_long(): pass\ndef test_other(): pass\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from tests import long\nfrom tests.quick import pytest_addoption, pytest_collection_modifyitems\n"
        "long.LONG, long.SAMPLED = ('test_a.py::test_long',), {'test_a.py::test_many': 4}\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: of this test\n")
    lines = lines_of(tmp_path)
    assert len(lines) == 3 + 1 and lines == lines_of(tmp_path) and "test_a.py::test_long PASSED" not in lines
    assert len(lines_of(tmp_path, "--slow")) == 9 + 2
    assert lines_of(tmp_path, "test_a.py::test_long") == ["test_a.py::test_long PASSED"]


def test_tests_of_a_real_model_run_by_their_marker_alone(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import pytest\n@pytest.mark.real\ndef test_real(): pass\n@pytest.mark.slow\ndef test_slow(): pass\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.quick import pytest_addoption, pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: of this test\n    real: of this test\n")
    assert lines_of(tmp_path) == []
    assert lines_of(tmp_path, "--slow") == ["test_a.py::test_slow PASSED"]
    assert lines_of(tmp_path, "-m", "real") == ["test_a.py::test_real PASSED"]


def lines_of(folder: Path, *options: str) -> list[str]:
    """Test and outcome, in the order in which they ran."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *(options or ["--quick-first"])]
    variables = {"PYTHONPATH": str(CHECKOUT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    return [line.rpartition(" [")[0].strip() for line in done.stdout.splitlines() if re.match(r"test_\w\.py::", line)]
