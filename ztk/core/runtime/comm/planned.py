"""Communicator of a plan: it counts collectives and moves nothing. Results have the dtype of the tensor that was sent."""

import pickle
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ztk.core.runtime.comm.comm import Comm, Work
from ztk.core.runtime.comm.transport import SingleRankTransport, Transport
from ztk.core.runtime.planned import PLANNED, note_read

Moved = Callable[[str, int], object]  # kind and bytes of the buffer -> the object that `Work.wait` waits for, or None


class PlannedTransport(Transport):
    """Moves nothing. Like NCCL it does not block, so collectives are issued from the training thread.

    moved: called for every operation with its kind and the bytes of its buffer. It returns an object with `wait()` and `is_completed()`, or
    None.
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
        return self._move("ring" if label.startswith("ring ") else "all_to_all", tensor=source)

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> object:
        return self._move("broadcast", tensor=tensor)

    def send(self, tensor: Tensor, *, to: int, label: str) -> object:
        return self._move("send", tensor=tensor)

    def recv(self, out: Tensor, *, source: int, label: str) -> None:
        """Takes no time: the arrival of a message depends on the sending rank, see `ztk.planner.pipeline`."""


class Letters:
    """Objects that ranks of a plan send each other, by label. Ranks are planned one after the other, so some objects are read before they
    are sent. A read then returns the last object sent under that label, and `check` verifies the assumption afterwards."""

    def __init__(self) -> None:
        self._sent: dict[str, object] = {}
        self._assumed: dict[str, object] = {}

    def send(self, obj: object, *, label: str) -> None:
        """Stores `obj` for the rank that reads `label`."""
        self._sent[label] = obj

    def read(self, label: str) -> object:
        """The object sent under `label`, or the assumed one if it is sent later."""
        if label not in self._sent:
            self._assumed[label] = next(reversed(self._sent.values()))
        return self._sent.get(label, self._assumed.get(label))

    def check(self) -> None:
        """Raises ValueError if a rank sent another object than was read."""
        for label, obj in self._assumed.items():
            if self._sent.get(label, obj) != obj:
                raise ValueError(
                    f"{label}: stages send activations of different shapes, and a plan traces one rank after the other: use "
                    "topology.virtual_stages=1"
                )


class PlannedComm(Comm):
    """Collectives of one rank of a plan. The other ranks are assumed to do the same as this one."""

    def __init__(self, *, rank: int, size: int, moved: Moved | None = None, letters: Letters | None = None) -> None:
        """size: ranks. moved: see `PlannedTransport`; a group of one moves nothing. letters: shared by the ranks of a pipeline."""
        self._letters = letters or Letters()
        transport = SingleRankTransport() if size == 1 else PlannedTransport(moved)
        super().__init__(transport, rank=rank, size=size, device=PLANNED)

    def gather_scalars(self, values: Tensor, *, label: str) -> Tensor:
        """Repeats this rank's values for every rank, if they are on the host and have values."""
        full = super().gather_scalars(values, label=label)
        return full if values.is_meta else full.copy_(values.expand_as(full))

    def gather_objects(self, obj: object) -> list:
        """Repeats this rank's `obj` for every rank. Counted as in `Comm.gather_objects`."""
        note_read("objects of ranks")
        self.counters.count("scalars", numel=self.size, itemsize=8)
        self.counters.count("scalars", numel=self.size * len(pickle.dumps(obj)), itemsize=1)
        return [obj] * self.size

    def send_object(self, obj: object, *, to: int, label: str) -> list[tuple[Work, Tensor]]:
        """Counted as in `Comm.send_object`."""
        self._letters.send(obj, label=label)
        return super().send_object(obj, to=to, label=label)

    def recv_object(self, *, source: int, label: str) -> object:
        """The object that the sending rank sent in its plan."""
        note_read("an object of another rank")
        return self._letters.read(label)

    def gather_numbers(
        self, numbers: Sequence[float], *, label: str, dtype: torch.dtype = torch.float32
    ) -> list[list[float]]:
        """Repeats this rank's numbers for every rank. Counted as in `Comm.gather_numbers`."""
        note_read(f"numbers of ranks: {label}")
        self.counters.count("scalars", numel=self.size * len(numbers), itemsize=dtype.itemsize)
        return [list(numbers)] * self.size
