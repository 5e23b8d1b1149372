"""The base of all transports, which move bytes between ranks, and the summation order of every CPU transport."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ztk.core.runtime.planned import place_of


class Transport:
    """Moves flat contiguous tensors [n] of any dtype. Transports with `blocking` return when done; others return an object with `wait()`.

    `label` names the moved tensor in errors. checks_labels: ranks with different labels raise an error instead of hanging.
    """

    blocking: bool
    checks_labels: bool

    def all_gather(self, full: Tensor, *, label: str): ...  # in place: rank r's slice of `full` reaches all ranks

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str): ...  # `out` may be the own slice of `full`

    def all_reduce(self, full: Tensor, *, own: Tensor, label: str):  # in place; `own` is this rank's slice
        self.reduce_scatter(full, out=own, label=label)  # complete on return, unlike in `NcclTransport`
        return self.all_gather(full, label=label)

    def all_sum(self, full: Tensor, *, own: Tensor, label: str):
        """Sums `full` [size * n] into `own` [n] like `all_reduce`, in any dtype and in an order that the transport chooses."""
        return self.all_reduce(full, own=own, label=label)

    def maximum(self, rows: Tensor, *, own: Tensor, label: str) -> None:
        """`own` [k], this rank's part of `rows` [size * k] in host memory, becomes the maximum over all ranks. Waits."""
        self.all_gather(rows, label=label)
        own.copy_(rows.view(-1, own.numel()).amax(dim=0))

    def empty(self, numel: int, *, dtype: torch.dtype, label: str) -> Tensor | None:
        """A buffer [numel] that all ranks share, or None if they do not share memory."""
        return None

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str): ...  # equal parts; part r of `source` goes to r

    def all_to_all_uneven(  # `send[r]` elements of `source` go to rank r, `receive[r]` of `out` come from it
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ): ...

    def broadcast(self, tensor: Tensor, *, source: int, label: str): ...

    def send(self, tensor: Tensor, *, to: int, label: str): ...  # to one rank, which expects the same size and label

    def recv(self, out: Tensor, *, source: int, label: str): ...

    def close(self) -> None:
        """Ends connections of the transport's own."""


class SingleRankTransport(Transport):
    """The transport of a world of one: no operation moves anything.

    Raises:
        ValueError: `send` or `recv` is called, which need a second rank.
    """

    blocking = True
    checks_labels = True

    def all_gather(self, full: Tensor, *, label: str) -> None:
        pass

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> None:
        if place_of(out) != place_of(full):
            out.copy_(full)

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> None:
        out.copy_(source)

    def all_to_all_uneven(
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> None:
        out.copy_(source)

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> None:
        pass

    def send(self, tensor: Tensor, *, to: int, label: str) -> None:
        raise ValueError(f"{label}: a world of one rank has no peer to send to")

    def recv(self, out: Tensor, *, source: int, label: str) -> None:
        raise ValueError(f"{label}: a world of one rank has no peer to receive from")


def sum_in_rank_order(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """out = parts[0] + parts[1] + ..., all of one shape, in this order at every ZeRO stage.

    16-bit parts of more than two ranks are added up in fp32 and rounded once (with two ranks the 16-bit sum rounds once
    anyway). On the CPU a cast to fp32 and an fp32 add cost a third of a mixed-dtype add. `out` may be one of the parts.
    """
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].to(torch.float32, copy=True)
    scratch = None if parts[0].dtype == torch.float32 else torch.empty_like(total)
    for part in parts[1:]:
        total.add_(part if scratch is None else scratch.copy_(part))
    out.copy_(total)
