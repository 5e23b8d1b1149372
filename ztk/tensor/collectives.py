"""Collectives that gradients flow through, along the tensor axis.

The forward of each is the backward of another (Megatron's f and g, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; with the
sequence cut between blocks, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198):

    copy_in    identity                   sums the gradient over ranks
    sum_out    sums over ranks            identity
    gather_in  ranks' parts of dim 1      sums the gradient, keeps the own part
    scatter_out sums, keeps the own part  gathers the gradient
"""

import torch
from torch import Tensor

from ztk.runtime import Comm


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


class CopyIn(torch.autograd.Function):
    """copy_in: the input of layers that every rank has a part of."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm, label: str) -> Tensor:
        ctx.comm, ctx.label = comm, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        return summed(d_out, comm=ctx.comm, label=f"gradient of {ctx.label}"), None, None


class SumOut(torch.autograd.Function):
    """sum_out: every rank's partial result becomes the whole."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm, label: str) -> Tensor:
        return summed(x, comm=comm, label=label)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        return d_out, None, None


class GatherIn(torch.autograd.Function):
    """gather_in: [B, T / n, ...] -> [B, T, ...]."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm, label: str) -> Tensor:
        ctx.comm, ctx.label = comm, label
        return gathered(x, comm=comm, label=label)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        return scattered(d_out, comm=ctx.comm, label=f"gradient of {ctx.label}"), None, None


class ScatterOut(torch.autograd.Function):
    """scatter_out: partial results [B, T, ...] -> the own part of their sum [B, T / n, ...]."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm, label: str) -> Tensor:
        ctx.comm, ctx.label = comm, label
        return scattered(x, comm=comm, label=label)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        return gathered(d_out, comm=ctx.comm, label=f"gradient of {ctx.label}"), None, None


def gathered_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """Ranks' parts of the last dimension, `sizes` of it, put together."""
    padded = torch.nn.functional.pad(x.detach(), (0, max(sizes) - x.shape[-1]))
    parts = padded.new_empty(comm.size, *padded.shape)
    parts[comm.rank].copy_(padded)
    comm.all_gather(parts.view(-1), label=label).wait()
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


class SplitLast(torch.autograd.Function):
    """The own part of the last dimension of a tensor that every rank has; the backward puts the gradients' parts together."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
        ctx.comm, ctx.sizes, ctx.label = comm, sizes, label
        return x.split(sizes, dim=-1)[comm.rank]

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        label = f"gradient of {ctx.label}"
        return gathered_last(d_out, comm=ctx.comm, sizes=ctx.sizes, label=label), None, None, None


class GatherLast(torch.autograd.Function):
    """Ranks' parts of the last dimension, which may differ in size, put together; the gradient's own part goes back, for a result that every
    rank uses alike."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
        ctx.rank, ctx.sizes = comm.rank, sizes
        return gathered_last(x, comm=comm, sizes=sizes, label=label)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        return d_out.split(ctx.sizes, dim=-1)[ctx.rank], None, None, None
