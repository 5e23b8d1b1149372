"""The name `deepspeed`: the processes that import ztk under it, the ones that do not, and its submodules."""

import importlib
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

import ztk.deepspeed
from ztk.deepspeed.names import SHIM
from ztk.deepspeed.names.table import MODULES, TOP
from ztk.deepspeed.names.tree import lookup, module_of, names_of
from ztk.deepspeed.version import version

SEEN = f"""
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("deepspeed") == "{version}"
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
import deepspeed
import deepspeed.runtime.zero.stage3 as stage3
from deepspeed import version
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
import sys, ztk.deepspeed
assert deepspeed is ztk.deepspeed and deepspeed.__version__ == "{version}"
assert deepspeed.version is version is ztk.deepspeed.version and version.__spec__.name == "ztk.deepspeed.version"
assert deepspeed.runtime.zero.stage3 is stage3
assert deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME == DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
stage3.patched = 1  # scripts replace names of DeepSpeed's modules
assert deepspeed.runtime.zero.stage3.patched == 1
import deepspeed_chat
from deepspeed_chat import reward_model
assert "RewardModel" in dir(reward_model) and "ppo_trainer" in dir(deepspeed_chat)
for wrong in ("deepspeed.nebula", "deepspeed.runtime.amp", "deepspeed_chat.rlhf_engine"):
    try:
        __import__(wrong)
    except ModuleNotFoundError as error:
        assert "does not offer this module" in str(error) and error.name == wrong
    else:
        raise AssertionError(wrong)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


def test_install_gives_the_name_in_this_process():
    done = run(f"import ztk.deepspeed\nztk.deepspeed.install()\nztk.deepspeed.install()\n{SEEN}")
    assert done.returncode == 0, done.stderr


def test_a_folder_on_the_path_gives_the_name_to_every_process_below():
    """The runner's mechanism: the script calls nothing, and the processes that it starts have the name, too."""
    again = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SEEN!r}], check=True)"
    done = run(SEEN + again, PYTHONPATH=os.pathsep.join([str(SHIM), *sys.path]))
    assert done.returncode == 0, done.stderr


def test_without_either_the_name_is_not_taken(tmp_path):
    """An installed DeepSpeed is not replaced; ztk.deepspeed alone takes no name."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("here = 'the real one'")
    (tmp_path / "deepspeed-0.1.dist-info").mkdir()
    (tmp_path / "deepspeed-0.1.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.1\n")
    code = (
        "import importlib.metadata, ztk.deepspeed, ztk\nztk.deepspeed.runtime.lr_schedules\n"
        "import deepspeed\nassert deepspeed.here == 'the real one'\n"
        "assert importlib.metadata.version('deepspeed') == '0.1'\n"
        "try:\n    ztk.deepspeed.install()\nexcept RuntimeError as error:\n    assert 'already imported' in str(error)\n"
        "else:\n    raise AssertionError\n"
    )
    done = run(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.returncode == 0, done.stderr
    before = "import ztk.deepspeed\nztk.deepspeed.install()\nimport deepspeed\nassert deepspeed is ztk.deepspeed"
    done = run(before, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_too_late_is_said(library):
    """Their classes for DeepSpeed are made at import: with none there they are wrong for good."""
    planted = {
        "transformers": "'transformers.integrations.deepspeed': types.SimpleNamespace(DeepSpeedConfig=object)",
        "accelerate": "'accelerate.accelerator': types.SimpleNamespace()",
    }[library]
    done = run(f"import sys, types\nsys.modules |= {{{planted}}}\nimport ztk.deepspeed\nztk.deepspeed.install()")
    assert done.returncode == 1
    assert f"{library} was imported before and found no deepspeed: call ztk.deepspeed.install() before" in done.stderr


def test_the_import_is_cheap():
    """`import ztk.deepspeed` loads only used modules: the runner's own process needs no torch."""
    done = run("import sys, ztk.deepspeed\nassert 'torch' not in sys.modules\nztk.deepspeed.__version__")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_every_row_of_the_table_holds(name):
    module = module_of(name)
    above = name.rpartition(".")[0]
    assert above in ("", "deepspeed") or isinstance(MODULES[above], dict), "a module above others is a facade"
    for own in names_of(name):
        assert getattr(module, own) is not None or own.isupper()  # a constant may be None, as DeepSpeed's
    if name == "deepspeed":
        assert set(names_of("deepspeed")) <= set(module.__all__)


def test_a_facade_shares_its_name_with_no_module_of_the_layer():
    """ztk.deepspeed is the module `deepspeed`: importing its submodule X under its own name would replace `deepspeed.X`."""
    layer = Path(ztk.deepspeed.__file__).parent
    for name, row in MODULES.items():
        parent, _, own = name.rpartition(".")
        if parent == "deepspeed" and row != f"ztk.deepspeed.{own}":
            assert not (layer / own).exists() and not (layer / f"{own}.py").exists(), name


def test_names_of_deepspeed_itself():
    for home, names in TOP.items():
        for name in names.split():
            assert lookup(name) is getattr(importlib.import_module(home), name)


def test_the_distribution_has_the_version_of_the_module():
    (found,) = SHIM.glob("*.dist-info")
    assert Distribution.at(found).version == version


def test_this_test_process_has_no_deepspeed():
    assert importlib.util.find_spec("deepspeed") is None
