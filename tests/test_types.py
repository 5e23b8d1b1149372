"""The type checker, as `.ci/run` configures it, finds mistakes that no test runs into without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

PLANTED = """\
import torch

from ztk.core.policies.optimizer import OptimizerPolicies, OptimizerPolicy

print(torch.cuda.getdevice_name())
print(OptimizerPolicy(learning_rate=1e-3))
print(OptimizerPolicy(lr=1e-3).learning_rate)
print(undefined)
print(torch.optim.AdamW())
import no_such_module
"""

FOUND = {
    (3, "missing-module-attribute"),
    (5, "missing-attribute"),
    (6, "unexpected-keyword"),
    (7, "missing-attribute"),
    (8, "unknown-name"),
    (9, "missing-argument"),
    (10, "missing-import"),
}


def test_misspelt_names_and_wrong_calls_are_found(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    command = ["check", "--config", str(ROOT / "pyproject.toml"), "--python-interpreter-path", sys.executable]
    ran = subprocess.run(
        [Path(sys.executable).with_name("pyrefly"), *command, "--output-format", "json", planted],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ran.returncode == 1, ran.stderr
    assert {(error["line"], error["name"]) for error in json.loads(ran.stdout)["errors"]} == FOUND
