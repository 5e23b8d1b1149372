"""Linear layers of inference: few rows times stored weights, with the following operations in the same kernel.

    linear_rows    out[m] = act(x[m] W^T + bias) + residual[m]
    gated_rows     out[m] = act(x[m] G^T + bias) * (x[m] U^T + bias2)
    with slots of experts (`moe_routing`): slot s reads row order[s] // k and the weights of its expert

Weights are plain, int8, fp8 or int4 (`shared.weight_formats`) and are read once for up to 64 rows: N K bytes of their format. Many rows
of a plain weight have tiles of 128 on Hopper, which the copy engine loads (`launch.descriptors`). The sum over inputs runs in one order that
depends on the weight's shape, and rows are padded to the 64 of one matrix instruction, so a row's bits do not depend on the number of rows
(`exact`). Without `exact` up to eight rows are multiplied without matrix instructions, in another order.
FLOPs: 2 M N K, twice that for a pair.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.descriptors import ALIGNMENT, Layout, can_describe
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.ops.moe_combine import random_routing
from ztk.kernels.shared.activation import ACTIVATIONS, activate, activate_cpu
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.product_tiles import (
    ROWS,
    LaunchConfig,
    described_product,
    few_product,
    product_tile,
    times_rows,
)
from ztk.kernels.shared.spec import OpSpec, compute_dtype
from ztk.kernels.shared.weight_formats import BLOCK, format_of, quantise_weight, widen

FEW = 8  # rows of the form without matrix instructions, at most
FEW_COLUMNS = 256  # inputs of a step of that form
BAND = 16  # neighbouring tiles of many rows: programs that run at the same time read as many rows as weights, which the cache holds


@triton.jit
def _with_bias(b_acc, bias_ptr, o_n, m_n):
    """acc + bias, over the last dimension"""
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    return b_acc


@jit(do_not_specialize=["M"])
def _linear_rows(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, weight2_ptr, scales2_ptr, bias2_ptr, residual_ptr, out_ptr, order_ptr, offsets_ptr,
    M, N, K, stride_e, stride_s, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = act(x W^T + bias) (* (x W2^T + bias2)) (+ residual) for one tile of outputs, of 64 rows or of one expert's slots"""
    wait_for_kernels(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    i_m = tl.program_id(1).to(tl.int64)
    o_n = (i_n * BLOCK_N).to(tl.int32) + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    first = (i_m * BLOCK_M).to(tl.int32)
    last = tl.minimum(first + BLOCK_M, M)
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + i_m)
        last = tl.load(offsets_ptr + i_m + 1)
        weight_ptr += i_m * stride_e
        if scales_ptr is not None:
            scales_ptr += i_m * stride_s
        if weight2_ptr is not None:
            weight2_ptr += i_m * stride_e
            if scales2_ptr is not None:
                scales2_ptr += i_m * stride_s
    for row in range(first, last, BLOCK_M):
        o_m = row + tl.arange(0, BLOCK_M)
        m_m = o_m < last
        b_row = o_m
        if order_ptr is not None:
            b_row = tl.load(order_ptr + o_m, mask=m_m, other=0) // TOP_K
        o_x = b_row.to(tl.int64) * K
        b_out = product_tile(x_ptr, weight_ptr, scales_ptr, o_x, m_m, o_n, m_n, N, K, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K)
        b_out = activate(_with_bias(b_out, bias_ptr, o_n, m_n), ACTIVATION)
        if weight2_ptr is not None:
            b_up = product_tile(
                x_ptr, weight2_ptr, scales2_ptr, o_x, m_m, o_n, m_n, N, K, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K
            )
            b_out *= _with_bias(b_up, bias2_ptr, o_n, m_n)
        o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
        m_out = m_m[:, None] & m_n[None, :]
        if residual_ptr is not None:
            b_out += tl.load(residual_ptr + o_out, mask=m_out, other=0.0).to(tl.float32)
        tl.store(out_ptr + o_out, cast(b_out, out_ptr.dtype.element_ty), mask=m_out)


