"""Runs the numeric tests with the instruction sets of other processors: their bounds must hold for every rounding order.

    python scripts/check_processors.py                       a selection, about 60 seconds on 2 cores
    python scripts/check_processors.py tests/zero tests/parallel/moe  these tests; `tests` runs everything

A processor is a set of instructions that torch's libraries may use, and the vendor that MKL takes it for. Ranks and programs that a test
starts inherit the environment. A machine without the named instructions uses its own. MKL chooses other kernels for processors that are
not Intel's, and no variable changes that, so a small library, loaded before torch, answers for the processor. Without a C compiler, or
where torch does not contain MKL, the vendor stays the machine's. Exit code 1 if a test fails.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# MKL calls these two functions when it chooses its kernels. torch exports them.
VENDOR = ("mkl_serv_intel_cpu_true", "mkl_serv_intel_cpu")


@dataclass(frozen=True)
class Processor:
    """variables: environment variables that limit the instructions. is_intel: the vendor that MKL takes the processor for."""

    variables: dict[str, str]
    is_intel: bool


# ATEN: torch's loops. ONEDNN: products of ztk's linear layers and all 16-bit products. MKL: torch's other fp32 products, on which the first
# two variables have no effect.
PROCESSORS = {
    "AVX2": Processor(
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, is_intel=False
    ),
    "AVX-512 without bf16": Processor({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, is_intel=True),
    "no vectors": Processor({"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, is_intel=False),
}
CHOSEN = (
    "tests/test_rounding.py",
    "tests/nn/test_decoder.py::test_forward_and_gradients_equal_the_plain_implementation",
    "tests/parallel/moe/test_layers.py",
    # A tier changes no bit of a stage.
    *(
        f"tests/zero/test_behaviour.py::test_accumulated_micro_batches_equal_one_batch[none-{stage}]"
        for stage in range(4)
    ),
    "tests/zero/test_behaviour.py::test_no_sync_moves_no_gradient_and_changes_no_result",
    "tests/zero/test_bit_identity.py::test_fp32_equals_a_plain_loop[4]",
    # Equal bits of tensors on the CPU and of tensors that report a GPU.
    "tests/inference/test_device_tagged.py::test_a_gpu_has_the_answers_of_a_cpu[bloom]",
    "tests/parallel/test_backward_thread.py::test_a_gpu_has_the_gradients_of_a_cpu",
    "tests/rl/rollout/test_device.py::test_a_gpu_has_the_rollouts_and_losses_of_a_cpu",
    "tests/zero/test_device_tagged.py::test_a_gpu_has_the_steps_of_a_cpu[fp32]",
)


def missing() -> str | None:
    """Returns why the vendor cannot be replaced here, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} does not preload libraries with LD_PRELOAD"
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists() or not all(hasattr(ctypes.CDLL(str(library)), name) for name in VENDOR):
        return "this torch does not contain MKL"
    return None if compiler() else "no C compiler (cc, gcc, clang) was found"


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def vendor_library(folder: Path, *, is_intel: bool) -> Path:
    """Compiles the library that makes MKL take the processor for Intel's or for another vendor's."""
    out = folder / f"{'intel' if is_intel else 'other'}.so"
    source = "".join(f"int {name}(void) {{ return {int(is_intel)}; }}\n" for name in VENDOR)
    command = [str(compiler()), "-shared", "-fPIC", "-x", "c", "-o", str(out), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return out


def environments(folder: Path) -> Iterator[dict[str, str]]:
    """Returns the variables of each processor, with the library of its vendor where one can be made."""
    replaces = missing() is None
    for processor in PROCESSORS.values():
        before = os.environ.get("LD_PRELOAD", "")
        library = [str(vendor_library(folder, is_intel=processor.is_intel))] if replaces else []
        preloaded = {"LD_PRELOAD": " ".join([*library, before])} if replaces else {}
        yield processor.variables | preloaded


def run(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the tests with the variables of one processor."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[1:] or CHOSEN)]
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def main() -> int:
    failed = []
    if reason := missing():
        print(f"MKL takes the processor for the vendor's that it has: {reason}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = list(environments(Path(folder)))
        for (name, processor), done in zip(PROCESSORS.items(), pool.map(run, found), strict=True):
            vendor = "" if missing() else "Intel's, " if processor.is_intel else "another vendor's, "
            print(f"{name}: {vendor}{' '.join(f'{key}={value}' for key, value in processor.variables.items())}")
            print(done.stdout, end="", flush=True)
            if done.returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(PROCESSORS)} processors passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
