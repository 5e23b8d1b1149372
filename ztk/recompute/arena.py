"""One buffer of equal places, allocated for the first input and kept: memory does not fragment, and is page-locked once."""

import threading
from typing import Protocol

import torch
from torch import Tensor


class OnResize(Protocol):
    """Called with the bytes that were freed and those that were allocated."""

    def __call__(self, *, freed: int, taken: int) -> None: ...


class Arena:
    """`slots` places for flat tensors of one dtype. A lock guards them, because autograd may drop handles on any thread."""

    def __init__(
        self, *, slots: int, dtype: torch.dtype, device: torch.device, pinned: bool, on_resize: OnResize
    ) -> None:
        self._slots, self._dtype, self._device, self._pinned = slots, dtype, device, pinned
        self._on_resize = on_resize
        self._buffer: Tensor | None = None  # [slots, elements of a place]
        self._free: list[int] = list(reversed(range(slots)))
        self._lock = threading.Lock()

    def take(self, numel: int) -> tuple[int, Tensor]:
        """(number of a place, its first `numel` elements).

        Raises RuntimeError if all places are taken, or if they are too small and one of them is taken.
        """
        with self._lock:
            if not self._free:
                raise RuntimeError(
                    f"recompute.contiguous: all {self._slots} places of the buffer are taken by blocks whose backward is still to "
                    f"come; set recompute.num_checkpoints={2 * self._slots} or more"
                )
            if self._buffer is None or self._buffer.shape[1] < numel:
                self._grow(numel)
            slot = self._free.pop()
            return slot, self._buffer[slot, :numel]

    def give(self, slot: int) -> None:
        """The place may be taken again."""
        with self._lock:
            self._free.append(slot)

    def _grow(self, numel: int) -> None:
        if len(self._free) < self._slots:
            assert self._buffer is not None
            raise RuntimeError(
                f"recompute.contiguous: an input of {numel} elements came while the buffer has inputs of "
                f"{self._buffer.shape[1]}: it needs inputs of one size; use recompute.contiguous=false"
            )
        freed = 0 if self._buffer is None else self._buffer.nbytes
        self._buffer = None  # before the new one comes
        self._buffer = torch.empty(self._slots, numel, dtype=self._dtype, device=self._device, pin_memory=self._pinned)
        self._on_resize(freed=freed, taken=self._buffer.nbytes)
