"""Top-k routing of tokens to experts, with counts, offsets and both permutations on the device.

    p = softmax(logits),   experts = indices of the k largest,   weights = p[experts]   (divided by their sum if normalised)

An assignment is a pair (token, choice). `order` lists assignments sorted by expert and, within an expert, by token: slot s
holds assignment order[s] = token * k + choice; `position` is its inverse. Grouped products gather by `order` and combine by
`position`, so tokens are never copied, padded or scattered with atomics, and the same input gives the same slots.

Three kernels: choose and count per block of tokens; scan the counts, a few experts per program; place. Counts are never read by the host.
Backward of the weights, with g_j = d_weights_j: normalised, d_logits[e_j] = w_j * (g_j - sum_i w_i g_i) and 0 elsewhere;
otherwise d_logits = p * (g at the chosen - sum_i w_i g_i).

Shazeer et al., https://arxiv.org/abs/1701.06538
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.grids import cdiv, next_power_of_2
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import needs_reference, register
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.launch.memory import Memory, maker, memory_of
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

MAX_EXPERTS = 1024
TILE = 4096  # scores per program
SCAN_ROWS, SCAN_EXPERTS = 128, 8  # of the table of counts per step: a row is a sector of memory


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The order of T tokens with k choices each, sorted by expert."""

    counts: Tensor  # int32 [E], assignments per expert
    offsets: Tensor  # int32 [E + 1], first slot of each expert; the last is T * k unless choices were dropped
    order: Tensor  # int32 [T * k], slot -> token * k + choice
    position: Tensor  # int32 [T, k], (token, choice) -> slot, or -1


@dataclass(frozen=True, kw_only=True)
class Routing(Slots):
    """Where T tokens go, k choices each, among E experts."""

    weights: Tensor  # float32 [T, k], differentiable
    experts: Tensor  # int32 [T, k], best first


