"""Routing of tokens to experts, their products and the sum of their results."""

from tests.kernels.aot.case import AotCase
from ztk.kernels.launch.machine import MACHINES, Architecture

# Three stages of 128 x 64 and 64 x 128 tiles of 16 bits; CDNA's two stages take half as much.
PIPELINE_BYTES = 3 * 2 * 128 * 64 * 2
# Rows of the weights that are no multiples of 16 bytes.
WITHOUT_DESCRIPTORS = {
    "shape": (4096, 128, 2048, 764), "tensor_loads": False, "min_shared_bytes": 0, "max_stack_bytes": 160,
    "stack_reason": "an address per element or two of the weight", "vector_load_bytes": 4, "vector_store_bytes": 2,
    "vector_reason": "rows are no multiples of 16 bytes",
}  # fmt: skip


def products(*, pair: bool) -> tuple[AotCase, ...]:
    """The product, and the gradients of its x and its weight; of a pair, the gradient that both weights have in common."""
    found = []
    for target, chip in MACHINES.items():
        cdna, described = chip.architecture is Architecture.cdna, chip.architecture is Architecture.hopper
        options = {
            "shape": (4096, 128, 2048, 768), "targets": (target,), "matrix_instructions": True,
            "min_shared_bytes": PIPELINE_BYTES, "vector_store_bytes": 8 if cdna else 16,
            "vector_reason": "mfma leaves four neighbours to a lane" if cdna else "",
        }  # fmt: skip
        forward = options | {"kernel": "_grouped_fwd", "resident": True, "tensor_loads": described}
        if pair:
            launched = [{"variant": "d_out @ w^T, twice", "where": {"order_ptr": None}}]
        else:
            launched = [
                {"variant": "x @ w", "where": {"TOP_K": 2}},
                {"variant": "d_out @ w^T", "where": {"TOP_K": 1}},
            ]
        found += [AotCase(**forward, **launch, min_programs=2) for launch in launched]
        if not pair:  # gathered: the last stage is in registers
            weight = options | {"kernel": "_grouped_bwd_weight", "min_shared_bytes": PIPELINE_BYTES * 2 // 3}
            found.append(AotCase(**weight, variant="x^T @ d_out", min_programs=2))
        if described:
            found += [AotCase(**(forward | WITHOUT_DESCRIPTORS), **launch) for launch in launched]
    return tuple(found)


def route(kernel: str, **budget: object) -> AotCase:
    return AotCase(kernel=kernel, shape=(32768, 128), inputs={"top_k": 8}, variant="k=8", **budget)


CASES = {
    "moe_route": (
        route("_moe_choose", vector_store_bytes=0, vector_reason="stores K of the E scores that it reads per token"),
        route("_moe_scan", min_programs=4),
        route(
            "_moe_place", vector_load_bytes=0, vector_store_bytes=0,
            vector_reason="reads K choices and scatters K slots per token: words, not rows",
        ),
        route(
            "_moe_route_bwd", vector_load_bytes=0,
            vector_reason="reads K weights and choices per token; the row that it writes is wide",
        ),
    ),
    "moe_combine": (
        AotCase(kernel="_combine_fwd", shape=(4096, 8, 2048), min_programs=8),
        AotCase(kernel="_combine_bwd", shape=(4096, 8, 2048), min_programs=4),
        AotCase(kernel="_combine_bwd", shape=(4096, 8, 7168), min_programs=2),
    ),
    "grouped_matmul": products(pair=False),
    "grouped_matmul_pair": products(pair=True),
}  # fmt: skip
