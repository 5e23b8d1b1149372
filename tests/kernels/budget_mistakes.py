"""Slower launches and kernels on purpose, compiled for sm_90 and held to their budgets: `python -m tests.kernels.budget_mistakes`.

Run in a process that does not interpret. Prints one JSON object: "reasons", mistake -> the broken budget, empty where none broke, and
"alone" and "together", the instructions of kernels as cuobjdump reads each and as `disassemble` reads them in one file.
"""

import importlib
import json
import re
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

from tests.kernels.aot.cases import CASES
from tests.kernels.aot.compile import compile_case, compile_launch, read_cubin
from tests.kernels.aot.disassemble import code_of, disassemble
from tests.kernels.aot.record import launch_of
from tests.kernels.planting import planted, spec_of
from ztk.kernels import ALL_OPS
from ztk.kernels.launch.machine import Architecture
from ztk.kernels.ops import grouped_gemm
from ztk.kernels.shared import attention_tiles
from ztk.kernels.shared.attention_tiles import Part

TARGET = "sm_90"


def broken(op: str, *, kernel: str) -> str:
    """The broken budgets of the first case of the kernel that the op launches."""
    spec = next(spec for spec in ALL_OPS if spec.name == op)
    case = next(case for case in CASES[op] if case.kernel == kernel and TARGET in case.targets)
    row = compile_case(case, spec=spec, arch=TARGET)
    return "" if row.ok else row.reason


def first_broken(package: ModuleType, op: str) -> str:
    """The broken budgets of the op's first case, in a copy of the kernels."""
    compiled = importlib.import_module(f"{package.__name__}.aot.compile").compile_case
    row = compiled(CASES[op][0], spec=spec_of(package, op), arch=TARGET)
    return "" if row.ok else row.reason


def thirty_two_per_thread(folder: Path) -> str:
    """An elementwise kernel that converts layouts through shared memory."""
    old, new = "PER_THREAD = 4 ", "PER_THREAD = 32 "
    with planted(folder, file="shared/flat.py", old=old, new=new, backend="auto") as package:
        return first_broken(package, "adamw_bf16")


def attention_with_one_stage() -> str:
    """No tile of keys is loaded ahead."""
    table = attention_tiles._TABLE[Part.forward]
    single = tuple((held, step, warps, 1) for held, step, warps, _ in table[Architecture.hopper])
    with mock.patch.dict(table, {Architecture.hopper: single}):
        return broken("attention", kernel="_attention_fwd")


def small_grouped_tiles() -> str:
    """128 x 64 x 32 and one stage."""
    small = grouped_gemm.LaunchConfig(block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=1)
    with mock.patch.object(grouped_gemm.LaunchConfig, "for_product", lambda **_: small):
        return broken("grouped_matmul", kernel="_grouped_fwd")


def experts_by_pointers() -> str:
    """Where descriptors can describe their weights."""
    grouped_gemm._product_for.cache_clear()
    with mock.patch.object(grouped_gemm, "can_describe", lambda *_, **__: False):
        return broken("grouped_matmul", kernel="_grouped_fwd")


def two_more_exponentials_per_logit(folder: Path) -> str:
    """In the loop of the sum."""
    old, new = (
        "    b_sum = b_sum * b_scale",
        "    b_p += 1e-9 * (tl.exp2(b_x * 0.5) + tl.exp2(b_x * 0.25))\n    b_sum = b_sum * b_scale",
    )
    with planted(folder, file="ops/cross_entropy.py", old=old, new=new, backend="auto") as package:
        return first_broken(package, "cross_entropy")


def early(folder: Path, *, old: str, new: str) -> str:
    """A kernel that is launched before the one in front of it has ended, whose wait is not where it must be."""
    with planted(folder, file="ops/cache_rows.py", old=old, new=new, backend="auto") as package:
        return first_broken(package, "cache_rows")


def early_kernels(folder: Path) -> dict[str, str]:
    """Without a wait, with a store in front of it, and in some programs only."""
    wait = "    wait_for_kernels(PDL)\n"
    return {
        "no wait": early(folder, old=wait, new=""),
        "a store before the wait": early(folder, old=wait, new=f"    tl.store(places_ptr, 0)\n{wait}"),
        "a wait in some programs": early(folder, old=wait, new=f"    if tl.program_id(1) < H:\n    {wait}"),
    }


def alone_and_together() -> dict[str, list]:
    """Kernels with branches, calls and returns, of which the targets count from each kernel's start."""
    cases = [(spec, case) for spec in ALL_OPS if spec.name in ("rope", "cache_rows") for case in CASES[spec.name]]
    binaries = [compile_launch(launch_of(spec, case=case, target=TARGET), arch=TARGET) for spec, case in cases]
    alone = [read_cubin("-sass", binary=binary) for binary in binaries]
    together = disassemble([code_of(binary.asm["cubin"]) for binary in binaries], arch=TARGET)
    pattern = r"/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;"
    return {
        name: [re.findall(pattern, text) for text in texts]
        for name, texts in (("alone", alone), ("together", together))
    }


def main() -> None:
    """Try all."""
    with tempfile.TemporaryDirectory() as folder:
        reasons = {
            "32 elements per thread": thirty_two_per_thread(Path(folder)),
            "attention with one stage": attention_with_one_stage(),
            "grouped 128x64x32, one stage": small_grouped_tiles(),
            "grouped by pointers": experts_by_pointers(),
            "two more exponentials per logit": two_more_exponentials_per_logit(Path(folder)),
            **early_kernels(Path(folder)),
        }
    print(json.dumps({"reasons": reasons, **alone_and_together()}))


if __name__ == "__main__":
    main()
