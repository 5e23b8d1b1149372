"""The interface of a cache of keys and values, and the log by which ranks that share a model keep their caches equal."""

from abc import ABC, abstractmethod

from ztk.inference.steps import Span, Step

Change = tuple[str, tuple, dict]  # a method of a cache, and its arguments


class Cache(ABC):
    """Keys and values of several sequences, each in a slot.

    Where ranks share a model, the leader's cache logs its changes, and the other ranks repeat the log.
    """

    def __init__(self) -> None:
        self._log: list[Change] | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all keys and values."""

    @abstractmethod
    def step(self, spans: list[Span]) -> Step:
        """The places of a step's rows, which attend over this cache."""

    @abstractmethod
    def recompute(self, slot: int, *, tokens: list[int]) -> list[int]:
        """Prepares the slot to compute its tokens once more, alone, in its own memory; returns the tokens that fit."""

    @abstractmethod
    def close(self) -> None:
        """Ends the threads that move blocks. Idempotent."""

    # Ranks

    def record(self) -> None:
        """Starts the log."""
        self._log = []

    def take_log(self, spans: list[Span]) -> list[Change]:
        """The changes since the last call, and those that the other ranks need for a step of `spans`."""
        log, self._log = self._log or [], []
        return log

    def repeat(self, log: list[Change]) -> None:
        """Makes the changes of the leader's `take_log`. Raises DiskError as `SwapFile`."""
        for change, values, named in log:
            getattr(self, change)(*values, **named)

    def _note(self, change: str, *values: object, **named: object) -> None:
        if self._log is not None:
            self._log.append((change, values, named))
