"""Losses of logits and of routers. The losses over the head's weight have the kernels of `cross_entropy`."""

import torch

from tests.kernels.aot.case import AotCase


def rows(kernel: str, *, V: int, variant: str = "", **options: object) -> AotCase:
    """4096 rows of V logits."""
    return AotCase(kernel=kernel, shape=(4096, V), variant=variant, **options)


def router(kernel: str, **options: object) -> AotCase:
    return AotCase(kernel=kernel, shape=(32768, 128), dtype=torch.float32, **options)


CASES = {
    "cross_entropy": (
        rows(
            "_cross_entropy_fwd", V=131072, variant="in place", inputs={"inplace": True}, loop_bytes=2, max_loop_instructions=15,
        ),
        rows(
            "_cross_entropy_fwd", V=131072, variant="in place, smoothing", inputs={"inplace": True, "label_smoothing": 0.1},
            loop_bytes=2, max_loop_instructions=17.5,  # Triton 3.9: 16.2, 3.6: 17.4
        ),
        rows(
            "_cross_entropy_fwd", V=32768, variant="out of place", min_programs=2, loop_bytes=2, max_loop_instructions=8,
            vector_store_bytes=0, vector_reason="stores two numbers per row",
        ),
        rows("_cross_entropy_bwd", V=131072, max_barriers=1),
        rows("_scale_rows", V=131072, inputs={"inplace": True}, max_barriers=0),
    ),
    "sharded_cross_entropy": (
        rows(
            "_sharded_statistics", V=32768, min_programs=2, loop_bytes=2, max_loop_instructions=9, vector_store_bytes=0,
            vector_reason="stores three numbers per row",
        ),
        rows(
            "_sharded_join", V=32768, vector_load_bytes=0, vector_store_bytes=0,
            vector_reason="two numbers per row and rank in one program: latency, not bandwidth",
        ),
        rows("_sharded_backward", V=32768, max_barriers=0),
    ),
    "router_losses": (
        router("_router_statistics", min_programs=4, vector_store_bytes=0, vector_reason="stores two numbers per token"),
        router(
            "_router_means", vector_load_bytes=0, vector_store_bytes=0,
            vector_reason="two numbers per token in one program: latency, not bandwidth",
        ),
        router("_router_losses_bwd", min_programs=4),
    ),
    "linear_cross_entropy": (),
    "linear_logprob": (),
}  # fmt: skip
