"""The two all-to-alls of Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509), each the backward of the other.

A tensor of n bytes costs each rank n bytes each way, for any number of ranks N; ring attention costs n (N - 1).
Received tensors have the dtype of the sent ones.
"""

from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from ztk.core.runtime.differentiable import through
from ztk.core.runtime.pending import Pending


class Exchange(Protocol):
    """The ranks that share a sequence: a `ztk.core.runtime.Comm`, or a process group of a script."""

    @property
    def size(self) -> int: ...

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> Pending: ...


def to_heads(x: Tensor, *, comm: Exchange, label: str) -> Tensor:
    """[B, T / n, H, D], all heads of a part of the sequence -> [B, T, H / n, D], some heads of the full sequence."""
    return through(
        x,
        forward=lambda x: _to_heads(x, comm=comm, label=label),
        backward=lambda d_out: _to_sequence(d_out, comm=comm, label=f"gradient of {label}"),
    )


def to_sequence(x: Tensor, *, comm: Exchange, label: str) -> Tensor:
    """[B, T, H / n, D] -> [B, T / n, H, D]."""
    return through(
        x,
        forward=lambda x: _to_sequence(x, comm=comm, label=label),
        backward=lambda d_out: _to_heads(d_out, comm=comm, label=f"gradient of {label}"),
    )


def _to_heads(x: Tensor, *, comm: Exchange, label: str) -> Tensor:
    source = rearrange(x, "b t (n h) d -> n b t h d", n=comm.size).contiguous()
    return rearrange(_exchange(source, comm=comm, label=label), "n b t h d -> b (n t) h d")


def _to_sequence(x: Tensor, *, comm: Exchange, label: str) -> Tensor:
    source = rearrange(x, "b (n t) h d -> n b t h d", n=comm.size).contiguous()
    return rearrange(_exchange(source, comm=comm, label=label), "n b t h d -> b t (n h) d")


def _exchange(source: Tensor, *, comm: Exchange, label: str) -> Tensor:
    out = torch.empty_like(source)
    comm.all_to_all(source.view(-1), out=out.view(-1), label=label).wait()
    return out
