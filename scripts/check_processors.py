"""Runs the numeric tests with the instruction sets of other processors: their bounds must hold for every rounding order.

    python scripts/check_processors.py                       a selection, about 50 seconds on 2 cores
    python scripts/check_processors.py tests/zero tests/parallel/moe  these tests; `tests` runs everything

A processor is a set of instructions that torch's libraries may use. Ranks and programs that a test starts inherit the environment. A machine
without the named instructions uses its own. Exit code 1 if a test fails.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# ATEN: torch's loops. ONEDNN: products of ztk's linear layers and all 16-bit products. MKL: torch's other fp32 products, on which the first
# two variables have no effect.
PROCESSORS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX-512 without bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
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
)


def run(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the tests with the variables of one processor."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[1:] or CHOSEN)]
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def main() -> int:
    failed = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for (name, variables), done in zip(PROCESSORS.items(), pool.map(run, PROCESSORS.values()), strict=True):
            print(f"{name}:", *(f"{key}={value}" for key, value in variables.items()))
            print(done.stdout, end="", flush=True)
            if done.returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(PROCESSORS)} processors passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
