"""Collectives that gradients flow through, along the tensor axis.

The forward of each is the backward of another (Megatron's f and g, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; with the
sequence cut between blocks, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198):

    copy_in     identity                  sums the gradient over ranks
    sum_out     sums over ranks           identity
    gather_in   ranks' parts of dim 1     sums the gradient, keeps the own part
    scatter_out sums, keeps the own part  gathers the gradient
    split_last  the own part of the last  puts the gradient's parts together
    gather_last puts the last together    keeps the gradient's own part
"""

import torch
from torch import Tensor

from ztk.runtime import Comm
from ztk.runtime.differentiable import through


def summed(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """The sum over ranks, in rank order, the same bits on all. x: any shape; it is not changed."""
    numel = -(-x.numel() // comm.size) * comm.size
    flat = x.new_zeros(numel) if numel > x.numel() else x.new_empty(numel)
    flat[: x.numel()].copy_(x.detach().reshape(-1))
    comm.all_reduce(flat, label=label).wait()
    return flat[: x.numel()].view(x.shape)


def gathered(x: Tensor, *, comm: Comm, label: str, dim: int = 1) -> Tensor:
    """Ranks' equal parts along `dim`, put together."""
    parts = x.new_empty(comm.size, *x.shape)
    parts[comm.rank].copy_(x.detach())
    comm.all_gather(parts.view(-1), label=label).wait()
    return torch.cat(list(parts), dim=dim)


def scattered(x: Tensor, *, comm: Comm, label: str, dim: int = 1) -> Tensor:
    """The own part along `dim` of the sum over ranks."""
    parts = torch.stack(x.detach().chunk(comm.size, dim=dim))
    out = torch.empty_like(parts[0])
    comm.reduce_scatter(parts.view(-1), out=out.view(-1), label=label).wait()
    return out


def gathered_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """Ranks' parts of the last dimension, `sizes` of it, put together."""
    padded = torch.nn.functional.pad(x.detach(), (0, max(sizes) - x.shape[-1]))
    parts = padded.new_empty(comm.size, *padded.shape)
    parts[comm.rank].copy_(padded)
    comm.all_gather(parts.view(-1), label=label).wait()
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


def copy_in(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """The input of layers that every rank has a part of."""
    return through(
        x,
        forward=lambda x: x.view_as(x),
        backward=lambda d_out: summed(d_out, comm=comm, label=f"gradient of {label}"),
    )


def sum_out(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """Every rank's partial result becomes the whole."""
    return through(x, forward=lambda x: summed(x, comm=comm, label=label), backward=lambda d_out: d_out)


def gather_in(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """[B, T / n, ...] -> [B, T, ...]."""
    return through(
        x,
        forward=lambda x: gathered(x, comm=comm, label=label),
        backward=lambda d_out: scattered(d_out, comm=comm, label=f"gradient of {label}"),
    )


def scatter_out(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """Partial results [B, T, ...] -> the own part of their sum [B, T / n, ...]."""
    return through(
        x,
        forward=lambda x: scattered(x, comm=comm, label=label),
        backward=lambda d_out: gathered(d_out, comm=comm, label=f"gradient of {label}"),
    )


def split_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """The own part, of `sizes`, of the last dimension of a tensor that every rank has."""
    return through(
        x,
        forward=lambda x: x.split(sizes, dim=-1)[comm.rank],
        backward=lambda d_out: gathered_last(d_out, comm=comm, sizes=sizes, label=f"gradient of {label}"),
    )


def gather_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """Ranks' parts of the last dimension, which may differ in size, put together for a result that every rank uses alike."""
    return through(
        x,
        forward=lambda x: gathered_last(x, comm=comm, sizes=sizes, label=label),
        backward=lambda d_out: d_out.split(sizes, dim=-1)[comm.rank],
    )
