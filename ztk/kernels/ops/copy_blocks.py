"""Copies of blocks of a cache inside it: store[target] = store[source] for many pairs in one launch.

A block is contiguous for all layers, so a copy is a row. No target is another pair's source or target. Bytes: 2 per byte of a block.
"""

import torch
import triton.language as tl
from torch import Tensor

from ztk.kernels.launch.dependent import dependent_launch, wait_for_kernels
from ztk.kernels.launch.grids import cdiv
from ztk.kernels.launch.jit import Bound, bind, jit, kept
from ztk.kernels.launch.library import register, use_reference
from ztk.kernels.launch.machine import Machine, machine
from ztk.kernels.shared.spec import OpSpec

NUM_WARPS = 4
PER_THREAD = 16  # bytes: one access


@jit
def _copy_blocks(store_ptr, pairs_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """store[pairs[p, 1], n] = store[pairs[p, 0], n]"""
    wait_for_kernels(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    i_p = tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + 2 * i_p)
    target = tl.load(pairs_ptr + 2 * i_p + 1)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    tl.store(store_ptr + target * N + o_n, tl.load(store_ptr + source * N + o_n, mask=m_n), mask=m_n)


@kept
def _kernel_for(target: Machine, N: int, itemsize: int, pairs: int) -> Bound:
    block = PER_THREAD // itemsize * target.warp_size * NUM_WARPS
    return bind(
        _copy_blocks, N, grid=(cdiv(N, block), pairs), BLOCK=block, num_warps=NUM_WARPS, enable_fp_fusion=True,
        **dependent_launch(target),
    )  # fmt: skip


def _launch(store: Tensor, pairs: Tensor) -> None:
    (blocks, N), count = store.shape, pairs.shape[0]
    if count and blocks and N:
        _kernel_for(machine(store.device), N, store.element_size(), count).launch(store, pairs)


def _cpu(store: Tensor, pairs: Tensor) -> None:
    store[pairs[:, 1]] = store[pairs[:, 0]]


_copy = register(
    "copy_blocks(Tensor(a!) store, Tensor pairs) -> ()", triton=_launch, cpu=_cpu, fake=lambda store, pairs: None
)


def copy_blocks(store: Tensor, pairs: Tensor) -> None:
    """store[target] = store[source] for each (source, target) of `pairs`, in place.

    store: [blocks, n] of any dtype, contiguous; pairs: int64 [P, 2], where no target is in another pair.
    Raises ValueError for other shapes and dtypes.
    """
    if store.dim() != 2 or not store.is_contiguous() or pairs.shape[1:] != (2,) or pairs.dtype != torch.int64:
        raise ValueError(
            f"copy_blocks: store {tuple(store.shape)} must be contiguous [blocks, n], and pairs {tuple(pairs.shape)} {pairs.dtype} int64 [P, 2]"
        )
    (copy_blocks_reference if use_reference() else _copy)(store, pairs)


def copy_blocks_reference(store: Tensor, pairs: Tensor) -> None:
    """The same, one pair at a time."""
    for source, target in pairs.tolist():
        store[target] = store[source]


def _make_inputs(shape, *, dtype, device) -> dict[str, object]:
    blocks, n, count = shape
    places = torch.randperm(blocks)[: 2 * count]
    return {"store": torch.randn(blocks, n, device=device).to(dtype), "pairs": places.view(count, 2).to(device)}


SPEC = OpSpec(
    name="copy_blocks",
    op=copy_blocks,
    reference=copy_blocks_reference,
    make_inputs=_make_inputs,
    mutated=("store",),
    small_shapes=((2, 17, 1), (9, 1300, 4)),
    bench_shapes=((512, 4194304, 64),),
    num_bytes=lambda shape, itemsize: 2 * shape[2] * shape[1] * itemsize,
    num_flops=lambda shape: 0,
)
