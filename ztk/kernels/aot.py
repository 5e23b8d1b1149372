"""`python -m ztk.kernels.aot`: compile every kernel for each target, without a GPU, and hold it to its budget.

Reports what the assembler made of each `AotCase`: registers, stack and spills, shared memory, the widths of global loads
and stores, barriers, matrix instructions, instructions per element. `--json` prints one list of objects instead of the
table. The exit code is 1 when a budget is broken.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ztk.kernels import ALL_OPS
from ztk.kernels._library import interpreting
from ztk.kernels._spec import TARGETS, AotCase

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_THREADS = 1024  # of one program, on every target
MATRIX_INSTRUCTION = {
    "sm_80": r"\b[HIB]MMA\.",
    "sm_90": r"\b[HQI]GMMA\.",
    "sm_100": r"\bUTC\w*MMA",
    "gfx942": r"\bv_mfma_",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """What one compiled kernel consists of."""

    registers: int
    stack_bytes: int
    spills: int  # spill stores and loads
    shared_bytes: int
    load_bytes: tuple[int, ...]  # width of each global load in the program text
    store_bytes: tuple[int, ...]
    barriers: int
    matrix_instructions: int
    instructions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AotRow:
    """One line of the report."""

    op: str
    kernel: str
    arch: str
    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    vector_loads: int  # global loads of 16 bytes and more
    vector_stores: int
    widest_load: int
    widest_store: int
    barriers: int
    matrix_instructions: int
    instructions: int
    instructions_per_element: float | None
    ok: bool
    reason: str  # the broken budget, or why a spill or a narrow access is accepted


def compile_case(case: AotCase, *, op: str, arch: str) -> AotRow:
    """Compile one case for one target and judge it; a compiler error is a row that is not ok."""
    try:
        anatomy = _dissect(_compile(case, arch=arch), arch=arch)
    except Exception as error:  # whatever the compiler raises belongs into the report
        return _failed(case, op=op, arch=arch, error=error)
    per_element = None
    if case.elements_per_program is not None:
        scale = 1.0  # a larger block on 64-wide waves handles that many times the elements
        for name, value in case.hip_constexprs.items() if arch.startswith("gfx") else ():
            scale *= value / case.constexprs[name]
        threads = case.num_warps * (64 if arch.startswith("gfx") else 32)
        per_element = round(anatomy.instructions / (case.elements_per_program * scale / threads), 1)
    broken = list(_broken_budgets(case, anatomy=anatomy, arch=arch, per_element=per_element))
    return AotRow(
        op=op,
        kernel=case.name,
        arch=arch,
        registers=anatomy.registers,
        stack_bytes=anatomy.stack_bytes,
        spills=anatomy.spills,
        shared_bytes=anatomy.shared_bytes,
        vector_loads=sum(width >= 16 for width in anatomy.load_bytes),
        vector_stores=sum(width >= 16 for width in anatomy.store_bytes),
        widest_load=max(anatomy.load_bytes, default=0),
        widest_store=max(anatomy.store_bytes, default=0),
        barriers=anatomy.barriers,
        matrix_instructions=anatomy.matrix_instructions,
        instructions=anatomy.instructions,
        instructions_per_element=per_element,
        ok=not broken,
        reason="; ".join(broken) or "; ".join(_accepted(case, anatomy=anatomy)),
    )


def _accepted(case: AotCase, *, anatomy: Anatomy) -> Iterable[str]:
    """The spec's reasons for what is not ideal and yet within budget."""
    if anatomy.stack_bytes:
        yield case.stack_reason
    if min(max(anatomy.load_bytes, default=0), max(anatomy.store_bytes, default=0)) < 16:
        yield case.vector_reason


