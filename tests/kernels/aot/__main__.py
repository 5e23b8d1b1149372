"""`python -m tests.kernels.aot` compiles every kernel for each target, without a GPU, and checks it against its budget.

Reports the assembler's result for each `AotCase`, as its op launches it: registers, programs that fit on a processor and programs
launched, stack and spills, shared memory, the widths of global loads and stores, barriers, matrix instructions, and instructions
per element of the program and of its loops. For a kernel that starts before the previous one has ended, also the instructions before its wait.
`--json` prints one list of objects instead of the table. The exit code is 1 if a budget is exceeded.
"""

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from tests.kernels.aot.case import TARGETS
from tests.kernels.aot.cases import CASES
from tests.kernels.aot.compile import AotRow, compile_cases
from ztk.kernels import ALL_OPS
from ztk.kernels.launch.library import interpreting

# Cases of one target that a process disassembles at once: fewer start nvdisasm more often, more are shared out worse.
TOGETHER = 8


def _compile_indices(job: tuple[str, list[tuple[int, int]]]) -> list[AotRow]:
    """Cases of one target by their places in ALL_OPS: kernels and lambdas cannot be sent between processes, positions can."""
    arch, places = job
    return compile_cases([(ALL_OPS[i_op], CASES[ALL_OPS[i_op].name][i_case]) for i_op, i_case in places], arch=arch)


def report(*, ops: str = "", archs: tuple[str, ...] = TARGETS, jobs: int | None = None) -> list[AotRow]:
    """Rows of every case whose op or kernel name contains `ops`, for the given targets, over `jobs` processes."""
    work = [
        (arch, (i_op, i_case))
        for i_op, spec in enumerate(ALL_OPS)
        for i_case, case in enumerate(CASES[spec.name])
        for arch in case.targets
        if arch in archs and (ops in spec.name or ops in case.name)
    ]
    tasks = []
    for arch in archs:
        places = [place for of_arch, place in work if of_arch == arch]
        tasks += [(arch, places[first : first + TOGETHER]) for first in range(0, len(places), TOGETHER)]
    context = multiprocessing.get_context("fork")  # inherits the imported kernels
    with ProcessPoolExecutor(max_workers=jobs or os.cpu_count(), mp_context=context) as pool:
        done = list(pool.map(_compile_indices, tasks))
    rows = {
        (arch, place): row
        for (arch, places), of_task in zip(tasks, done, strict=True)
        for place, row in zip(places, of_task, strict=True)
    }
    return [rows[each] for each in work]


def table(rows: list[AotRow]) -> str:
    """The report as text for people."""
    header = (
        "kernel", "arch", "regs", "fit", "programs", "stack", "spills", "shared", "ld16", "st16", "bar", "mma", "instr",
        "/elem", "loops/elem", "result",
    )  # fmt: skip
    lines = [header]
    for r in rows:
        ratios = ("" if x is None else f"{x:g}" for x in (r.instructions_per_element, r.loop_instructions))
        result = ("ok" if r.ok else "BROKEN") + (f": {r.reason}" if r.reason else "")
        lines.append(
            (r.kernel, r.arch, r.registers, r.programs_per_processor, r.programs, r.stack_bytes, r.spills, r.shared_bytes,
             r.vector_loads, r.vector_stores, r.barriers, r.matrix_instructions, r.instructions, *ratios, result)
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
    """The command line; returns the exit code."""
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
