"""Flat copy with a cast and an optional device scale: out = src * scale, in the dtype of out.

Reads and writes every byte once.
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.shared.cpu import PIECE, scaled_float32
from ztk.kernels.shared.math import cast
from ztk.kernels.shared.spec import OpSpec, compute_dtype

NUM_WARPS = 4


@jit
def _cast_copy(src_ptr, out_ptr, scale_ptr, N, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """out = src * scale"""
    i_n = tl.program_id(0).to(tl.int64)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_x = tl.load(src_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    if HAS_SCALE:
        b_x = b_x * tl.load(scale_ptr)
    tl.store(out_ptr + o_n, cast(b_x, out_ptr.dtype.element_ty), mask=m_n)


@kept
def _kernel_for(target: Machine, N: int, itemsize: int, has_scale: bool) -> Bound:
    """itemsize: bytes of an element of the wider dtype. One 16-byte access of it per thread; more would convert layouts through shared
    memory."""
    block = 16 // itemsize * target.warp_size * NUM_WARPS
    return bind(
        _cast_copy,
        N,
        grid=(cdiv(N, block),),
        HAS_SCALE=has_scale,
        BLOCK=block,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def _launch_cast_copy(src: Tensor, out: Tensor, scale: Tensor | None) -> None:
    N = src.numel()
    if N:
        itemsize = max(src.element_size(), out.element_size())
        kernel = _kernel_for(machine(src.device), N, itemsize, scale is not None)
        kernel.launch(src, out, src if scale is None else scale)


def copy_scaled(src: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """out = src * scale on CPU tensors, both flat."""
    if scale is None:
        out.copy_(src)
        return
    factor = scale.item()
    for start in range(0, src.numel(), PIECE):
        cut = slice(start, start + PIECE)
        out[cut].copy_(scaled_float32(src[cut], scale=factor))


_op = register(
    "cast_copy(Tensor src, Tensor(a!) out, Tensor? scale) -> ()",
    triton=_launch_cast_copy,
    cpu=copy_scaled,
    fake=lambda src, out, scale: None,
)


def cast_copy(src: Tensor, *, out: Tensor, scale: Tensor | None = None) -> None:
    """out = src, cast to the dtype of out; times the float32 device scalar `scale` [1] in float32 when given.

    src and out: flat, contiguous, equally long, on one device. Raises ValueError if they are not flat, contiguous or equally long.
    """
    if src.dim() != 1 or out.shape != src.shape or not (src.is_contiguous() and out.is_contiguous()):
        raise ValueError(
            f"cast_copy: src {tuple(src.shape)} and out {tuple(out.shape)} must be flat, contiguous, same length"
        )
    if use_reference():
        cast_copy_reference(src, out=out, scale=scale)
    else:
        _op(src, out, scale)


def cast_copy_reference(src: Tensor, *, out: Tensor, scale: Tensor | None = None) -> None:
    """The same copy in plain torch."""
    value = src.to(compute_dtype(src))
    out.copy_(value if scale is None else value * scale)


def _make_inputs(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: str,
    out_dtype: torch.dtype | None = None,
    scaled: bool = False,
) -> dict[str, object]:
    return {
        "src": torch.randn(shape, device=device).to(dtype),
        "out": torch.zeros(shape, dtype=out_dtype or dtype, device=device),
        "scale": torch.tensor([0.37], device=device) if scaled else None,
    }


SPEC = OpSpec(
    name="cast_copy",
    op=cast_copy,
    reference=cast_copy_reference,
    make_inputs=_make_inputs,
    mutated=("out",),
    small_shapes=((1,), (17,), (1025,), (0,)),
    bench_shapes=((1 << 28,),),
    variants=({}, {"out_dtype": torch.float32, "scaled": True}, {"out_dtype": torch.bfloat16}),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * itemsize,
    num_flops=lambda shape: 0,
)