def _broken_budgets(case: AotCase, *, anatomy: Anatomy, arch: str, per_element: float | None) -> Iterable[str]:
    """One phrase per broken budget. Register and instruction budgets are written for NVIDIA targets."""
    nvidia = arch.startswith("sm_")
    widest_load, widest_store = max(anatomy.load_bytes, default=0), max(anatomy.store_bytes, default=0)
    threads = case.num_warps * (32 if nvidia else 64)
    if threads > MAX_THREADS:
        yield f"{threads} threads per program > {MAX_THREADS}"
    if nvidia and anatomy.registers > case.max_registers:
        yield f"{anatomy.registers} registers > {case.max_registers}"
    if anatomy.stack_bytes > case.max_stack_bytes:
        yield f"{anatomy.stack_bytes} stack bytes > {case.max_stack_bytes}"
    if anatomy.spills and not case.max_stack_bytes:
        yield f"{anatomy.spills} spills"
    if widest_load < case.vector_load_bytes:
        yield f"widest load {widest_load} < {case.vector_load_bytes} bytes"
    if widest_store < case.vector_store_bytes:
        yield f"widest store {widest_store} < {case.vector_store_bytes} bytes"
    if case.max_barriers is not None and anatomy.barriers > case.max_barriers:
        yield f"{anatomy.barriers} barriers > {case.max_barriers}"
    if case.matrix_instructions and not anatomy.matrix_instructions:
        yield "no matrix instructions"
    limit = case.max_instructions_per_element
    if nvidia and limit is not None and per_element > limit:
        yield f"{per_element} instructions per element > {limit}"


def _compile(case: AotCase, *, arch: str):
    """The compiled kernel; arguments are specialised as the launcher's would be."""
    names = list(case.kernel.arg_names)
    constexprs = dict(case.constexprs) | (dict(case.hip_constexprs) if arch.startswith("gfx") else {})
    unknown = [name for name in names if name not in case.signature and name not in constexprs]
    unknown += [name for name in (*case.signature, *constexprs, *case.divisible_by_16) if name not in names]
    if unknown:
        raise ValueError(f"AotCase {case.name}: signature and constexprs disagree with the kernel on {unknown}")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    if arch.startswith("gfx"):
        return triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)
    options["num_ctas"] = case.num_ctas
    return triton.compile(source, target=GPUTarget("cuda", int(arch[3:]), 32), options=options)


