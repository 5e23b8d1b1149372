"""Compiles cases for a target without a GPU and checks their budgets: a row of numbers and of exceeded budgets."""

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.aot.case import AotCase
from tests.kernels.aot.disassemble import code_of, disassemble
from tests.kernels.aot.record import Launch, launch_of
from tests.kernels.aot.sass import Anatomy, before_the_wait, dissect_amdgcn, dissect_sass, programs_per_processor
from ztk.kernels.launch.machine import MACHINES
from ztk.kernels.shared.spec import OpSpec

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_THREADS = 1024  # of one program, on every target
CALIBRATED = "sm_90"  # the target whose registers and shared memory the budgets are written for


@dataclass(frozen=True, kw_only=True, slots=True)
class AotRow:
    """One line of the report."""

    op: str
    kernel: str
    arch: str
    registers: int = 0
    programs_per_processor: int = 0  # that fit at once; 0 where it is not counted
    programs: int = 0  # launched
    num_warps: int = 0
    stack_bytes: int = 0
    spills: int = 0
    shared_bytes: int = 0
    vector_loads: int = 0  # global loads of 16 bytes and more
    vector_stores: int = 0
    widest_load: int = 0
    widest_store: int = 0
    barriers: int = 0
    matrix_instructions: int = 0
    tensor_loads: int = 0  # of blocks, by descriptors
    instructions: int = 0
    instructions_per_element: float | None = None
    loop_instructions: float | None = None  # per element, summed over the loops
    dependent: bool = False  # launched before the kernel in front of it has ended
    early: str = ""  # instructions of such a kernel before its wait
    ok: bool
    reason: str  # the broken budget, or why a spill or a narrow access is accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A case for one target. code: NVIDIA's instructions; empty for AMD."""

    launch: Launch
    binary: Any  # triton's CompiledKernel
    code: bytes


def compile_case(case: AotCase, *, spec: OpSpec, arch: str) -> AotRow:
    """Compiles one case for one target and checks its budget. A compiler error gives a row that is not ok."""
    (row,) = compile_cases([(spec, case)], arch=arch)
    return row


def compile_cases(cases: Sequence[tuple[OpSpec, AotCase]], *, arch: str) -> list[AotRow]:
    """The rows of several cases for one target. Their code is disassembled together."""
    compiled = [_try(_compiled, case, spec=spec, arch=arch) for spec, case in cases]
    codes = [each.code for each in compiled if isinstance(each, Compiled)] if arch.startswith("sm_") else []
    texts = iter(disassemble(codes, arch=arch))
    return [
        _try(_judged, case, spec=spec, arch=arch, compiled=each, sass=next(texts, ""))
        if isinstance(each, Compiled)
        else each
        for (spec, case), each in zip(cases, compiled, strict=True)
    ]


def _try(step: Callable[..., Any], case: AotCase, *, spec: OpSpec, arch: str, **more: Any) -> Any:
    """The result of the step, or a row that is not ok."""
    try:
        return step(case, spec=spec, arch=arch, **more)
    except Exception as error:  # whatever the compiler raises belongs into the report
        text = " ".join(line.strip() for line in f"{type(error).__name__}: {error}".strip().splitlines()[:4])
        return AotRow(op=spec.name, kernel=case.name, arch=arch, ok=False, reason=text[:400])


def _compiled(case: AotCase, *, spec: OpSpec, arch: str) -> Compiled:
    launch = launch_of(spec, case=case, target=arch)
    binary = compile_launch(launch, arch=arch)
    return Compiled(launch=launch, binary=binary, code=code_of(binary.asm["cubin"]) if arch.startswith("sm_") else b"")


def _judged(case: AotCase, *, spec: OpSpec, arch: str, compiled: Compiled, sass: str) -> AotRow:
    launch, binary = compiled.launch, compiled.binary
    anatomy = _dissect(binary, sass=sass, arch=arch)
    num_warps = launch.options["num_warps"]
    dependent, fitting = bool(launch.options.get("launch_pdl")), 0
    if arch.startswith("sm_"):
        fitting = programs_per_processor(
            registers=anatomy.registers, shared_bytes=anatomy.shared_bytes, num_warps=num_warps, arch=arch
        )
    numbers = {
        "dependent": dependent,
        "early": before_the_wait(ptx=binary.asm["ptx"], sass=sass) if dependent else "",
        "registers": anatomy.registers,
        "programs_per_processor": fitting,
        "programs": launch.programs,
        "num_warps": num_warps,
        "stack_bytes": anatomy.stack_bytes,
        "spills": anatomy.spills,
        "shared_bytes": anatomy.shared_bytes,
        "vector_loads": sum(width >= 16 for width in anatomy.load_bytes),
        "vector_stores": sum(width >= 16 for width in anatomy.store_bytes),
        "widest_load": max(anatomy.load_bytes, default=0),
        "widest_store": max(anatomy.store_bytes, default=0),
        "barriers": anatomy.barriers,
        "matrix_instructions": anatomy.matrix_instructions,
        "tensor_loads": anatomy.tensor_loads,
        "instructions": anatomy.instructions,
        "instructions_per_element": _per_element(case, anatomy=anatomy, launch=launch, arch=arch),
        "loop_instructions": _per_element_in_loops(case, anatomy=anatomy),
    }
    row = AotRow(
        op=spec.name,
        kernel=case.name,
        arch=arch,
        ok=True,
        reason="; ".join(_accepted(case, anatomy=anatomy)),
        **numbers,
    )
    broken = "; ".join(_broken_budgets(case, row=row))
    return AotRow(**(asdict(row) | {"ok": False, "reason": broken})) if broken else row


