"""How the three kernels of `attention` with matrix products are launched on each kind of machine, and compiled ahead of time.

A program holds one block (queries in forward and in the kernel of dQ, keys in the kernel of dK and dV) and walks the
sequence in steps of the other. Every entry is the largest that compiles without a spill on Triton 3.6 to 3.9, or says why
not; `python -m ztk.kernels.aot` shows registers and shared memory. What forces them: on Hopper a warp group owns 64 rows,
so 8 warps need 128 of them or compute twice; the accumulators of the held block take held * head_dim / threads registers.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from ztk.kernels._machine import MACHINES, Architecture
from ztk.kernels._spec import TARGETS, AotCase

LIMITS = (64, 128, 256)  # head dimensions up to which the columns of the tables reach


class Part(StrEnum):
    """A kernel, by what it writes."""

    forward = "forward"
    keys = "keys"  # dK, dV
    queries = "queries"  # dQ


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The block a program holds, the block it walks in steps of, warps and pipeline stages."""

    held: int
    step: int
    num_warps: int
    num_stages: int


# (held, step, warps, stages) for head dimensions up to 64, 128 and 256, 16-bit tensors
_TABLE = {
    Part.forward: {
        Architecture.ampere: ((128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 8, 2)),
        Architecture.hopper: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        Architecture.blackwell: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        Architecture.cdna: ((128, 64, 4, 2), (128, 64, 4, 1), (64, 32, 8, 2)),
    },
    Part.keys: {
        Architecture.ampere: ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
        Architecture.hopper: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        Architecture.blackwell: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        Architecture.cdna: ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    },
    Part.queries: {
        Architecture.ampere: ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
        Architecture.hopper: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 1)),
        Architecture.blackwell: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 1)),
        Architecture.cdna: ((128, 32, 8, 2), (64, 32, 4, 1), (64, 32, 4, 1)),
    },
}
# float32, whose products run without matrix instructions of full rate, on every machine; (held, step, warps)
_FLOAT32 = {
    Part.forward: ((32, 32, 4), (32, 32, 8), (32, 32, 8)),
    Part.keys: ((32, 32, 8), (32, 16, 8), (16, 16, 8)),
    Part.queries: ((32, 32, 4), (32, 32, 4), (16, 16, 8)),
}
# Registers of one thread on Hopper, at most: there the accumulators leave room for one program, and more would spill.
_MAX_REGISTERS = {
    Part.forward: (224, 240, 255),
    Part.keys: (255, 255, 255),  # Triton 3.6 takes up to 30 more than 3.9, and spills none
    Part.queries: (160, 232, 248),
}
# Shared memory on Hopper, at least: the tiles that the pipeline holds ahead.
_MIN_SHARED_BYTES = {
    Part.forward: (114688, 131072, 131072),
    Part.keys: (65536, 98304, 131072),
    Part.queries: (65536, 131072, 163840),
}


def tiles_for(part: Part, *, head_dim: int, itemsize: int, architecture: Architecture) -> Tiles:
    """The tiles of one kernel for heads of `head_dim` elements of `itemsize` bytes."""
    column = next(i for i, limit in enumerate(LIMITS) if head_dim <= limit)
    if itemsize == 4:
        held, step, num_warps = _FLOAT32[part][column]
        return Tiles(held=held, step=step, num_warps=num_warps, num_stages=1)
    held, step, num_warps, num_stages = _TABLE[part][architecture][column]
    return Tiles(held=held, step=step, num_warps=num_warps, num_stages=num_stages)


_SPILL = (
    "dK and dV of 64 keys and 256 dimensions take 128 registers of each of 256 threads; Triton 3.9 spills 34 words beside "
    "them, 3.6 none, and half as many keys would leave a warp group without rows"
)


def aot_cases(
    part: Part, *, kernel: object, head_dim: int, window: bool = False, varlen: bool = False
) -> tuple[AotCase, ...]:
    """One case per machine: bfloat16, causal, 8 query heads over 2 key heads."""
    shape = (8192, 8, head_dim) if varlen else (2, 4096, 8, head_dim)
    targets = ("sm_90", "gfx942") if window or varlen else TARGETS  # their tiles are those of the plain kernel
    inputs = ({} if varlen else {"group": 4}) | ({"window": 1024} if window else {})
    column = LIMITS.index(head_dim)
    cases = []
    for target in targets:
        chip = MACHINES[target]
        cdna = chip.architecture is Architecture.cdna
        spills = part is Part.keys and head_dim > 128 and target == "sm_90"
        case = AotCase(
            kernel=kernel,
            shape=shape,
            inputs=inputs,
            variant=f"{'window ' if window else ''}{'varlen' if varlen else ''}".strip(),
            targets=(target,),
            max_stack_bytes=160 if spills else 0,
            stack_reason=_SPILL if spills else "",
            vector_store_bytes=8 if cdna else 16,
            vector_reason="mfma leaves four neighbours to a lane" if cdna else "",
            matrix_instructions=True,
            max_registers=_MAX_REGISTERS[part][column],
            min_shared_bytes=_MIN_SHARED_BYTES[part][column],
        )
        cases.append(case)
    return tuple(cases)


def float32_aot_cases(kernel: object) -> tuple[AotCase, ...]:
    """The products of float32, which run without matrix instructions."""
    return tuple(
        AotCase(kernel=kernel, shape=(1, 2048, 8, head_dim), dtype=torch.float32, variant="fp32", targets=("sm_90",))
        for head_dim in (64, 128, 256)
    )
