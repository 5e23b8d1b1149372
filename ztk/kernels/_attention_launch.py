"""How the three kernels of `attention` with matrix products are launched on each kind of machine, and compiled ahead of time.

A program holds one block (queries in forward and in the kernel of dQ, keys in the kernel of dK and dV) and walks the
sequence in steps of the other. Every entry is the largest that compiles without a spill on Triton 3.6 to 3.9, or says why
not; `python -m ztk.kernels.aot` shows registers and shared memory. What forces them: on Hopper a warp group owns 64 rows,
so 8 warps need 128 of them or compute twice; the accumulators of the held block take held * head_dim / threads registers.
"""

from dataclasses import dataclass
from enum import StrEnum

from ztk.kernels._machine import TARGET_OF, Machine
from ztk.kernels._spec import AotCase

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
        Machine.ampere: ((128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 8, 2)),
        Machine.hopper: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        Machine.blackwell: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
        Machine.cdna: ((128, 64, 4, 2), (128, 64, 4, 1), (64, 32, 8, 2)),
    },
    Part.keys: {
        Machine.ampere: ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
        Machine.hopper: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        Machine.blackwell: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        Machine.cdna: ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    },
    Part.queries: {
        Machine.ampere: ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
        Machine.hopper: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 1)),
        Machine.blackwell: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 1)),
        Machine.cdna: ((128, 32, 8, 2), (64, 32, 4, 1), (64, 32, 4, 1)),
    },
}
_FLOAT32 = Tiles(held=32, step=32, num_warps=4, num_stages=1)


def tiles_for(part: Part, *, head_dim: int, itemsize: int, machine: Machine) -> Tiles:
    """The tiles of one kernel; float32, whose products run without matrix instructions of full rate, takes small ones."""
    if itemsize == 4:
        return _FLOAT32
    column = next(i for i, limit in enumerate(LIMITS) if head_dim <= limit)
    held, step, num_warps, num_stages = _TABLE[part][machine][column]
    return Tiles(held=held, step=step, num_warps=num_warps, num_stages=num_stages)


_TYPES = {
    "lse_ptr": "*fp32", "delta_ptr": "*fp32", "cu_seqlens_ptr": "*i32", "q_stride": "i64", "k_stride": "i64",
    "v_stride": "i64", "num_tokens": "i64", "T": "i32", "window": "i32", "scale": "fp32",
}  # fmt: skip
_SPILL = (
    "dK and dV of 64 keys and 256 dimensions take 128 registers of each of 256 threads; Triton 3.9 spills 34 words beside "
    "them, 3.6 none, and half as many keys would leave a warp group without rows"
)


def aot_cases(part: Part, kernel, *, head_dim: int, window: bool = False, varlen: bool = False) -> tuple[AotCase, ...]:
    """One case per machine: bfloat16, causal, 32 query heads over 8 key heads."""
    return tuple(_aot_case(part, kernel, head_dim, window, varlen, kind) for kind in Machine)


def _aot_case(part: Part, kernel, head_dim: int, window: bool, varlen: bool, kind: Machine) -> AotCase:
    tiles = tiles_for(part, head_dim=head_dim, itemsize=2, machine=kind)
    held, step = ("BLOCK_N", "BLOCK_M") if part is Part.keys else ("BLOCK_M", "BLOCK_N")
    constexprs = {"H": 32, "GROUP": 4, "D": head_dim, "BLOCK_D": head_dim, "CAUSAL": True, "HAS_WINDOW": window}
    constexprs |= {held: tiles.held, step: tiles.step} | ({} if varlen else {"cu_seqlens_ptr": None})
    names = [name for name in kernel.arg_names if name not in constexprs]
    spills = part is Part.keys and head_dim > 128 and kind is Machine.hopper
    on_cdna = kind is Machine.cdna
    return AotCase(
        kernel=kernel,
        variant=f"D={head_dim}{',window' if window else ''}{',varlen' if varlen else ''}",
        signature={name: _TYPES.get(name, "*bf16") for name in names},
        constexprs=constexprs,
        divisible_by_16=tuple(name for name in names if name.endswith(("_ptr", "_stride"))),
        targets=(TARGET_OF[kind],),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=512 if on_cdna else 255,
        max_stack_bytes=160 if spills else 0,
        stack_reason=_SPILL if spills else "",
        vector_store_bytes=8 if on_cdna else 16,
        vector_reason="mfma leaves four neighbours to a lane" if on_cdna else "",
        matrix_instructions=True,
    )