@jit(do_not_specialize=["M"])
def _linear_many(
    x, weight, bias_ptr, weight2, bias2_ptr, residual_ptr, out_ptr, M, N, K, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = act(x W^T + bias) (* (x W2^T + bias2)) (+ residual) for one tile; x and the weights: descriptors of plain elements"""
    wait_for_kernels(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    i_m = tl.program_id(1).to(tl.int64)
    i_m, i_n = tl.swizzle2d(i_m, i_n, tl.num_programs(1), tl.num_programs(0), BAND)
    first_m, first_n = (i_m * BLOCK_M).to(tl.int32), (i_n * BLOCK_N).to(tl.int32)
    o_n = first_n + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_out = described_product(x, weight, first_m, first_n, K, BLOCK_M, BLOCK_N, BLOCK_K)
    b_out = activate(_with_bias(b_out, bias_ptr, o_n, m_n), ACTIVATION)
    if weight2 is not None:
        b_up = described_product(x, weight2, first_m, first_n, K, BLOCK_M, BLOCK_N, BLOCK_K)
        b_out *= _with_bias(b_up, bias2_ptr, o_n, m_n)
    o_m = first_m + tl.arange(0, BLOCK_M)
    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = (o_m < M)[:, None] & m_n[None, :]
    if residual_ptr is not None:
        b_out += tl.load(residual_ptr + o_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + o_out, cast(b_out, out_ptr.dtype.element_ty), mask=m_out)


@jit(do_not_specialize=["M"])
def _linear_few(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, weight2_ptr, scales2_ptr, bias2_ptr, residual_ptr, out_ptr, M, N, K,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = act(x W^T + bias) (* (x W2^T + bias2)) (+ residual) for all of up to eight rows, without matrix instructions"""
    wait_for_kernels(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_n = (i_n * BLOCK_N).to(tl.int32) + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < M
    b_out = few_product(x_ptr, weight_ptr, scales_ptr, o_m, m_m, o_n, m_n, N, K, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K)
    b_out = activate(_with_bias(b_out, bias_ptr, o_n, m_n), ACTIVATION)
    if weight2_ptr is not None:
        b_up = few_product(x_ptr, weight2_ptr, scales2_ptr, o_m, m_m, o_n, m_n, N, K, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K)
        b_out *= _with_bias(b_up, bias2_ptr, o_n, m_n)
    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = m_m[:, None] & m_n[None, :]
    if residual_ptr is not None:
        b_out += tl.load(residual_ptr + o_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + o_out, cast(b_out, out_ptr.dtype.element_ty), mask=m_out)


@kept
def _few_for(
    target: Machine, M: int, N: int, K: int, dtype: torch.dtype, kind: str, activation: str, wide: bool
) -> tuple[Bound, Memory]:
    """Returns the kernel and the memory of its result. dtype: dtype of x."""
    block_m = next_power_of_2(M)
    block_n = 32 // block_m
    bound = bind(
        _linear_few, M, N, K, grid=(cdiv(N, block_n),), FORMAT=kind, ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=BLOCK // 2 if kind == "int4" else FEW_COLUMNS, num_warps=4, enable_fp_fusion=True, **dependent_launch(target),
    )  # fmt: skip
    return bound, memory_of(M, N, dtype=torch.float32 if wide else dtype)


@kept
def _rows_for(
    target: Machine, M: int, N: int, K: int, dtype: torch.dtype, kind: str, activation: str, wide: bool, groups: int, stride_e: int,
    stride_s: int, top_k: int,
) -> tuple[Bound, Memory]:  # fmt: skip
    """The same. groups: experts; 0: one product."""
    # Stages of one tile of rows for any M, so that a step with more rows finds its program compiled.
    config = LaunchConfig.for_weight(N, itemsize=dtype.itemsize, target=target, groups=groups or 1)
    groups = groups or cdiv(M, ROWS)
    bound = bind(
        _linear_rows, M, N, K, stride_e, stride_s, grid=(cdiv(N, config.block_n), groups), FORMAT=kind,
        ACTIVATION=activation, TOP_K=top_k, BLOCK_M=ROWS, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True, **dependent_launch(target),
    )  # fmt: skip
    return bound, memory_of(M, N, dtype=torch.float32 if wide else dtype)


@kept
def _many_for(
    target: Machine, M: int, N: int, K: int, dtype: torch.dtype, activation: str, wide: bool, products: int
) -> tuple[Bound, Memory] | None:
    """The same, or None if `_rows_for` has the better tiles. products: 2 with a second weight."""
    config = LaunchConfig.for_many(M, N, target=target, products=products)
    if config is None or dtype.itemsize != 2 or not can_describe((M, K), strides=(K, 1), dtype=dtype):
        return None
    weight = Layout(shape=(N, K), strides=(K, 1), block=(config.block_n, config.block_k), dtype=dtype)
    layouts = {0: replace(weight, shape=(M, K), block=(config.block_m, config.block_k)), 1: weight, 3: weight}
    bound = bind(
        _linear_many, M, N, K, grid=(cdiv(N, config.block_n), cdiv(M, config.block_m)), layouts=layouts, ACTIVATION=activation,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BAND=BAND, num_warps=config.num_warps,
        num_stages=config.num_stages, enable_fp_fusion=True, **dependent_launch(target),
    )  # fmt: skip
    return bound, memory_of(M, N, dtype=torch.float32 if wide else dtype)


def _many(
    x: Tensor, weight: Tensor, scales: Tensor | None, weight2: Tensor | None, activation: str, wide: bool
) -> tuple[Bound, Memory] | None:
    """The launch of many rows, or None if it is not for these tensors."""
    described = (x, weight) if weight2 is None else (x, weight, weight2)
    if scales is not None or any(part.data_ptr() % ALIGNMENT or not part.is_contiguous() for part in described):
        return None
    (M, K), N = x.shape, weight.shape[0]
    return _many_for(machine(x.device), M, N, K, x.dtype, activation, wide, len(described) - 1)


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, weight2: Tensor | None, scales2: Tensor | None,
    bias2: Tensor | None, residual: Tensor | None, offsets: Tensor | None, order: Tensor | None, top_k: int, activation: str,
    exact: bool, wide: bool,
) -> Tensor:  # fmt: skip
    M, K = x.shape
    M = M if order is None else order.numel()
    sizes = machine(x.device), M, weight.shape[-2], K, x.dtype, format_of(weight, scales), activation, wide
    places, many = (order, offsets), None
    if offsets is not None:
        strides = weight.stride(0), 0 if scales is None else scales.stride(0)
        product, result = _rows_for(*sizes, offsets.numel() - 1, *strides, top_k)
    elif not exact and M <= FEW:
        product, result = _few_for(*sizes)
        places = ()
    elif M > ROWS and (many := _many(x, weight, scales, weight2, activation, wide)):
        product, result = many
    else:
        product, result = _rows_for(*sizes, 0, 0, 0, top_k)
    out = maker(x)(*result)
    if many:
        product.launch(x, weight, bias, weight2, bias2, residual, out)
    elif out.numel():
        product.launch(x, weight, scales, bias, weight2, scales2, bias2, residual, out, *places)
    return out


def _fake(x, weight, scales, bias, weight2, scales2, bias2, residual, offsets, order, top_k, activation, exact, wide):
    rows = x.shape[0] if order is None else order.numel()
    return x.new_empty((rows, weight.shape[-2]), dtype=torch.float32 if wide else x.dtype)


def _given(*parts: Tensor | None) -> list[Tensor]:
    return [part for part in parts if part is not None]


def _cpu(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, weight2: Tensor | None, scales2: Tensor | None,
    bias2: Tensor | None, residual: Tensor | None, offsets: Tensor | None, order: Tensor | None, top_k: int, activation: str,
    exact: bool, wide: bool,
) -> Tensor:  # fmt: skip
    weights, all_scales, biases = _given(weight, weight2), _given(scales, scales2), _given(bias, bias2)
    rows = (x if order is None else x.index_select(0, order // top_k)).float()
    K, products = x.shape[1], []
    for number, full in enumerate(weights):
        scale = all_scales[number] if all_scales else None
        if offsets is None:
            product = times_rows(rows, widen(full, scales=scale, columns=K))
        else:
            product = rows.new_empty(rows.shape[0], full.shape[-2])
            borders = offsets.tolist()
            for e, (first, last) in enumerate(zip(borders, borders[1:], strict=False)):
                if last > first:
                    own = widen(full[e], scales=None if scale is None else scale[e], columns=K)
                    product[first:last] = times_rows(rows[first:last], own)
        products.append(product.add_(biases[number].float()) if biases else product)
    out = activate_cpu(products[0], activation=activation)
    if len(products) == 2:
        out = out.mul_(products[1]) if out is not products[0] else out * products[1]
    if residual is not None:
        out = out + residual.float()
    return out if wide else out.to(x.dtype)


_product = register(
    "linear_rows(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, Tensor? weight2, Tensor? scales2, Tensor? bias2, "
    "Tensor? residual, Tensor? offsets, Tensor? order, int top_k, str activation, bool exact, bool wide) -> Tensor",
    triton=_launch,
    cpu=_cpu,
    fake=_fake,
)


def linear_rows(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str = "none",
    offsets: Tensor | None = None,
    order: Tensor | None = None,
    top_k: int = 1,
    exact: bool = True,
    wide: bool = False,
) -> Tensor:
    """act(x W^T + bias) + residual; no gradient.

    x: [M, K]; weight [N, K] of one of the formats of `shared.weight_formats` with its scales; bias [N]; residual [M, N] of x's dtype. Returns
    [M, N] in x's dtype, rounded once, or float32 if `wide`. activation: none, silu, relu, gelu or gelu_tanh. With `offsets`, int32
    [E + 1] of slots, the weight and its scales have a first dimension of E experts, and x is [S, K] by slot, or [T, K] with the `order`
    [S] of a `Routing` of top_k choices; returns [S, N] by slot. exact: a row has the same bits for every M.
    Raises ValueError for shapes, dtypes and activations that do not fit.
    """
    where = {"offsets": offsets, "order": order, "top_k": top_k, "exact": exact, "wide": wide}
    return _call(x, [weight], scales=[scales], biases=[bias], residual=residual, activation=activation, **where)


def gated_rows(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scales: Tensor | None = None,
    up_scales: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    offsets: Tensor | None = None,
    order: Tensor | None = None,
    top_k: int = 1,
    exact: bool = True,
) -> Tensor:
    """act(x G^T + gate_bias) * (x U^T + up_bias), rounded once; no gradient.

    gate and up: [N, K] of one format; returns [M, N] in x's dtype; the rest as in `linear_rows`. Raises ValueError as it does, and for
    weights that differ in kind.
    """
    where = {"offsets": offsets, "order": order, "top_k": top_k, "exact": exact, "wide": False}
    return _call(
        x,
        [gate, up],
        scales=[gate_scales, up_scales],
        biases=[gate_bias, up_bias],
        residual=None,
        activation=activation,
        **where,
    )


def _call(
    x: Tensor, weights: list[Tensor], *, scales, biases, residual, activation, offsets, order, top_k, exact, wide
):
    kinds = {(format_of(weight, scale), weight.shape) for weight, scale in zip(weights, scales, strict=True)}
    if len(kinds) > 1 or len({part is None for part in biases}) > 1:
        raise ValueError(
            f"gated_rows: gate and up must be of one shape and format, and both have a bias or none: {kinds}"
        )
    kind, shape = kinds.pop()
    columns = shape[-1] * 2 if kind == "int4" else shape[-1]
    fits = -(-x.shape[-1] // BLOCK) * BLOCK == columns if kind == "int4" else x.shape[-1] == columns
    if x.dim() != 2 or len(shape) != (2 if offsets is None else 3) or not fits:
        raise ValueError(
            f"linear_rows: x {tuple(x.shape)} does not fit a weight of {tuple(shape)} in the format {kind}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"linear_rows: activation={activation} is none of {', '.join(ACTIVATIONS)}")
    if kind == "plain" and weights[0].dtype != x.dtype:
        raise ValueError(f"linear_rows: x is {x.dtype} and its weight {weights[0].dtype}; they must be the same")
    if offsets is not None and biases[0] is not None:
        raise ValueError("linear_rows: experts have no bias")
    where = (residual, offsets, order, top_k, activation, exact, wide)
    if use_reference():
        return _reference(x, weights, _given(*scales), _given(*biases), *where)
    second = (None, None, None) if len(weights) == 1 else (weights[1], scales[1], biases[1])
    return _product(x.contiguous(), weights[0], scales[0], biases[0], *second, *where)


def _reference(x, weights, scales, biases, residual, offsets, order, top_k, activation, exact, wide) -> Tensor:
    """In float32, rounded once."""
    dtype = compute_dtype(x)
    rows = (x if order is None else x.index_select(0, order // top_k)).to(dtype)
    products = []
    for number, weight in enumerate(weights):
        full = widen(weight, scales=scales[number] if scales else None, columns=x.shape[1]).to(dtype)
        if offsets is None:
            product = rows @ full.T
        else:
            parts = rows.split(offsets.diff().tolist())
            product = torch.cat([part @ own.T for part, own in zip(parts, full, strict=True)])
        products.append(product + biases[number].to(dtype) if biases else product)
    out = activate_cpu(products[0], activation=activation)
    out = out * products[1] if len(products) == 2 else out
    out = out if residual is None else out + residual.to(dtype)
    return out.to(torch.float32 if wide and x.dtype != torch.float64 else x.dtype)


def linear_rows_reference(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    *, activation: str = "none", offsets: Tensor | None = None, order: Tensor | None = None, top_k: int = 1, exact: bool = True,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    """The same in plain torch, float32 inside."""
    found, biases = ([] if part is None else [part] for part in (scales, bias))
    return _reference(x, [weight], found, biases, residual, offsets, order, top_k, activation, exact, wide)


def gated_rows_reference(
    x: Tensor, gate: Tensor, up: Tensor, gate_scales: Tensor | None = None, up_scales: Tensor | None = None,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None, *, activation: str = "silu", offsets: Tensor | None = None,
    order: Tensor | None = None, top_k: int = 1, exact: bool = True,
) -> Tensor:  # fmt: skip
    """The same in plain torch, float32 inside."""
    pairs = ((gate_scales, up_scales), (gate_bias, up_bias))
    scales, biases = ([] if first is None else [first, second] for first, second in pairs)
    return _reference(x, [gate, up], scales, biases, None, offsets, order, top_k, activation, exact, False)


def _eager(x: Tensor, weight: Tensor, scales=None, bias=None, residual=None, **where) -> Tensor:
    return _eager_of(x, [weight], scales=[scales], biases=[bias], residual=residual, **where)


def _eager_gated(
    x: Tensor, gate: Tensor, up: Tensor, gate_scales=None, up_scales=None, gate_bias=None, up_bias=None, **where
) -> Tensor:
    given = {"scales": [gate_scales, up_scales], "biases": [gate_bias, up_bias]}
    return _eager_of(x, [gate, up], residual=None, **given, **where)


def _eager_of(
    x,
    weights,
    *,
    scales,
    biases,
    residual,
    activation="none",
    offsets=None,
    order=None,
    top_k=1,
    exact=True,
    wide=False,
):
    rows, products = x if order is None else x.index_select(0, order // top_k), []
    for weight, scale, bias in zip(weights, scales, biases, strict=True):
        full = widen(weight, scales=scale, columns=x.shape[1]).to(x.dtype)
        if offsets is None:
            products.append(F.linear(rows, full, bias))
        else:
            parts = zip(rows.split(offsets.diff().tolist()), full, strict=True)
            products.append(torch.cat([part @ own.T for part, own in parts]))
    out = activate_cpu(products[0], activation=activation)
    out = out * products[1] if len(products) == 2 else out
    out = out if residual is None else out + residual
    return out.float() if wide else out


def _make_inputs(
    shape, *, dtype, device, kind="plain", experts=0, with_bias=False, with_residual=False, pair=False, **options
) -> dict[str, object]:
    M, K, N = shape
    names, inputs = (
        ("gate", "up") if pair else ("weight",),
        {"x": torch.randn(M, K, device=device).to(dtype), **options},
    )
    for name in names:
        weight = torch.randn(*([experts] if experts else []), N, K, device=device) * K**-0.5
        stored, scales = quantise_weight(weight, kind=kind)
        inputs[name] = stored.to(dtype) if kind == "plain" else stored
        inputs[f"{name}_scales" if pair else "scales"] = scales
        if with_bias:
            inputs[f"{name}_bias" if pair else "bias"] = torch.randn(N, device=device).to(dtype)
    if with_residual:
        inputs["residual"] = torch.randn(M, N, device=device).to(dtype)
    if experts:
        routing = random_routing(M, E=experts, k=2, device=device)
        inputs |= {"offsets": routing["offsets"], "order": routing["order"], "top_k": 2}
    return inputs


def _make_gated_inputs(shape, *, dtype, device, **options) -> dict[str, object]:
    return _make_inputs(shape, dtype=dtype, device=device, pair=True, **options)


SPEC = OpSpec(
    name="linear_rows",
    op=linear_rows,
    reference=linear_rows_reference,
    eager=_eager,
    make_inputs=_make_inputs,
    small_shapes=((1, 64, 16), (5, 260, 40), (66, 130, 33)),
    interpreted_dtypes=(torch.float32, torch.bfloat16),
    bench_shapes=((1, 4096, 4096), (64, 4096, 4096), (64, 4096, 128256), (8192, 4096, 4096), (8192, 14336, 4096)),
    variants=(
        {},
        {"kind": "int8", "with_bias": True, "with_residual": True, "activation": "gelu"},
        {"kind": "fp8", "wide": True, "activation": "relu"},
        {"kind": "int4", "with_residual": True},
        {"kind": "int4", "exact": False, "with_bias": True},
        {"kind": "fp8", "experts": 3},
    ),
    num_bytes=lambda shape, itemsize: (shape[2] * shape[1] + shape[0] * (shape[1] + shape[2])) * itemsize,
    num_flops=lambda shape: 2 * shape[0] * shape[1] * shape[2],
    tolerance_ulps=3.0,
)
GATED_SPEC = replace(
    SPEC,
    name="gated_rows",
    op=gated_rows,
    reference=gated_rows_reference,
    eager=_eager_gated,
    make_inputs=_make_gated_inputs,
    tolerance_ulps=6.0,  # the errors of two sums
    bench_shapes=((1, 4096, 14336), (64, 4096, 14336), (8192, 4096, 14336)),
    variants=(
        {},
        {"kind": "int4", "experts": 3},
        {"kind": "int8", "exact": False, "with_bias": True, "activation": "gelu_tanh"},
    ),
    num_bytes=lambda shape, itemsize: (2 * shape[2] * shape[1] + shape[0] * (shape[1] + shape[2])) * itemsize,
    num_flops=lambda shape: 4 * shape[0] * shape[1] * shape[2],
)
