"""DeepSpeed's own tests, run on ztk under DeepSpeed's name, on CPU ranks.

    git clone https://github.com/deepspeedai/DeepSpeed && git -C DeepSpeed checkout edaa7221
    ZTK_DEEPSPEED_TESTS=DeepSpeed/tests pytest tests/slow/test_deepspeed_suite.py

`deepspeed_suite.txt` lists tests that pass, a few per file of DeepSpeed's. Without the variable the test is skipped.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ztk

PASSING = Path(__file__).with_name("deepspeed_suite.txt")
CHECKOUT = os.environ.get("ZTK_DEEPSPEED_TESTS")

# Tests also run without a GPU. The fixtures that are classes are registered, which pytest has not done since 8.4.
PLUGIN = """
import pytest
import torch.multiprocessing as mp

mp.set_forkserver_preload(["torch", "transformers", "deepspeed", "deepspeed.comm", "ztk.train.engine", "pytest"])


class Absent:
    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **kwargs):
        raise ModuleNotFoundError(f"ztk does not offer {self.name}")


def launch(test, ranks, init_method):
    mp.set_start_method("forkserver", force=True)
    start = test._launch_non_daemonic_procs if test.non_daemonic_procs else test._launch_daemonic_procs
    start(ranks, init_method)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    if getattr(obj, "is_dist_test", False):
        obj.requires_cuda_env, obj._launch_procs = False, launch
    if isinstance(obj, type) and getattr(obj, "is_dist_fixture", False):
        obj.requires_cuda_env, obj._launch_procs = False, launch
        pytest.register_fixture(name=name, func=obj, node=collector)
"""


def soften(path: Path) -> None:
    """Replaces names that a test file imports from DeepSpeed and ztk lacks by placeholders, so that its other tests run."""
    text = path.read_text()
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "deepspeed":
            lines[node.lineno - 1 : node.end_lineno] = [
                f"try: from {node.module} import {name.name} as {name.asname or name.name}\n"
                f"except ImportError: {name.asname or name.name} = __import__('on_ztk').Absent('{node.module}.{name.name}')"
                for name in node.names
            ]
    path.write_text("\n".join(lines))


@pytest.mark.skipif(CHECKOUT is None, reason="ZTK_DEEPSPEED_TESTS names no folder with DeepSpeed's tests")
def test_deepspeeds_tests_pass_as_before(tmp_path, show):
    tests = tmp_path / "tests"
    shutil.copytree(CHECKOUT, tests)
    (tmp_path / "on_ztk.py").write_text(PLUGIN)
    for path in (tests / "unit").rglob("*.py"):
        soften(path)
    shim = Path(ztk.__file__).parent / "deepspeed" / "shim"
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "on_ztk",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=short",
            *PASSING.read_text().splitlines(),
        ],
        cwd=tests,
        env={
            **os.environ,
            "PYTHONPATH": f"{shim}:{tmp_path}:{shim.parents[2]}",
            "DS_ACCELERATOR": "cpu",
            "DS_UNITTEST_TIMEOUT": "120",
        },
        capture_output=True,
        text=True,
    )
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", ran.stdout.strip().rpartition("\n")[2])
    show(f"DeepSpeed's own tests: {', '.join(' '.join(count) for count in counts)}")
    assert ran.returncode == 0 and [word for _, word in counts] == ["passed"], ran.stdout[-5000:]
