"""The communicator of a plan: its counters count, and nothing moves."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ztk.runtime.comm.comm import Comm
from ztk.runtime.comm.transport import SeparateMemory, SingleRankTransport
from ztk.runtime.planned import PLANNED

Moved = Callable[[str, int], object]  # kind and bytes of the buffer -> what `Work.wait` waits for, or None


class PlannedTransport(SeparateMemory):
    """Moves nothing. Like NCCL it does not block, so collectives are issued from the thread that trains.

    moved: called for every operation with its kind and the bytes of its buffer; returns an object with `wait()` and `is_completed()`, or None.
    """

    blocking = False
    checks_labels = True

    def __init__(self, moved: Moved | None = None) -> None:
        self._moved = moved

    def _move(self, kind: str, *, tensor: Tensor) -> object:
        return None if self._moved is None else self._moved(kind, tensor.nbytes)

    def all_gather(self, full: Tensor, *, label: str) -> object:
        return self._move("all_gather", tensor=full)

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> object:
        return self._move("reduce_scatter", tensor=full)

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> object:
        return self._move("all_to_all", tensor=source)

    def all_to_all_uneven(
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> object:
        return self._move("all_to_all", tensor=source)

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> object:
        return self._move("broadcast", tensor=tensor)

    def send(self, tensor: Tensor, *, to: int, label: str) -> object:
        return self._move("send", tensor=tensor)

    def recv(self, out: Tensor, *, source: int, label: str) -> object:
        return self._move("send", tensor=out)

    def close(self) -> None:
        pass


class PlannedComm(Comm):
    """The collectives of one rank of a plan: the other ranks are taken to do what this one does."""

    def __init__(self, *, rank: int, size: int, moved: Moved | None = None) -> None:
        """size: ranks. moved: see `PlannedTransport`; a group of one moves nothing."""
        transport = SingleRankTransport() if size == 1 else PlannedTransport(moved)
        super().__init__(transport, rank=rank, size=size, device=PLANNED)

    def gather_numbers(
        self, numbers: Sequence[float], *, label: str, dtype: torch.dtype = torch.float32
    ) -> list[list[float]]:
        """This rank's numbers for every rank; counted as `Comm.gather_numbers` counts them."""
        self.counters.count("scalars", numel=self.size * len(numbers), itemsize=dtype.itemsize)
        return [list(numbers)] * self.size
