"""`rms_norm` and `layer_norm`, with rows of all lengths."""

from tests.kernels.aot.case import TARGETS, AotCase


def norm(kernel: str, *, N: int, residual: bool = False, **options: object) -> AotCase:
    """8192 rows of N bfloat16 elements."""
    targets = ("sm_90",) if N in (5120, 8192) else TARGETS  # of one padded length, which the other targets share
    name = "residual" if kernel.startswith("_layer_norm") else "with_residual"
    inputs = {name: residual} if residual or name == "residual" else {}
    options = {"targets": targets, "inputs": inputs, "variant": "residual" if residual else ""} | options
    return AotCase(kernel=kernel, shape=(8192, N), **options)


def wide(op: str) -> tuple[AotCase, ...]:
    """Rows that are walked in pieces, with a residual."""
    name = "residual" if op == "layer_norm" else "with_residual"
    options = {"shape": (4096, 32768), "inputs": {name: True}, "variant": op}
    return (
        AotCase(kernel="_wide_norm_fwd", min_programs=3, **options),
        AotCase(
            kernel="_wide_norm_sums",
            min_programs=3,
            vector_store_bytes=0,
            vector_reason="stores two numbers per row",
            **options,
        ),
        AotCase(kernel="_wide_norm_bwd", resident=True, **options),
    )


CASES = {
    "rms_norm": (
        *(norm("_rms_norm_fwd", N=N, residual=N == 4096) for N in (1024, 4096, 5120, 8192, 16384)),
        *(norm("_rms_norm_bwd", N=N, residual=N in (4096, 5120), resident=True) for N in (4096, 5120, 8192)),
        norm("_rms_norm_bwd", N=1024, resident=True, targets=("sm_80", "sm_90", "gfx942")),
        norm(
            "_rms_norm_bwd",
            N=1024,
            resident=True,
            targets=("sm_100",),
            max_stack_bytes=8,
            stack_reason="two words a thread go through the first-level cache so that 80 registers let three programs run at once",
        ),
        norm("_rms_norm_bwd", N=16384, resident=True, targets=("sm_90",)),
        norm(
            "_rms_norm_bwd",
            N=16384,
            targets=("sm_80", "sm_100", "gfx942"),
            max_stack_bytes=16,
            stack_reason="sixteen columns of four operands in 64 registers: four words a thread go through the first-level cache",
        ),
        *wide("rms_norm"),
    ),
    "layer_norm": (
        *(norm("_layer_norm_fwd", N=N, residual=N == 4096) for N in (1024, 4096, 5120, 8192, 16384)),
        *(norm("_layer_norm_bwd", N=N, residual=N in (4096, 5120), resident=True) for N in (1024, 4096, 5120, 8192)),
        norm(
            "_layer_norm_bwd",
            N=16384,
            resident=True,
            max_stack_bytes=72,
            stack_reason="128 KiB of float32 partial sums fill half the register file; 12 to 18 words a thread spill to the "
            "first-level cache, where a second kernel for the sums would read 4 bytes per element more from memory",
        ),
        *wide("layer_norm"),
    ),
}
