"""Rows that travel between ranks and come back as gradients, started and awaited apart so that work fits in between.

What stands between `depart` and `arrive` in the forward also runs between the two in the backward: autograd takes of what is ready what
was made last, and the backward of `arrive` only starts the journey that the backward of `depart` awaits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ztk.runtime import Comm


class Journey:
    """One all-to-all of the forward and its mirror in the backward. send[r], receive[r]: rows to and from rank r of `comm`."""

    def __init__(self, comm: Comm, *, send: Sequence[int], receive: Sequence[int], label: str) -> None:
        self.send, self.receive = tuple(send), tuple(receive)
        self._comm, self._label = comm, label
        self._work = self._source = self._back = None

    def depart(self, rows: Tensor, *, anchor: Tensor | None = None) -> Tensor:
        """rows [sum(send), C] set out; returns [sum(receive), C], not to be read before `arrive`.

        anchor: a tensor that the gradient reaches even if `rows` depends on no parameter on this rank: all ranks must make the journey
        back.
        """
        return _Depart.apply(rows, anchor, self)

    def arrive(self, buffer: Tensor) -> Tensor:
        """What `depart` returned, filled."""
        return _Arrive.apply(buffer, self)

    def set_out(self, rows: Tensor) -> Tensor:
        out = rows.new_empty(sum(self.receive), rows.shape[1])
        self._source = rows.detach().contiguous()  # alive till it has left
        # The thread that sends would record gradients: it must not see tensors that have a history, or are about to get one.
        self._work = self._comm.all_to_all_rows(
            self._source, out=out.detach(), send=self.send, receive=self.receive, label=self._label
        )
        return out

    def await_arrival(self) -> None:
        self._work.wait()
        self._work = self._source = None

    def set_out_back(self, d_rows: Tensor) -> None:
        back = Journey(self._comm, send=self.receive, receive=self.send, label=f"{self._label} back")
        self._back = back, back.set_out(d_rows)

    def await_back(self) -> Tensor:
        (back, out), self._back = self._back, None
        back.await_arrival()
        return out


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, anchor: Tensor | None, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.set_out(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_buffer: Tensor) -> tuple[Tensor, None, None]:
        return ctx.journey.await_back(), None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.await_arrival()
        return buffer.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows: Tensor) -> tuple[Tensor, None]:
        ctx.journey.set_out_back(d_rows)
        return d_rows, None
