"""Fixtures for all tests: warm rank pools, and kernels in Triton's interpreter."""

import gc
import os
import shutil
import tempfile
from multiprocessing.util import Finalize

# Read once, when the first test module imports ztk.kernels; only `set_backend("triton")` interprets kernels then. On a machine with
# a GPU: TRITON_INTERPRET=0 pytest -m gpu
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is first imported, also in the ranks

import pytest
import torch

from tests import workers
from tests.composing import speed_up_hydra
from tests.interpreter import speed_up_interpreter
from tests.quick import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_teardown  # noqa: F401 hooks
from tests.ranks import RankPool

# As in the ranks, because some tests compare their bits with this process. The kernels' interpreter is numpy in one thread, too.
torch.set_num_threads(1)

speed_up_interpreter()
speed_up_hydra()

# Tests, their ranks and the programs they start leave folders; all lie in one, which goes with this process, after multiprocessing's own
# (of priority -100). `tmp_path` stays outside, where pytest keeps the last three sessions'.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="ztk-")
Finalize(None, shutil.rmtree, args=(tempfile.tempdir,), kwargs={"ignore_errors": True}, exitpriority=-200)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(workers)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Garbage collection would take a quarter of the time of importing the tests. Later ones, which every plan runs, do not scan torch, the
    test modules and 10,000 tests again."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise triton's bindings count the remaining objects when the interpreter ends


@pytest.fixture(autouse=True)
def no_launcher_started_this_process():
    """Removes a rank's variables after each test. An engine of `ztk.deepspeed` in a process group writes them, and commands of later tests
    would run as ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)` is a pool of n connected processes."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for made in pools.values():
        made.close()
