"""Differentiable collectives along the tensor-parallel axis.

Megatron's g (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), its sequence-parallel form (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198), and those along the last dimension; f, its adjoint, is `ztk.parallel.tensor.layers`. "Own part" is
this rank's part.

                forward                     backward
    sum_out     all-reduce                  identity
    scatter_out reduce-scatter along dim 1  all-gather along dim 1
    split_last  own part of the last dim    all-gather along the last dim
    gather_last all-gather along the last   own part of the last dim

Results have the dtype of x.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.core.runtime import Comm
from ztk.core.runtime.comm.comm import Work
from ztk.core.runtime.differentiable import through
from ztk.core.runtime.dispatch_modes import keeps_results
from ztk.kernels.launch.functions import is_transformed


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A running collective and its output."""

    work: Work
    out: Tensor

    def result(self) -> Tensor:
        """Waits for the collective. Returns its output (any shape)."""
        self.work.wait()
        return self.out


def start_summing(x: Tensor, *, comm: Comm, label: str) -> Started | None:
    """Begins to sum `x` (any shape) over the ranks in its own memory. None if `x` is not contiguous, does not divide, or is kept by
    selective recomputation."""
    if x.numel() % comm.size or not x.is_contiguous() or keeps_results():
        return None
    x = x.detach()
    torch.autograd.graph.increment_version(x)  # so that autograd reports a saved `x` as changed
    return Started(work=comm.all_reduce(x.view(-1), label=label, in_shard_order=False), out=x)


def start_scattering(x: Tensor, *, comm: Comm, label: str, dim: int = 1) -> Started:
    """Begins `scattered`: x [.., n, ..] -> [.., n / ranks, ..]."""
    x, part = x.detach(), x.shape[dim] // comm.size
    is_in_order = x.is_contiguous() and all(size == 1 for size in x.shape[:dim])  # parts are adjacent in memory
    parts = x if is_in_order else torch.stack(x.chunk(comm.size, dim=dim))
    out = x.new_empty(*x.shape[:dim], part, *x.shape[dim + 1 :])
    return Started(work=comm.reduce_scatter(parts.view(-1), out=out.view(-1), label=label), out=out)


def summed(x: Tensor, *, comm: Comm, label: str) -> Tensor:
    """The sum of `x` over the ranks: x's shape and dtype, the same bits on every rank. `x` is not changed.

    The result is no view, as models that add to it in place need.
    """
    if not x.numel() % comm.size:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        comm.all_reduce(out.view(-1), label=label, in_shard_order=False).wait()
        return out
    flat = x.new_zeros(-(-x.numel() // comm.size) * comm.size)
    flat[: x.numel()].copy_(x.detach().reshape(-1))
    comm.all_reduce(flat, label=label, in_shard_order=False).wait()
    return flat[: x.numel()].view(x.shape).clone()


def gathered(x: Tensor, *, comm: Comm, label: str, dim: int = 1) -> Tensor:
    """x [.., n, ..] of every rank -> [.., n * ranks, ..], concatenated along `dim` in rank order."""
    parts = comm.gather(x, label=label)
    if all(size == 1 for size in x.shape[:dim]):  # parts are adjacent already
        return parts.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(list(parts), dim=dim)


def scattered(x: Tensor, *, comm: Comm, label: str, dim: int = 1) -> Tensor:
    """x [.., n, ..] -> [.., n / ranks, ..]: this rank's part along `dim` of the sum over the ranks."""
    return start_scattering(x, comm=comm, label=label, dim=dim).result()


def gathered_last(x: Tensor, *, comm: Comm, sizes: tuple[int, ...], label: str) -> Tensor:
    """x [.., sizes[rank]] of every rank -> [.., sum(sizes)]."""
    padded = torch.nn.functional.pad(x.detach(), (0, max(sizes) - x.shape[-1]))
    parts = zip(comm.gather(padded, label=label), sizes, strict=True)
    return torch.cat([part[..., :size] for part, size in parts], dim=-1)


def sum_out(x: Tensor, *, comm: Comm, label: str, in_place: bool = False) -> Tensor:
    """Sums partial results of row-parallel layers over the ranks, in x's shape.

    in_place: `x` is a product that nothing else needs, including autograd: its memory takes the sum.
    """
    overwrites = in_place and not is_transformed()

    def total(x: Tensor) -> Tensor:
        nonlocal overwrites
        started = start_summing(x, comm=comm, label=label) if overwrites else None
        overwrites = False  # a second derivative sums tensors of others
        return summed(x, comm=comm, label=label) if started is None else started.result()

    return through(x, forward=total, backward=lambda d_out: d_out)


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
