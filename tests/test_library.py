"""The library's interface: every name is there, and `import ztk` loads no other library."""

import subprocess
import sys

import pytest

import ztk


@pytest.mark.parametrize("name", ztk.__all__)
def test_every_name_is_there(name):
    value = getattr(ztk, name)
    assert callable(value) and value.__name__ == name and value.__doc__


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = ztk.paralelize


def test_the_import_loads_nothing():
    code = "import sys, ztk; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "triton", "hydra", "wandb", "rich", "transformers"} & set(loaded)


def test_parallelize_is_the_function_also_after_its_module_was_imported():
    code = "import ztk, ztk.parallel; from ztk.parallel.apply import parallelize as f; assert ztk.parallelize is f"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
