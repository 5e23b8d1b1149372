"""The ops, one per file, with their Triton kernels, CPU implementation, torch reference and `SPEC`."""

from ztk.kernels.ops import (
    adamw,
    adamw_8bit,
    adamw_bf16,
    adamw_stochastic,
    attention,
    cache_rows,
    cast_copy,
    copy_blocks,
    cross_entropy,
    draw_rows,
    float8,
    geglu,
    grouped_gemm,
    layer_norm,
    linear_cross_entropy,
    linear_logprob,
    linear_rows,
    lion,
    moe_combine,
    moe_routing,
    paged_attention,
    quantize,
    rms_norm,
    rope,
    router_losses,
    segment_scan,
    select_rows,
    sgd,
    sharded_cross_entropy,
    step_control,
    sum_of_squares,
    swiglu,
    symmetric_product,
)
from ztk.kernels.shared.spec import OpSpec

# In the order of the kernels' page.
_MODULES = (
    step_control, sum_of_squares, adamw, sgd, lion, cast_copy, swiglu, geglu, rms_norm, rope, cross_entropy,
    quantize, layer_norm, adamw_bf16, adamw_8bit, adamw_stochastic, attention, moe_routing, grouped_gemm,
    linear_cross_entropy, moe_combine, segment_scan, linear_logprob, linear_rows, cache_rows, paged_attention,
    copy_blocks, sharded_cross_entropy, router_losses, draw_rows, select_rows,
    float8, symmetric_product,
)  # fmt: skip
ALL_OPS: tuple[OpSpec, ...] = tuple(
    spec for module in _MODULES for spec in vars(module).values() if isinstance(spec, OpSpec)
)