@jit(do_not_specialize=["T"])
def _moe_choose(
    logits_ptr, weights_ptr, experts_ptr, partial_ptr, T, E,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """weights and experts of a block of tokens, and how often the block chose each expert"""
    wait_for_kernels(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    o_t = i_b * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    o_k = tl.arange(0, BLOCK_K)
    m_t = o_t < T
    m_te = m_t[:, None] & (o_e < E)[None, :]
    b_logits = tl.load(logits_ptr + o_t[:, None] * E + o_e[None, :], mask=m_te, other=float("-inf")).to(tl.float32)
    # Real experts never tie with padding or with one already taken, for any logits: both are -inf, these are not.
    b_rest = tl.where((o_e < E)[None, :], tl.maximum(b_logits, -3e38), float("-inf"))
    b_rest = tl.where((b_logits == b_logits) | ((o_e >= E)[None, :]), b_rest, -3e38)
    b_bad = tl.sum(tl.where(b_logits == b_logits, 0, 1), axis=1)
    b_top = tl.max(b_rest, axis=1)
    b_exp = tl.exp(b_rest - b_top[:, None])
    b_value = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    b_expert = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    b_chosen = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.int32)
    for k in tl.static_range(K):
        b_best = tl.max(b_rest, axis=1)
        b_index = tl.min(tl.where(b_rest == b_best[:, None], o_e[None, :], BLOCK_E), axis=1)  # the first of equals
        b_hit = o_e[None, :] == b_index[:, None]
        b_value = tl.where(o_k[None, :] == k, tl.exp(b_best - b_top)[:, None], b_value)
        b_expert = tl.where(o_k[None, :] == k, b_index[:, None], b_expert)
        b_chosen = tl.where(b_hit, 1, b_chosen)
        b_rest = tl.where(b_hit, float("-inf"), b_rest)
    if NORMALISE:
        b_sum = tl.sum(b_value, axis=1)
    else:
        b_sum = tl.sum(b_exp, axis=1)
    b_weight = tl.where(b_bad[:, None] > 0, float("nan"), b_value / b_sum[:, None])  # an overflow must stay visible
    o_tk = o_t[:, None] * K + o_k[None, :]
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    tl.store(weights_ptr + o_tk, b_weight, mask=m_tk)
    tl.store(experts_ptr + o_tk, b_expert, mask=m_tk)
    b_count = tl.sum(tl.where(m_t[:, None], b_chosen, 0), axis=0)
    tl.store(partial_ptr + i_b * E + o_e, b_count, mask=o_e < E)


@jit(do_not_specialize=["num_blocks"])
def _moe_scan(
    partial_ptr, before_ptr, counts_ptr, num_blocks, E, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """counts of a few experts, and for each block of tokens how many of the tokens before it chose the expert"""
    wait_for_kernels(PDL)
    o_e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    o_b = tl.arange(0, BLOCK_B)
    m_e = o_e < E
    b_count = tl.zeros([BLOCK_E], dtype=tl.int32)
    for i_b in range(0, num_blocks, BLOCK_B):
        m_be = (i_b + o_b < num_blocks)[:, None] & m_e[None, :]
        o_be = (i_b + o_b)[:, None] * E + o_e[None, :]
        b_partial = tl.load(partial_ptr + o_be, mask=m_be, other=0)
        tl.store(before_ptr + o_be, b_count[None, :] + tl.cumsum(b_partial, axis=0) - b_partial, mask=m_be)
        b_count += tl.sum(b_partial, axis=0)
    tl.store(counts_ptr + o_e, b_count, mask=m_e)


@jit(do_not_specialize=["T"])
def _moe_place(
    experts_ptr, before_ptr, counts_ptr, offsets_ptr, order_ptr, position_ptr, T, E,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """slots of a block of tokens: the expert's offset, the tokens before the block, and the token's rank inside it"""
    wait_for_kernels(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    o_t = i_b * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    m_t = o_t < T
    m_e = o_e < E
    b_count = tl.load(counts_ptr + o_e, mask=m_e, other=0)
    b_end = tl.cumsum(b_count, axis=0)
    if i_b == 0:
        tl.store(offsets_ptr + o_e + 1, b_end, mask=m_e)
        tl.store(offsets_ptr + o_e, tl.zeros([BLOCK_E], dtype=tl.int32), mask=o_e == 0)
    b_chosen = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.int32)
    for k in tl.static_range(K):
        b_expert = tl.load(experts_ptr + o_t * K + k, mask=m_t, other=-1)
        b_chosen += tl.where(o_e[None, :] == b_expert[:, None], 1, 0)
    b_base = b_end - b_count + tl.load(before_ptr + i_b * E + o_e, mask=m_e, other=0)
    b_slot = b_base[None, :] + tl.cumsum(b_chosen, axis=0) - b_chosen
    for k in tl.static_range(K):
        b_expert = tl.load(experts_ptr + o_t * K + k, mask=m_t, other=-1)
        b_position = tl.sum(tl.where(o_e[None, :] == b_expert[:, None], b_slot, 0), axis=1)
        tl.store(position_ptr + o_t * K + k, b_position, mask=m_t)
        tl.store(order_ptr + b_position, (o_t * K + k).to(tl.int32), mask=m_t)


@jit
def _moe_route_bwd(
    d_weights_ptr, weights_ptr, experts_ptr, logits_ptr, d_logits_ptr, T, E,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """d_logits of a block of tokens from d_weights"""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    m_t = o_t < T
    o_te = o_t[:, None] * E + o_e[None, :]
    m_te = m_t[:, None] & (o_e < E)[None, :]
    b_mean = tl.zeros([BLOCK_T], dtype=tl.float32)
    for k in tl.static_range(K):
        b_weight = tl.load(weights_ptr + o_t * K + k, mask=m_t, other=0.0)
        b_mean += b_weight * tl.load(d_weights_ptr + o_t * K + k, mask=m_t, other=0.0)
    b_d = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    if not NORMALISE:
        b_logits = tl.load(logits_ptr + o_te, mask=m_te, other=float("-inf")).to(tl.float32)
        b_logits = tl.where(m_t[:, None], b_logits, 0.0)
        b_exp = tl.exp(b_logits - tl.max(b_logits, axis=1)[:, None])
        b_d -= b_exp / tl.sum(b_exp, axis=1)[:, None] * b_mean[:, None]
        b_mean = tl.zeros([BLOCK_T], dtype=tl.float32)
    for k in tl.static_range(K):
        b_expert = tl.load(experts_ptr + o_t * K + k, mask=m_t, other=-1)
        b_weight = tl.load(weights_ptr + o_t * K + k, mask=m_t, other=0.0)
        b_term = b_weight * (tl.load(d_weights_ptr + o_t * K + k, mask=m_t, other=0.0) - b_mean)
        b_d += tl.where(o_e[None, :] == b_expert[:, None], b_term[:, None], 0.0)
    tl.store(d_logits_ptr + o_te, cast(b_d, d_logits_ptr.dtype.element_ty), mask=m_te)


def _blocks(E: int) -> tuple[int, int]:
    """(tokens, padded experts) per program."""
    block_e = max(16, next_power_of_2(E))
    return min(128, max(4, TILE // block_e)), block_e


def _empty(logits: Tensor, top_k: int) -> tuple[Tensor, ...]:
    """weights, experts, counts, offsets, order, position: uninitialised."""
    T, E = logits.shape
    int32 = {"dtype": torch.int32, "device": logits.device}
    return (
        torch.empty(T, top_k, dtype=torch.float32, device=logits.device),
        torch.empty(T, top_k, **int32),
        torch.empty(E, **int32),
        torch.empty(E + 1, **int32),
        torch.empty(T * top_k, **int32),
        torch.empty(T, top_k, **int32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kernels:
    """The kernels of a route, and the memory of `_empty`'s six tensors and of the counts between the kernels."""

    choose: Bound
    scan: Bound
    place: Bound
    outputs: tuple[Memory, ...]
    counts: Memory


@kept
def _route_for(target: Machine, T: int, E: int, top_k: int, normalise: bool) -> _Kernels:
    block_t, block_e = _blocks(E)
    num_blocks = cdiv(T, block_t)
    sizes = {"K": top_k, "BLOCK_T": block_t, "BLOCK_E": block_e}
    options = {"num_warps": 4, "enable_fp_fusion": True, **dependent_launch(target)}
    choose = {"BLOCK_K": next_power_of_2(top_k), "NORMALISE": normalise}
    scan = {"BLOCK_B": SCAN_ROWS, "BLOCK_E": SCAN_EXPERTS}
    integers = (T, top_k), (E,), (E + 1,), (T * top_k,), (T, top_k)
    return _Kernels(
        choose=bind(_moe_choose, T, E, grid=(num_blocks,), **sizes, **choose, **options),
        scan=bind(_moe_scan, num_blocks, E, grid=(cdiv(E, SCAN_EXPERTS),), **scan, **options),
        place=bind(_moe_place, T, E, grid=(num_blocks,), **sizes, **options),
        outputs=(
            memory_of(T, top_k, dtype=torch.float32),
            *(memory_of(*shape, dtype=torch.int32) for shape in integers),
        ),
        counts=memory_of(num_blocks, E, dtype=torch.int32),
    )


def _launch_fwd(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, ...]:
    T, E = logits.shape
    route, make = _route_for(machine(logits.device), T, E, top_k, normalise), maker(logits)
    weights, experts, counts, offsets, order, position = [make(*memory) for memory in route.outputs]
    if T:
        partial, before = make(*route.counts), make(*route.counts)
        route.choose.launch(logits, weights, experts, partial)
        route.scan.launch(partial, before, counts)
        route.place.launch(experts, before, counts, offsets, order, position)
    else:
        counts.zero_()
        offsets.zero_()
    return weights, experts, counts, offsets, order, position


@kept
def _backward_for(T: int, E: int, dtype: torch.dtype, top_k: int, normalise: bool) -> tuple[Bound, Memory]:
    """Returns the kernel and the memory of the logits' gradient. dtype: dtype of the logits."""
    block_t, block_e = _blocks(E)
    bound = bind(
        _moe_route_bwd, T, E, grid=(cdiv(T, block_t),), K=top_k, BLOCK_T=block_t, BLOCK_E=block_e, NORMALISE=normalise, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return bound, memory_of(T, E, dtype=dtype)


def _launch_bwd(d_weights: Tensor, weights: Tensor, experts: Tensor, logits: Tensor, normalise: bool) -> Tensor:
    T, E = logits.shape
    backward, like_logits = _backward_for(T, E, logits.dtype, weights.shape[1], normalise)
    d_logits = maker(logits)(*like_logits)
    if T:
        backward.launch(d_weights, weights, experts, logits, d_logits)
    return d_logits


def _weights(logits: Tensor, *, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """(weights, experts int64) in plain torch; equal logits are taken in index order."""
    logits = logits.to(compute_dtype(logits))
    best, experts = logits.sort(dim=1, descending=True, stable=True)
    experts = experts[:, :top_k]
    weights = best[:, :top_k].softmax(dim=1) if normalise else logits.softmax(dim=1).gather(1, experts)
    return weights, experts


def _slots(experts: Tensor, *, num_experts: int) -> tuple[Tensor, ...]:
    """counts, offsets, order, position of chosen experts [T, k]; -1 chooses none and comes last."""
    flat = experts.flatten().long()
    flat = torch.where(flat < 0, num_experts, flat)
    order = flat.sort(stable=True).indices
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    slots = torch.arange(order.numel(), device=order.device)
    position = torch.empty_like(order).scatter_(0, order, slots)
    position = torch.where(flat == num_experts, -1, position)
    return counts.int(), offsets.int(), order.int(), position.view(experts.shape).int()


def _cpu_fwd(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, ...]:
    weights, experts = _weights(logits, top_k=top_k, normalise=normalise)
    return weights.float(), experts.int(), *_slots(experts, num_experts=logits.shape[1])


def _cpu_bwd(d_weights: Tensor, weights: Tensor, experts: Tensor, logits: Tensor, normalise: bool) -> Tensor:
    mean = (weights * d_weights).sum(dim=1, keepdim=True)
    if normalise:
        d_logits = torch.zeros(logits.shape).scatter_(1, experts.long(), weights * (d_weights - mean))
    else:
        d_logits = (logits.float().softmax(dim=1) * -mean).scatter_add_(1, experts.long(), weights * d_weights)
    return d_logits.to(logits.dtype)


_forward = register(
    "moe_route(Tensor logits, int top_k, bool normalise) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    triton=_launch_fwd,
    cpu=_cpu_fwd,
    fake=lambda logits, top_k, normalise: _empty(logits, top_k),
)
_backward = register(
    "moe_route_backward(Tensor d_weights, Tensor weights, Tensor experts, Tensor logits, bool normalise) -> Tensor",
    triton=_launch_bwd,
    cpu=_cpu_bwd,
    fake=lambda d_weights, weights, experts, logits, normalise: torch.empty_like(logits),
)


class _Route(OnceFunction):
    @staticmethod
    def forward(ctx, logits, top_k, normalise):
        weights, experts, *slots = _forward(logits, top_k, normalise)
        ctx.save_for_backward(weights, experts, logits)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts, *slots)
        return weights, experts, *slots

    @staticmethod
    def backward(ctx, d_weights, *_):
        return _backward(d_weights.contiguous(), *ctx.saved_tensors, ctx.normalise), None, None


def moe_route(logits: Tensor, *, top_k: int, normalise: bool = True) -> Routing:
    """Choose `top_k` of the E experts for each token from `logits` [T, E] (float32, float16 or bfloat16).

    Ties go to the lower index. With `normalise` the weights of a token sum to one. Everything stays on the device; the
    gradient flows to logits through the weights. E is at most 1024 and top_k at most E; ValueError otherwise.
    """
    if logits.dim() != 2 or not 0 < top_k <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"moe_route: logits {tuple(logits.shape)} must be [T, E] with top_k={top_k} <= E <= {MAX_EXPERTS}"
        )
    if needs_reference():
        return moe_route_reference(logits, top_k=top_k, normalise=normalise)
    weights, experts, counts, offsets, order, position = _Route.apply(logits.contiguous(), top_k, normalise)
    return Routing(weights=weights, experts=experts, counts=counts, offsets=offsets, order=order, position=position)


def moe_slots(experts: Tensor, *, num_experts: int) -> Slots:
    """Slots for choices made elsewhere: `experts` int [T, k] in [0, num_experts), or -1 for a choice that was dropped.

    For capacities (drop late choices by position - offsets[expert], by weight or at random, and lay out the rest) and
    for tokens that arrived from other ranks (k = 1). Dropped choices have position -1, and their entries of `order` follow the
    last slot, offsets[num_experts]. Runs on the device, with a stable sort; no gradient.
    Raises ValueError for other shapes and dtypes.
    """
    if experts.dim() != 2 or experts.is_floating_point():
        raise ValueError(f"moe_slots: experts {tuple(experts.shape)} {experts.dtype} must be integers [T, k]")
    counts, offsets, order, position = _slots(experts, num_experts=num_experts)
    return Slots(counts=counts, offsets=offsets, order=order, position=position)


def moe_route_reference(logits: Tensor, *, top_k: int, normalise: bool = True) -> Routing:
    """The same with a stable sort, softmax and bincount."""
    weights, experts = _weights(logits, top_k=top_k, normalise=normalise)
    counts, offsets, order, position = _slots(experts, num_experts=logits.shape[1])
    return Routing(
        weights=weights, experts=experts.int(), counts=counts, offsets=offsets, order=order, position=position
    )


def _compared(route):
    """The routing as a tuple of float tensors, the integers exact in them."""

    def run(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, ...]:
        r = route(logits, top_k=top_k, normalise=normalise)
        return r.weights, *(x.to(torch.float64) for x in (r.experts, r.counts, r.offsets, r.order, r.position))

    return run


def _make_inputs(shape, *, dtype, device, top_k=2, normalise=True) -> dict[str, object]:
    return {
        "logits": torch.randn(shape, device=device).to(dtype),
        "top_k": min(top_k, shape[1]),
        "normalise": normalise,
    }


SPEC = OpSpec(
    name="moe_route",
    op=_compared(moe_route),
    reference=_compared(moe_route_reference),
    make_inputs=_make_inputs,
    differentiable=("logits",),
    small_shapes=((1, 3), (37, 5), (300, 17)),
    bench_shapes=((32768, 128),),
    variants=({}, {"top_k": 1, "normalise": False}, {"top_k": 4, "normalise": False}),
    num_bytes=lambda shape, itemsize: shape[0] * (shape[1] * itemsize + 2 * 16),  # logits in; four words per choice out
    num_flops=lambda shape: 5 * shape[0] * shape[1],
)  # fmt: skip