def _dissect(binary, *, arch: str) -> Anatomy:
    if arch.startswith("gfx"):
        return _dissect_amdgcn(binary.asm["amdgcn"], shared_bytes=binary.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, sass = (_cuobjdump(flag, file.name) for flag in ("-res-usage", "-sass"))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return dissect_sass(sass, arch=arch, registers=registers, stack_bytes=stack, shared_bytes=binary.metadata.shared)


def _cuobjdump(flag: str, path: str) -> str:
    return subprocess.run([CUOBJDUMP, flag, path], capture_output=True, text=True, check=True).stdout


def dissect_sass(sass: str, *, arch: str, registers: int, stack_bytes: int, shared_bytes: int) -> Anatomy:
    """Count a disassembled NVIDIA kernel."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", sass)
    instructions = [line for line in lines if not line.startswith("NOP")]
    loads = [i.split()[0] for i in instructions if re.match(r"(LDG|LDGSTS)\.", i)]
    stores = [i.split()[0] for i in instructions if re.match(r"STG\.", i)]
    tma_loads = sum(i.startswith("UTMALDG") for i in instructions)
    tma_stores = sum(i.startswith("UTMASTG") for i in instructions)
    return Anatomy(
        registers=registers,
        stack_bytes=stack_bytes,
        spills=sum(bool(re.match(r"(STL|LDL)\b", i)) for i in instructions),
        shared_bytes=shared_bytes,
        load_bytes=tuple(map(_sass_width, loads)) + (128,) * tma_loads,
        store_bytes=tuple(map(_sass_width, stores)) + (128,) * tma_stores,
        barriers=sum(bool(re.match(r"BAR\.(SYNC|RED|ARV)", i)) for i in instructions),
        matrix_instructions=len(re.findall(MATRIX_INSTRUCTION[arch], "\n".join(instructions))),
        instructions=len(instructions),
    )


SASS_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def _sass_width(opcode: str) -> int:
    """Bytes of a global access from its opcode: LDG.E.128 is 16, LDG.E is 4, LDG.E.U16 is 2."""
    return next((SASS_WIDTHS[part] for part in opcode.split(".") if part in SASS_WIDTHS), 4)


def _dissect_amdgcn(text: str, *, shared_bytes: int) -> Anatomy:
    """Count an AMD kernel from its assembly and metadata."""

    def metadata(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    widths = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}

    def accesses(kind: str) -> tuple[int, ...]:
        found = re.findall(rf"^\s+(?:global|buffer|flat)_{kind}_(\w+)", text, flags=re.MULTILINE)
        return tuple(next((w for name, w in widths.items() if f.startswith(name)), 2) for f in found)

    return Anatomy(
        registers=metadata("vgpr_count"),
        stack_bytes=metadata("private_segment_fixed_size"),
        spills=metadata("vgpr_spill_count"),
        shared_bytes=shared_bytes,
        load_bytes=accesses("load"),
        store_bytes=accesses("store"),
        barriers=len(re.findall(r"^\s+s_barrier", text, flags=re.MULTILINE)),
        matrix_instructions=len(re.findall(MATRIX_INSTRUCTION["gfx942"], text)),
        instructions=len(re.findall(r"^\s+(?:v|s|global|buffer|flat|ds|scratch)_\w+", text, flags=re.MULTILINE)),
    )


def _failed(case: AotCase, *, op: str, arch: str, error: Exception) -> AotRow:
    numbers = dict.fromkeys(
        ("registers", "stack_bytes", "spills", "shared_bytes", "vector_loads", "vector_stores", "widest_load", "widest_store",
         "barriers", "matrix_instructions", "instructions"), 0,
    )  # fmt: skip
    text = f"{type(error).__name__}: {error}".strip().splitlines()
    reason = " ".join(line.strip() for line in text[:4])[:400]
    return AotRow(op=op, kernel=case.name, arch=arch, **numbers, instructions_per_element=None, ok=False, reason=reason)


def _compile_index(job: tuple[int, int, str]) -> AotRow:
    """A job by its place in ALL_OPS: kernels and lambdas do not travel between processes, positions do."""
    i_op, i_case, arch = job
    spec = ALL_OPS[i_op]
    return compile_case(spec.aot[i_case], op=spec.name, arch=arch)


def report(*, ops: str = "", archs: tuple[str, ...] = TARGETS, jobs: int | None = None) -> list[AotRow]:
    """Rows of every case whose op or kernel name contains `ops`, for the given targets, over `jobs` processes."""
    work = [
        (i_op, i_case, arch)
        for i_op, spec in enumerate(ALL_OPS)
        for i_case, case in enumerate(spec.aot)
        for arch in case.targets
        if arch in archs and (ops in spec.name or ops in case.name)
    ]
    context = multiprocessing.get_context("fork")  # inherits the imported kernels
    with ProcessPoolExecutor(max_workers=jobs or os.cpu_count(), mp_context=context) as pool:
        return list(pool.map(_compile_index, work))


def table(rows: list[AotRow]) -> str:
    """The report as text for people."""
    header = (
        "kernel",
        "arch",
        "regs",
        "stack",
        "spills",
        "shared",
        "ld16",
        "st16",
        "bar",
        "mma",
        "instr",
        "/elem",
        "verdict",
    )
    lines = [header]
    for r in rows:
        per_element = "" if r.instructions_per_element is None else f"{r.instructions_per_element:g}"
        verdict = ("ok" if r.ok else "BROKEN") + (f": {r.reason}" if r.reason else "")
        lines.append(
            (r.kernel, r.arch, r.registers, r.stack_bytes, r.spills, r.shared_bytes, r.vector_loads, r.vector_stores,
             r.barriers, r.matrix_instructions, r.instructions, per_element, verdict)
        )  # fmt: skip
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(header) - 1)]
    return "\n".join(
        "  ".join(
            [
                str(line[0]).ljust(widths[0]),
                *(str(c).rjust(w) for c, w in zip(line[1:-1], widths[1:], strict=True)),
                line[-1],
            ]
        )
        for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one list of objects")
    parser.add_argument("--ops", default="", help="only ops or kernels whose name contains this")
    parser.add_argument("--arch", action="append", choices=TARGETS, help="only this target; may be repeated")
    parser.add_argument("--jobs", type=int, help="compiling processes; all cores by default")
    options = parser.parse_args()
    if interpreting():
        parser.error("TRITON_INTERPRET=1 replaces the compiler; run without it")
    rows = report(ops=options.ops, archs=tuple(options.arch or TARGETS), jobs=options.jobs)
    if options.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        print()
    else:
        print(table(rows))
        print(f"{sum(r.ok for r in rows)} of {len(rows)} within budget")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
