"""The kernels of a decoding step, attention excepted."""

import torch

from tests.kernels.aot.case import TARGETS, AotCase


def linear(
    kind: str, *, kernel: str = "_linear_rows", variant: str = "", targets: tuple[str, ...] = TARGETS, N: int = 4096,
    min_shared_bytes: int = 0, **options: object,
) -> AotCase:  # fmt: skip
    few = kernel == "_linear_few"
    return AotCase(
        kernel=kernel, shape=(1 if few else 64, 4096, N), variant=variant or kind, targets=targets, matrix_instructions=not few,
        min_shared_bytes=min_shared_bytes, inputs={"kind": kind, **options}, vector_store_bytes=0,
        vector_reason="a row of few outputs per program is written",
    )  # fmt: skip


def many(*, N: int, min_shared_bytes: int, variant: str = "") -> AotCase:
    return AotCase(
        kernel="_linear_many", shape=(8192, 4096, N), variant=variant, targets=("sm_90",), matrix_instructions=True, tensor_loads=True,
        min_shared_bytes=min_shared_bytes, vector_load_bytes=0, vector_reason="the copy engine loads",
    )  # fmt: skip


CASES = {
    "linear_rows": (
        linear("plain", min_shared_bytes=120 << 10),  # five stages: 32 KiB of weights on their way
        # Prompts: 128 x 256, two stages of 96 KiB and four of 48.
        many(N=4096, min_shared_bytes=192 << 10),
        many(N=14336, min_shared_bytes=192 << 10),
        *(linear(kind) for kind in ("int8", "fp8", "int4")),
        *(linear(kind, kernel="_linear_few", exact=False, targets=("sm_80", "sm_90")) for kind in ("plain", "int4")),
    ),
    "gated_rows": (
        linear("plain", variant="gate and up"),
        linear(
            "plain", variant="gate and up", targets=("sm_90", "sm_100"), N=14336, min_shared_bytes=96 << 10
        ),  # four stages
        # Prompts: 128 x 128, four stages of 32 KiB.
        many(N=14336, min_shared_bytes=128 << 10, variant="gate and up"),
        linear("int4", variant="gate and up, int4", targets=("sm_90",)),
    ),
    "cache_rows": (
        AotCase(
            kernel="_cache_rows",
            shape=(64, 32, 8, 128),
            max_barriers=0,
            vector_load_bytes=0,
            vector_store_bytes=0,
            vector_reason="a warp has one head: four elements a thread",
            min_programs=16,
        ),
    ),
    "draw_rows": (
        AotCase(
            kernel="_draw_tiles",
            shape=(64, 4096, 128256),
            matrix_instructions=True,
            vector_store_bytes=0,
            vector_reason="six numbers per row",
        ),
        AotCase(
            kernel="_merge_draws",
            shape=(64, 4096, 128256),
            vector_load_bytes=0,
            vector_store_bytes=0,
            vector_reason="six numbers per row and tile, a program per row",
        ),
    ),
    "select_rows": (
        AotCase(
            kernel="_select_rows",
            shape=(64, 128256),
            dtype=torch.float32,
            max_stack_bytes=8,
            stack_reason="two numbers of a row, on sm_80, for a fourth program on a processor",
            vector_store_bytes=0,
            vector_reason="three numbers per row",
        ),
    ),
}
