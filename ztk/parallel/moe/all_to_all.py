"""All-to-alls of rows and of their gradients, with separate start and wait so that other work overlaps them.

Work between `start` and `wait` in the forward also overlaps the all-to-all of the backward: among the nodes that are ready, autograd
runs the one created last, and the backward of `wait` only starts the all-to-all for which the backward of `start` waits.
Received rows have the dtype of the sent ones.
"""

from collections.abc import Sequence

from torch import Tensor

from ztk.core.runtime import Comm
from ztk.core.runtime.comm import Work
from ztk.kernels.launch.functions import OnceFunction


class AsyncAllToAll:
    """One all-to-all of the forward and its mirror in the backward. send[r], receive[r]: rows to and from rank r of `comm`."""

    def __init__(self, comm: Comm, *, send: Sequence[int], receive: Sequence[int], label: str) -> None:
        self.send, self.receive = tuple(send), tuple(receive)
        self._comm, self._label = comm, label
        self._work: Work | None = None
        self._source: Tensor | None = None
        self._back: tuple[AsyncAllToAll, Tensor] | None = None

    def start(self, rows: Tensor, *, anchor: Tensor | None = None) -> Tensor:
        """Starts sending rows [sum(send), C]; returns [sum(receive), C], not to be read before `wait`.

        anchor: a tensor that the gradient reaches even if `rows` depends on no parameter on this rank: all ranks must take part
        in the backward's all-to-all.
        """
        return _Start.apply(rows, anchor, self)

    def wait(self, buffer: Tensor) -> Tensor:
        """Waits for the received rows. `buffer` is the result of `start`; returns rows [sum(receive), C]."""
        return _Wait.apply(buffer, self)

    def start_forward(self, rows: Tensor) -> Tensor:
        """Starts the all-to-all of rows [sum(send), C] without autograd; returns its output buffer [sum(receive), C]."""
        out = rows.new_empty(sum(self.receive), rows.shape[1])
        self._source = rows.detach().contiguous()  # kept alive until it has been sent
        # The sending thread would record gradients, so it must get tensors without autograd history.
        self._work = self._comm.all_to_all_rows(
            self._source, out=out.detach(), send=self.send, receive=self.receive, label=self._label
        )
        return out

    def wait_forward(self) -> None:
        """Waits for `start_forward`."""
        assert self._work is not None
        self._work.wait()
        self._work = self._source = None

    def start_backward(self, d_rows: Tensor) -> None:
        """Starts sending the received rows' gradients [sum(receive), C] back."""
        back = AsyncAllToAll(self._comm, send=self.receive, receive=self.send, label=f"{self._label} back")
        self._back = back, back.start_forward(d_rows)

    def wait_backward(self) -> Tensor:
        """Waits for `start_backward`; the sent rows' gradients [sum(send), C]."""
        assert self._back is not None, "start_backward comes first"
        (back, out), self._back = self._back, None
        back.wait_forward()
        return out


class _Start(OnceFunction):
    INSTEAD = "Use topology.expert=1"

    @staticmethod
    def forward(ctx, rows: Tensor, anchor: Tensor | None, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.start_forward(rows)

    @staticmethod
    def backward(ctx, d_buffer: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.wait_backward(), None, None


class _Wait(OnceFunction):
    INSTEAD = "Use topology.expert=1"

    @staticmethod
    def forward(ctx, buffer: Tensor, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.wait_forward()
        return buffer.detach()

    @staticmethod
    def backward(ctx, d_rows: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start_backward(d_rows)
        return d_rows, None
