"""`attention`, forward and backward, and `paged_attention`."""

import torch

from tests.kernels.aot.case import TARGETS, AotCase
from ztk.kernels.launch.machine import MACHINES, Architecture
from ztk.kernels.shared.attention_tiles import LIMITS

KERNELS = ("_attention_fwd", "_attention_bwd_keys", "_attention_bwd_queries")
# Registers of one thread on Hopper, at most, by head dimension: the accumulators leave room for one program, and more would spill.
MAX_REGISTERS = {
    "_attention_fwd": (224, 240, 255),
    "_attention_bwd_keys": (255, 255, 255),  # Triton 3.6 takes up to 30 more than 3.9, and spills none
    "_attention_bwd_queries": (160, 232, 248),
}
# Shared memory on Hopper, at least: the tiles that the pipeline loads ahead.
MIN_SHARED_BYTES = {
    "_attention_fwd": (114688, 131072, 131072),
    "_attention_bwd_keys": (65536, 98304, 131072),
    "_attention_bwd_queries": (65536, 131072, 163840),
}
SPILL = (
    "dK and dV of 64 keys and 256 dimensions take 128 registers of each of 256 threads; Triton 3.9 spills 34 more words, "
    "3.6 none, and half as many keys would leave a warp group without rows"
)


def cases(kernel: str, *, head_dim: int, window: bool = False, varlen: bool = False) -> tuple[AotCase, ...]:
    """One per machine: bfloat16, causal, 8 query heads over 2 key heads."""
    column = LIMITS.index(head_dim)
    found = []
    for target in ("sm_90", "gfx942") if window or varlen else TARGETS:  # the plain kernel has the same tiles
        cdna = MACHINES[target].architecture is Architecture.cdna
        spills = kernel == "_attention_bwd_keys" and head_dim > 128 and target == "sm_90"
        case = AotCase(
            kernel=kernel,
            shape=(8192, 8, head_dim) if varlen else (2, 4096, 8, head_dim),
            inputs=({} if varlen else {"group": 4}) | ({"window": 1024} if window else {}),
            variant=f"{'window ' if window else ''}{'varlen' if varlen else ''}".strip(),
            targets=(target,),
            max_stack_bytes=160 if spills else 0,
            stack_reason=SPILL if spills else "",
            vector_store_bytes=8 if cdna else 16,
            vector_reason="mfma leaves four neighbours to a lane" if cdna else "",
            matrix_instructions=True,
            max_registers=MAX_REGISTERS[kernel][column],
            min_shared_bytes=MIN_SHARED_BYTES[kernel][column],
        )
        found.append(case)
    return tuple(found)


def all_cases(kernel: str) -> tuple[AotCase, ...]:
    """Every head dimension, a window, and float32, whose products run without matrix instructions."""
    return (
        *(case for dim in LIMITS for case in cases(kernel, head_dim=dim)),
        *cases(kernel, head_dim=128, window=True),
        *(
            AotCase(kernel=kernel, shape=(1, 2048, 8, dim), dtype=torch.float32, variant="fp32", targets=("sm_90",))
            for dim in LIMITS
        ),
    )


DELTA = AotCase(
    kernel="_attention_delta",
    shape=(2, 4096, 8, 128),
    min_programs=8,
    vector_store_bytes=0,
    vector_reason="writes one number per row of 128 that it reads",
)


def paged(
    variant: str,
    *,
    kernel: str = "_paged_attention",
    min_programs: int = 1,
    min_shared_bytes: int = 0,
    **inputs: object,
) -> AotCase:
    return AotCase(
        kernel=kernel, shape=(8, 2048, 32, 8, 128), variant=variant, inputs=inputs, min_programs=min_programs,
        min_shared_bytes=min_shared_bytes, vector_load_bytes=0, vector_store_bytes=0,
        vector_reason="rows that count are chosen one by one", matrix_instructions=kernel == "_paged_attention",
    )  # fmt: skip


CASES = {
    "attention": (*all_cases(KERNELS[0]), DELTA, *(case for kernel in KERNELS[1:] for case in all_cases(kernel))),
    "attention_varlen": tuple(case for kernel in KERNELS for case in cases(kernel, head_dim=128, varlen=True)),
    "paged_attention": (
        paged("decode", min_programs=2, min_shared_bytes=112 << 10, split=True),  # three stages
        paged("prompt", rows=128),
        paged("prompt, fp8 cache", rows=128, fp8=True, scaled=True),
        paged("", kernel="_merge_segments", split=True),
    ),
}
