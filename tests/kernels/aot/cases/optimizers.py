"""The optimizers and the control of a step."""

import torch

from tests.kernels.aot.case import AotCase

ELEMENTS = 1 << 22


def flat(kernel: str, instructions: float, *, min_programs: int = 12, **budget: object) -> AotCase:
    """One elementwise launch: no barriers, and registers for twelve programs of 128 threads per processor, unless `budget` differs."""
    options = {"shape": (ELEMENTS,), "elements": ELEMENTS, "max_barriers": 0} | budget
    return AotCase(kernel=kernel, min_programs=min_programs, max_instructions_per_element=instructions, **options)


def with_segments(kernel: str, instructions: float, **budget: object) -> tuple[AotCase, AotCase]:
    """One group, and three segments with hyperparameters of their own."""
    segments = flat(kernel, instructions, inputs={"segments": True}, variant="three segments", **budget)
    return flat(kernel, instructions, **budget), segments


def symmetric(shape: tuple[int, int], *, variant: str, described: bool = True, **options: object) -> AotCase:
    targets = ("sm_90",) if described else ("sm_80", "sm_100", "gfx942")
    return AotCase(
        kernel="_symmetric_product", shape=shape, variant=variant, targets=targets, matrix_instructions=True, tensor_loads=described,
        vector_load_bytes=0 if described else 16, vector_reason="the copy engine loads" if described else "", **options,
    )  # fmt: skip


CASES = {
    "symmetric_product": (
        # Four stages of 32 KiB; of 16 KiB with tiles of 64, of which a processor has three.
        symmetric((4096, 14336), variant="x x^T", min_shared_bytes=128 << 10),
        symmetric((4096, 4096), variant="polynomial", inputs={"polynomial": True}, min_shared_bytes=128 << 10),
        symmetric((2048, 8192), variant="x x^T, tiles of 64", min_shared_bytes=64 << 10, min_programs=3),
        symmetric((4096, 4096), variant="x x^T by pointers", described=False),
    ),
    "step_control": (
        AotCase(
            kernel="_step_control",
            shape=(2,),
            max_registers=96,
            max_barriers=0,
            vector_load_bytes=0,
            vector_store_bytes=0,
            vector_reason="a row of scalars: latency, not bandwidth",
        ),
    ),
    "sum_of_squares": (
        AotCase(
            kernel="_partial_sums",
            shape=(1 << 26,),
            min_programs=2,
            loop_bytes=2,
            max_loop_instructions=9,  # two loops are counted, 4 and 5; the second runs only where a sum overflows float32
            vector_store_bytes=0,
            vector_reason="stores one number per program",
        ),
        AotCase(
            kernel="_total",
            shape=(1 << 26,),
            min_programs=12,
            vector_load_bytes=0,
            vector_store_bytes=0,
            vector_reason="512 numbers, one program",
        ),
    ),
    "adamw": (
        *with_segments("_adamw", 64),
        flat("_adamw", 64, dtype=torch.float32, inputs={"with_out": False}, variant="fp32 grad"),
    ),
    "adamw_bf16": with_segments("_adamw_bf16", 80),
    "adamw_stochastic": (
        *with_segments("_adamw_stochastic", 72, min_programs=8),
        flat(
            "_adamw_stochastic",
            80,
            dtype=torch.float32,
            variant="fp32 grad",
            vector_store_bytes=8,
            vector_reason="four 16-bit values next to 16 bytes of float32 gradient",
        ),
    ),
    # The scales of a group go through shared memory: two maxima over 32 elements of four threads.
    "adamw_8bit": with_segments("_adamw_8bit", 104, min_programs=6, max_barriers=None),
    "sgd": with_segments("_sgd", 40),
    "lion": with_segments("_lion", 40),
}
