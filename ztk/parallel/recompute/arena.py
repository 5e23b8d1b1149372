"""One buffer of equal places, allocated for the first input and kept: memory does not fragment, and is page-locked once.

A place has the dtype of its input.
"""

import math
import threading
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ztk.core.runtime.planned import host_bytes, is_planned
from ztk.core.runtime.streams import Copy


class OnResize(Protocol):
    """Called with the numbers of freed and allocated bytes."""

    def __call__(self, *, freed: int, taken: int) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """Memory [n] for one input. slot: its number in an arena, or None. last_copy: the last copy into it or out of it."""

    tensor: Tensor
    slot: int | None = None
    last_copy: Copy | None = None


class Arena:
    """`slots` places for flat tensors of one dtype. A lock guards them, because autograd may drop handles on any thread."""

    def __init__(
        self, *, slots: int, dtype: torch.dtype, device: torch.device, compute_device: torch.device, on_resize: OnResize
    ) -> None:
        """See `memory` for the two devices."""
        self._slots, self._dtype, self._device, self._compute_device = slots, dtype, device, compute_device
        self._on_resize = on_resize
        self._buffer: Tensor | None = None  # [slots, elements of a place]
        self._free: list[int] = list(reversed(range(slots)))
        # The backward may have started to copy back the input of a handle that was dropped.
        self._last_copies: list[Copy | None] = [None] * slots
        self._lock = threading.Lock()

    def take(self, numel: int) -> Place:
        """A place of `numel` elements.

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
            return Place(tensor=self._buffer[slot, :numel], slot=slot, last_copy=self._last_copies[slot])

    def give(self, place: Place) -> None:
        """Returns the place to the arena."""
        assert place.slot is not None
        with self._lock:
            self._last_copies[place.slot] = place.last_copy
            self._free.append(place.slot)

    def _grow(self, numel: int) -> None:
        if len(self._free) < self._slots:
            assert self._buffer is not None
            raise RuntimeError(
                f"recompute.contiguous: an input of {numel} elements came while the buffer has inputs of "
                f"{self._buffer.shape[1]}: it needs inputs of one size; use recompute.contiguous=false"
            )
        freed = 0 if self._buffer is None else self._buffer.nbytes
        self._buffer = None  # freed before the new one is allocated
        self._buffer = memory(
            (self._slots, numel), dtype=self._dtype, device=self._device, compute_device=self._compute_device
        )
        self._on_resize(freed=freed, taken=self._buffer.nbytes)


def memory(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device, compute_device: torch.device) -> Tensor:
    """A tensor of `shape` on `device`. A CPU tensor is page-locked if `compute_device` is a GPU, and has no values if it is a plan's device."""
    if device == compute_device or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if is_planned(compute_device):
        return host_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, pin_memory=compute_device.type == "cuda")
