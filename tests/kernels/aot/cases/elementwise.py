"""Copies, activations, rotary embedding and quantisation."""

import math

import torch

from tests.kernels.aot.case import AotCase


def cast_copy(variant: str, **options: object) -> AotCase:
    n = 1 << 22
    budget = {"min_programs": 12, "max_barriers": 0, "elements": n, "max_instructions_per_element": 10}
    return AotCase(kernel="_cast_copy", shape=(n,), variant=variant, **budget, **options)


def gated(kernel: str, instructions: float, *, min_programs: int) -> AotCase:
    """bfloat16 tensors of a padded length."""
    shape = (1024, 4096)
    return AotCase(
        kernel=kernel, shape=shape, min_programs=min_programs, max_barriers=0, elements=math.prod(shape),
        max_instructions_per_element=instructions,
    )  # fmt: skip


def rope(*, interleaved: bool) -> AotCase:
    shape = (1, 1024, 32, 128)
    return AotCase(
        kernel="_rope", shape=shape, inputs={"interleaved": interleaved}, where={"INVERSE": False},
        variant="interleaved" if interleaved else "half-split", min_programs=8, max_barriers=None if interleaved else 0,
        elements=math.prod(shape), max_instructions_per_element=40,
    )  # fmt: skip


def quantised(kernel: str, *, min_programs: int, max_barriers: int | None = 0) -> tuple[AotCase, ...]:
    return tuple(
        AotCase(
            kernel=kernel, shape=(8, 1 << 20), inputs={"bits": bits, "group": 256}, variant=f"int{bits}",
            min_programs=min_programs, max_barriers=max_barriers,
        )
        for bits in (8, 4)
    )  # fmt: skip


def float8(kernel: str, *, min_programs: int, instructions: float, variant: str = "", **inputs: object) -> AotCase:
    """float8 products begin with sm_89, so these are the targets that have their conversions."""
    shape = (8192, 4096)
    return AotCase(
        kernel=kernel, shape=shape, inputs=inputs, variant=variant, targets=("sm_90", "sm_100"), min_programs=min_programs,
        elements=math.prod(shape), max_instructions_per_element=instructions, vector_store_bytes=0 if "largest" in kernel else 16,
        vector_reason="a number per row and column by an atomic" if "largest" in kernel else "",
    )  # fmt: skip


CASES = {
    "cast_copy": (
        cast_copy("bf16 to bf16"),
        cast_copy(
            "bf16 to fp32",
            inputs={"out_dtype": torch.float32, "scaled": True},
            vector_load_bytes=8,
            vector_reason="four 16-bit values next to 16 bytes of float32; eight would change layout through shared memory",
        ),
    ),
    "copy_blocks": (AotCase(kernel="_copy_blocks", shape=(64, 65536, 8), min_programs=12, max_barriers=0),),
    "swiglu": (gated("_swiglu_fwd", 24, min_programs=12), gated("_swiglu_bwd", 32, min_programs=8)),
    "geglu": (gated("_geglu_fwd", 28, min_programs=12), gated("_geglu_bwd", 40, min_programs=8)),
    "rope": (rope(interleaved=False), rope(interleaved=True)),
    "quantize": quantised("_quantize_fwd", min_programs=8, max_barriers=None),
    "dequantize": quantised("_dequantize_fwd", min_programs=12),
    "dequantize_reduce": quantised("_dequantize_reduce_fwd", min_programs=8),
    "float8_largest": (
        float8("_float8_largest", min_programs=5, instructions=9, variant="x"),
        float8("_float8_largest", min_programs=5, instructions=12, variant="d_out", factor=True),
    ),
    "float8_codes": (
        float8("_float8_codes", min_programs=8, instructions=7, variant="rows of x", columns=False),
        float8("_float8_codes", min_programs=4, instructions=15, variant="d_out", factor=True),
        float8("_float8_codes", min_programs=9, instructions=9, variant="columns of x", rows=False),
        float8("_float8_codes", min_programs=9, instructions=10, variant="weight, turned", columns=False, turned=True),
    ),
    "segment_scan": (
        AotCase(
            kernel="_segment_scan",
            shape=(64, 8192),
            dtype=torch.float32,
            min_programs=4,
            vector_load_bytes=4,
            vector_store_bytes=4,
            vector_reason="a segment starts at any token",
        ),
    ),
}
