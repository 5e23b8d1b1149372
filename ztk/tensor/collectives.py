"""Differentiable collectives along the tensor-parallel axis.

The forward of each is the backward of another: Megatron's f and g (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), and their
sequence-parallel forms (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). "Own part" is this rank's part.

                forward                     backward
    copy_in     identity                    all-reduce
    sum_out     all-reduce                  identity
    gather_in   all-gather along dim 1      reduce-scatter along dim 1
    scatter_out reduce-scatter along dim 1  all-gather along dim 1
    split_last  own part of the last dim    all-gather along the last dim
    gather_last all-gather along the last   own part of the last dim

Results have the dtype of x.
"""

import torch
from torch import Tensor

from ztk.runtime import Comm
from ztk.runtime.differentiable import through


def summed(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """The sum of `x` over the ranks: x's shape and dtype, the same bits on every rank. `x` is not changed.

    The result is no view, as models that add to it in place need.
    """
    numel = -(-x.numel() // comm.size) * comm.size
    if numel == x.numel():
        out = x.detach().clone(memory_format=torch.contiguous_format)
        comm.all_reduce(out.view(-1), label=label, in_shard_order=False).wait()
        return out
    flat = x.new_zeros(numel)
    flat[: x.numel()].copy_(x.detach().reshape(-1))
    comm.all_reduce(flat, label=label, in_shard_order=False).wait()
    return flat[: x.numel()].view(x.shape).clone()


def gathered(x: Tensor, *, comm: Comm, label: str, dim: int = 1) -> Tensor:
    """x [.., n, ..] of every rank -> [.., n * ranks, ..], concatenated along `dim` in rank order."""
    parts = x.new_empty(comm.size, *x.shape)
    parts[comm.rank].copy_(x.detach())
    comm.all_gather(parts.view(-1), label=label).wait()
    return torch.cat(list(parts), dim=dim)


def scattered(x: Tensor, *, comm: Comm, label: str, dim: int = 1) -> Tensor:
    """x [.., n, ..] -> [.., n / ranks, ..]: this rank's part along `dim` of the sum over the ranks."""
    parts = torch.stack(x.detach().chunk(comm.size, dim=dim))
    out = torch.empty_like(parts[0])
    comm.reduce_scatter(parts.view(-1), out=out.view(-1), label=label).wait()
    return out


def gathered_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """x [.., sizes[rank]] of every rank -> [.., sum(sizes)]."""
    padded = torch.nn.functional.pad(x.detach(), (0, max(sizes) - x.shape[-1]))
    parts = padded.new_empty(comm.size, *padded.shape)
    parts[comm.rank].copy_(padded)
    comm.all_gather(parts.view(-1), label=label).wait()
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


def copy_in(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """The input of column-parallel layers: x, of any shape, in the same memory; the gradient is summed over the ranks."""
    return through(
        x,
        forward=lambda x: x.detach(),  # a view of x would keep x itself, and `TensorAxis` would never forget either
        backward=lambda d_out: summed(d_out, comm=comm, label=f"gradient of {label}"),
    )


def sum_out(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """Partial results of row-parallel layers -> their sum over the ranks, in x's shape."""
    return through(x, forward=lambda x: summed(x, comm=comm, label=label), backward=lambda d_out: d_out)


def gather_in(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """[B, T / n, ...] of every rank -> [B, T, ...]."""
    return through(
        x,
        forward=lambda x: gathered(x, comm=comm, label=label),
        backward=lambda d_out: scattered(d_out, comm=comm, label=f"gradient of {label}"),
    )


def scatter_out(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """Partial results [B, T, ...] -> this rank's part of their sum [B, T / n, ...]."""
    return through(
        x,
        forward=lambda x: scattered(x, comm=comm, label=label),
        backward=lambda d_out: gathered(d_out, comm=comm, label=f"gradient of {label}"),
    )


def split_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """x [.., sum(sizes)], equal on all ranks -> this rank's [.., sizes[rank]]."""
    return through(
        x,
        forward=lambda x: x.split(sizes, dim=-1)[comm.rank],
        backward=lambda d_out: gathered_last(d_out, comm=comm, sizes=sizes, label=f"gradient of {label}"),
    )


def gather_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """x [.., sizes[rank]] of every rank -> [.., sum(sizes)]. All ranks must compute the same from the result."""
    return through(
        x,
        forward=lambda x: gathered_last(x, comm=comm, sizes=sizes, label=label),
        backward=lambda d_out: d_out.split(sizes, dim=-1)[comm.rank],
    )
