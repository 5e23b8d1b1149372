"""Compiles every launch of every op's test and benchmark shapes for a target, without a GPU, and checks the limits of a launch.

    TRITON_INTERPRET=0 python -m tests.kernels.aot.sweep [--targets sm_80 sm_90 sm_100 gfx942] [--every 20]

Prints one JSON object: versions, counts, and a line per fault. Launches that Triton specialises alike are compiled once. The CUDA build of
torch needs no driver here.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton

from tests.kernels.aot.compile import MAX_THREADS, compile_launch
from tests.kernels.aot.record import Launch, launches
from ztk.kernels import ALL_OPS
from ztk.kernels.launch.jit import MOST_PROGRAMS, MOST_PROGRAMS_ACROSS
from ztk.kernels.launch.library import interpreting
from ztk.kernels.launch.machine import MACHINES

# Per program. Consumer chips, which run the launches of sm_80, have 99 KiB (CUDA programming guide, compute capabilities).
SHARED_BYTES = {"sm_80": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
ON_HOST = {"adamw_8bit": 1 << 24}  # elements: this op makes its inputs in main memory
MOST_IN_A_BOX = 256  # elements of a block that a tensor map loads, along each axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The part of an `AotCase` that a recording reads."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: dict[str, Any]


def shapes() -> Iterator[tuple[int, Shape]]:
    """(number of the op, one of its shapes): test shapes in all dtypes and variants, benchmark shapes in bf16 where the op has it."""
    for number, spec in enumerate(ALL_OPS):
        for dtype in spec.dtypes:
            for shape in spec.small_shapes:
                for variant in spec.variants:
                    yield number, Shape(shape=shape, dtype=dtype, inputs=dict(variant))
        dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else spec.dtypes[0]
        for shape in spec.bench_shapes:
            if prod(shape) <= ON_HOST.get(spec.name, prod(shape)):
                yield number, Shape(shape=shape, dtype=dtype, inputs={})


def recorded(target: str) -> tuple[dict[tuple, tuple[str, Launch]], int, list[str]]:
    """Launches that differ in their code, with the place of the first; the number of all launches; faults."""
    found, count, faults = {}, 0, []
    for number, shape in shapes():
        spec = ALL_OPS[number]
        place = f"{target} {spec.name} {'x'.join(map(str, shape.shape))} {shape.dtype} {shape.inputs}"
        try:
            own = launches(spec, case=shape, target=target)
        except Exception as error:  # noqa: BLE001  # a fault of the sweep, whatever it is
            faults.append(f"{place}: {type(error).__name__}: {error}"[:400])
            continue
        count += len(own)
        for launch in own:
            faults += [f"{place}: {fault}" for fault in grid_faults(launch)]
            found.setdefault(key_of(launch), (place, launch))
    return found, count, faults


def grid_faults(launch: Launch) -> Iterator[str]:
    """Grids that a driver refuses, and those that Triton's launcher skips."""
    if prod(launch.grid) >= MOST_PROGRAMS or max(launch.grid[1:], default=1) > MOST_PROGRAMS_ACROSS:
        yield f"{launch.kernel.__name__} has the grid {launch.grid}"


def compiled_faults(launch: Launch, *, target: str) -> Iterator[str]:
    """Limits that the compiled code breaks."""
    binary, name = compile_launch(launch, arch=target), launch.kernel.__name__
    if binary.metadata.shared > SHARED_BYTES[target]:
        yield f"{name} takes {binary.metadata.shared} bytes of shared memory > {SHARED_BYTES[target]}"
    if binary.metadata.num_warps * MACHINES[target].warp_size > MAX_THREADS:
        yield f"{name} has {binary.metadata.num_warps} warps"
    for box in getattr(binary.metadata, "tensordesc_meta", None) or ():  # of NVIDIA
        if max(box["block_size"]) > MOST_IN_A_BOX:
            yield f"{name} loads a block of {box['block_size']} elements"


def key_of(launch: Launch) -> tuple:
    """Equal for launches of the same code."""
    names = (launch.signature, launch.constexprs, launch.options)
    return launch.kernel.__name__, launch.divisible, *(tuple((k, str(v)) for k, v in of.items()) for of in names)


def sweep_part(target: str, part: int, parts: int, every: int) -> dict[str, Any]:
    """Records all launches, and compiles the launches of one part. every: compiles one of this many."""
    found, count, faults = recorded(target)
    chosen = list(found.values())[::every][part::parts]
    for place, launch in chosen:
        try:
            faults += [f"{place}: {fault}" for fault in compiled_faults(launch, target=target)]
        except Exception as error:  # noqa: BLE001  # of the compiler
            faults.append(f"{place}: {launch.kernel.__name__}: {type(error).__name__}: {error}"[:400])
    return {"target": target, "launches": count, "unique": len(found), "compiled": len(chosen), "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["sm_90", "sm_100"], choices=list(SHARED_BYTES))
    parser.add_argument("--every", type=int, default=1, help="compile one of this many launches")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if interpreting():
        parser.error("TRITON_INTERPRET=1 replaces the compiler; run without it")
    jobs = [
        (target, part, options.processes, options.every)
        for target in options.targets
        for part in range(options.processes)
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(pool.map(sweep_part, *zip(*jobs, strict=True)))
    targets = {}
    for target in options.targets:
        own = [row for row in rows if row["target"] == target]
        compiled = sum(row["compiled"] for row in own)
        targets[target] = {"launches": own[0]["launches"], "unique": own[0]["unique"], "compiled": compiled}
    faults = sorted({fault for row in rows for fault in row["faults"]})
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    print(json.dumps({**versions, "targets": targets, "faults": faults}, indent=1))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