def _per_element(case: AotCase, *, anatomy: Anatomy, launch: Launch, arch: str) -> float | None:
    if case.elements is None:
        return None
    threads = launch.programs * launch.options["num_warps"] * MACHINES[arch].warp_size
    return round(anatomy.instructions * threads / case.elements, 1)


def _per_element_in_loops(case: AotCase, *, anatomy: Anatomy) -> float | None:
    """The compiler may unroll: a round's elements are those whose bytes it loads."""
    loops = [loop for loop in anatomy.loops if loop.vector_bytes]
    if case.loop_bytes is None or not loops:
        return None
    return round(sum(loop.instructions * case.loop_bytes / loop.vector_bytes for loop in loops), 1)


def _accepted(case: AotCase, *, anatomy: Anatomy) -> Iterable[str]:
    """The spec's reasons for results within budget that are not ideal."""
    if anatomy.stack_bytes:
        yield case.stack_reason
    if min(max(anatomy.load_bytes, default=0), max(anatomy.store_bytes, default=0)) < 16:
        yield case.vector_reason


def _broken_budgets(case: AotCase, *, row: AotRow) -> Iterable[str]:
    """One phrase per broken budget. Programs, registers, shared memory and loops are budgeted on `CALIBRATED` only."""
    machine = MACHINES[row.arch]
    threads = row.num_warps * machine.warp_size
    if row.early:
        yield f"launched before the kernel in front of it has ended, {row.early}"
    if threads > MAX_THREADS:
        yield f"{threads} threads per program > {MAX_THREADS}"
    if row.stack_bytes > case.max_stack_bytes:
        yield f"{row.stack_bytes} stack bytes > {case.max_stack_bytes}"
    if row.spills and not case.max_stack_bytes:
        yield f"{row.spills} spills"
    if row.widest_load < case.vector_load_bytes:
        yield f"widest load {row.widest_load} < {case.vector_load_bytes} bytes"
    if row.widest_store < case.vector_store_bytes:
        yield f"widest store {row.widest_store} < {case.vector_store_bytes} bytes"
    if case.max_barriers is not None and row.barriers > case.max_barriers:
        yield f"{row.barriers} barriers > {case.max_barriers}"
    if case.matrix_instructions and not row.matrix_instructions:
        yield "no matrix instructions"
    if case.tensor_loads and not row.tensor_loads:
        yield "no loads by descriptors"
    limit = case.max_instructions_per_element
    if row.arch.startswith("sm_") and limit is not None and (row.instructions_per_element or math.inf) > limit:
        yield f"{row.instructions_per_element} instructions per element > {limit}"
    if row.arch == CALIBRATED:
        yield from _broken_on_calibrated(case, row=row)


def _broken_on_calibrated(case: AotCase, *, row: AotRow) -> Iterable[str]:
    """Budgets that depend on one target's registers and shared memory."""
    machine = MACHINES[row.arch]
    fitting = row.programs_per_processor
    if fitting < case.min_programs:
        yield f"{fitting} programs fit on a processor ({row.registers} registers, {row.shared_bytes} B shared) < {case.min_programs}"
    if case.resident and row.programs > fitting * machine.processors:
        yield f"{row.programs} programs launched, {fitting * machine.processors} fit: the rest waits for a round of its own"
    if case.max_registers is not None and row.registers > case.max_registers:
        yield f"{row.registers} registers > {case.max_registers}"
    if row.shared_bytes < case.min_shared_bytes:
        yield f"{row.shared_bytes} B of shared memory < {case.min_shared_bytes}: smaller tiles or fewer stages"
    limit = case.max_loop_instructions
    if limit is not None and (row.loop_instructions or math.inf) > limit:
        yield f"{row.loop_instructions} instructions per element in loops > {limit}"


def compile_launch(launch: Launch, *, arch: str) -> Any:
    """Triton's CompiledKernel of an op's launch."""
    names = list(launch.kernel.arg_names)
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(fn=launch.kernel, signature=launch.signature, constexprs=launch.constexprs, attrs=attrs)
    kind, chip = ("hip", arch) if arch.startswith("gfx") else ("cuda", int(arch[3:]))
    target = GPUTarget(kind, chip, MACHINES[arch].warp_size)
    return triton.compile(source, target=target, options=launch.options)


def _dissect(binary, *, sass: str, arch: str) -> Anatomy:
    if arch.startswith("gfx"):
        return dissect_amdgcn(binary.asm["amdgcn"], shared_bytes=binary.metadata.shared)
    # pyrefly: ignore[missing-attribute]  # the pattern always matches
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", read_cubin("-res-usage", binary=binary)).groups())
    return dissect_sass(sass, arch=arch, registers=registers, stack_bytes=stack, shared_bytes=binary.metadata.shared)


def read_cubin(flag: str, *, binary: Any) -> str:
    """The output of `cuobjdump FLAG`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
