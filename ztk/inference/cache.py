"""What a cache of keys and values has, and how ranks that share a model keep theirs alike."""

from abc import ABC, abstractmethod

from ztk.inference.steps import Span, Step


class Cache(ABC):
    """Keys and values of several sequences, each in a slot.

    Where ranks share a model, the leader's cache writes down what is done to it, as four numbers each, and the others repeat that.
    """

    def __init__(self) -> None:
        self._log: list[int] | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all keys and values."""

    @abstractmethod
    def step(self, spans: list[Span]) -> Step:
        """The places of a step's rows, which attend over this cache."""

    @abstractmethod
    def recompute(self, slot: int, *, tokens: list[int]) -> list[int]:
        """Those of the slot's tokens that are computed once more, alone, in the memory that it has."""

    @abstractmethod
    def close(self) -> None:
        """Ends the threads that move blocks. Idempotent."""

    # Ranks

    def record(self) -> None:
        """From now on changes are written down for `take_log`."""
        self._log = []

    def take_log(self, spans: list[Span]) -> list[int]:
        """What was done since the last time, and what the others need for a step of `spans`."""
        log, self._log = self._log or [], []
        return log

    def repeat(self, log: list[int]) -> None:
        """Does what `take_log` gave on the leader. Raises DiskError as `SwapFile`."""
        for at in range(0, len(log), 4):
            self._repeat(log[at], numbers=log[at + 1 : at + 4])

    @abstractmethod
    def _repeat(self, what: int, *, numbers: list[int]) -> None:
        """One change."""

    def _note(self, what: int, *numbers: int) -> None:
        if self._log is not None:
            self._log += [what, *numbers, *[0] * (3 - len(numbers))]
