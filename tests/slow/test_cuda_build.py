r"""The CUDA build of torch on a machine without a driver: imports, operators, collected GPU tests, and the compile sweep of all kernels.

    pip install --no-deps --target FOLDER torch==2.11.0 triton==3.6.0
    pip install --target FOLDER nvidia-cudnn-cu13==9.19.0.56 nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==2.28.9 \
        nvidia-nvshmem-cu13==3.4.5 \
        "cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.2"
    ZTK_CUDA_BUILD=FOLDER pytest tests/slow/test_cuda_build.py

The folder takes 5.6 GB. Without the variable the installed Triton runs the sweep, and the other tests are skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("ZTK_CUDA_BUILD")
needs_build = pytest.mark.skipif(FOLDER is None, reason="ZTK_CUDA_BUILD names no folder with a CUDA build")

IMPORTS = """
import importlib, json, pkgutil, torch, triton, ztk
failed = []
for found in pkgutil.walk_packages(ztk.__path__, "ztk."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("ztk", "torch", "triton"):
            failed.append(f"{found.name}: {error}")
    except Exception as error:
        failed.append(f"{found.name}: {type(error).__name__}: {error}")
operators = [str(torch.ops.aten.mm.dtype_out._schema), str(torch.ops.aten.addmm.dtype_out._schema)]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.is_available(),
                  "triton": triton.__version__, "failed": failed, "operators": operators,
                  "ops": len(dir(torch.ops.ztk))}))
"""

# The op's own launcher on tensors with addresses, and Triton's own look-up. Only the start of the program is missing.
LOOK_UP = """
import json
from unittest import mock
from triton import knobs
from triton.runtime.driver import driver
from tests.kernels.aot.cache import TargetDriver
from ztk.kernels import ALL_OPS
from ztk.kernels.launch.jit import Prepared
from ztk.kernels.launch.library import LAUNCHERS
from ztk.kernels.launch.machine import MACHINES, assume

found, (spec,) = {}, [spec for spec in ALL_OPS if spec.name == "swiglu"]
knobs.compilation.listener = lambda *, src, cache_hit, **_: found.setdefault(src.name, []).append(cache_hit)
def usual(prepared, grid, args):
    prepared.kernel.run(*args, grid=grid, warmup=True, **prepared.named)
with (
    assume(MACHINES["sm_90"]),
    mock.patch.object(driver, "_active", TargetDriver("sm_90")),
    mock.patch.object(Prepared, "_launch_usually", usual),
):
    for dtype in spec.dtypes:
        for shape in spec.small_shapes:
            for variant in spec.variants:
                LAUNCHERS["swiglu"](*spec.make_inputs(shape, dtype=dtype, device="cpu", **variant).values())
print(json.dumps(found))
"""

# The item `decode` computes on a CPU. Each op also runs its launcher, whose launches are noted, in place of a GPU.
ENGINE = """
import json
import torch
from dataclasses import replace
from torch.utils._python_dispatch import TorchDispatchMode
from scripts import gpu_item
from tests.kernels.aot.engine import run_engine
from tests.kernels.aot.record import noting, specialised
from tests.kernels.aot.sweep import key_of
from ztk.core.runtime import Process
from ztk.kernels.launch.library import LAUNCHERS, NAMESPACE

class Both(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == NAMESPACE:
            LAUNCHERS[func._schema.name.split("::")[1]](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

def launched(run):
    found = {}
    def note(kernel, grid, *args, **named):
        launch = specialised(kernel, args, named, grid=grid)
        found[key_of(launch)] = kernel.__name__
    with noting(note, target="sm_90"):
        run()
    return found

gpu_item.TINY, gpu_item.DECODED = replace(gpu_item.TINY, max_seq_len=640), {1: 640, 2: 640}
def decode():
    with Both():
        gpu_item.decode(Process.start(device="cpu"))
needed = launched(decode)
known = launched(lambda: run_engine(gpu_item.TINY, dtype=torch.float32, longest=640, sequences=2))
print(json.dumps({"kernels": sorted(set(needed.values())), "missing": [str(key) for key in needed.keys() - known.keys()]}))
"""


def run(*arguments: str, folder: str | None = FOLDER, **variables: str) -> subprocess.CompletedProcess:
    """Runs Python with the build in `folder`, if there is one, in front of the installed packages."""
    paths = [*filter(None, [folder]), str(REPOSITORY)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


@needs_build
def test_everything_imports_and_operators_have_their_arguments() -> None:
    done = run("-c", IMPORTS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["torch"].startswith("2.11.0") and found["cuda"] and found["triton"] == "3.6.0" and not found["gpu"]
    assert not found["failed"]
    assert all("ScalarType out_dtype" in schema and "Tensor(a!) out" in schema for schema in found["operators"])


@needs_build
def test_all_gpu_tests_are_collected(show: Callable[[str], None]) -> None:
    done = run(
        "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/kernels", "tests/parallel"
    )
    assert done.returncode == 0, done.stdout[-2000:]
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(collected) > 100 and {line.split("::")[0] for line in collected} >= {
        "tests/kernels/test_gpu.py",
        "tests/parallel/recompute/test_gpu.py",
    }
    show(f"{len(collected)} GPU tests are collected")


def test_every_launch_compiles_within_the_limits(show: Callable[[str], None]) -> None:
    """By the build's Triton, or by the installed one."""
    done = run("-m", "tests.kernels.aot.sweep", "--targets", "sm_90", "sm_100")
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["faults"]
    for target, counts in found["targets"].items():
        assert counts["compiled"] == counts["unique"] > 100
        show(f"Triton {found['triton']}, {target}: {counts['launches']} launches, {counts['compiled']} compiled")


def test_programs_for_the_inference_engine_are_those_that_it_launches() -> None:
    """Of the cache that `first_hour.py prepare` carries: steps without memory launch all that decoding does."""
    done = run("-c", ENGINE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["missing"]
    assert {"_paged_attention", "_merge_segments", "_linear_rows", "_cache_rows", "_draw_tiles"} <= set(
        found["kernels"]
    )


def test_a_launch_finds_the_program_that_was_compiled_before(tmp_path: Path) -> None:
    """In the cache that `first_hour.py prepare` carries."""
    made, there = tmp_path / "made", tmp_path / "there"
    command = ("-m", "tests.kernels.aot.cache", str(made), "--at", str(there), "--ops", "swiglu", "--processes", "1")
    filled = run(*command)
    assert filled.returncode == 0, filled.stderr[-2000:]
    made.rename(there)
    looked_up = run("-c", LOOK_UP, TRITON_CACHE_DIR=str(there))
    assert looked_up.returncode == 0, looked_up.stderr[-2000:]
    found = json.loads(looked_up.stdout)
    assert found and all(all(hits) for hits in found.values())
    assert len(list(there.glob("*/__grp__*"))) == json.loads(filled.stdout)["programs"] > 2
