"""Stores the inputs of recomputed blocks until the backward: unchanged, cut over tensor-parallel ranks, in main memory, or in one buffer.

A `SavedInput` is a handle: it returns its tensor whenever the backward needs it, and its memory is freed when autograd drops it.
Restored tensors have the dtype of the saved ones.
"""

import math
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ztk.core.policies.recompute import RecomputePolicy
from ztk.core.runtime import Comm, MemoryLedger, Tier
from ztk.core.runtime.planned import host_bytes, is_planned
from ztk.core.runtime.streams import Copy, start_copy

# One buffer of equal places, allocated for the first input and kept: memory does not fragment, and is page-locked once.
#
# A place has the dtype of its input.


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


CATEGORY = "recompute inputs"  # in the memory ledger


class SavedInput:
    """A tensor of any shape without a copy, for the device tier. It must not be changed before the backward."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def restore(self) -> Tensor:
        """The tensor. Raises RuntimeError if it was changed in place."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"the input {tuple(self._tensor.shape)} of a recomputed block was changed in place after the block had run: "
                "make a new tensor instead (x = x + y for x += y)"
            )
        return self._tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """Shape and device of a tensor before it was flattened or cut."""

    shape: torch.Size
    device: torch.device


class _SavedPart:
    """A flat copy of the tensor, or of this rank's part of it, in main memory or on the device.

    previous: the part that was saved before this one, which the backward needs next.
    """

    def __init__(self, place: Place, *, form: _Form, store: "InputStore", previous: "weakref.ref | None") -> None:
        self._place, self._form, self._store, self._previous = place, form, store, previous
        self._is_away = store.inputs_on_cpu and form.device.type != "cpu"
        self._fetched: tuple[Tensor, Copy | None] | None = None  # on the device, with the copy that fills it

    def restore(self) -> Tensor:
        """The tensor on the device. Collective over the tensor-parallel ranks if inputs are partitioned."""
        part = self._place.tensor
        if self._is_away:
            self._fetch()
            assert self._fetched is not None
            (part, copy), self._fetched = self._fetched, None
            if copy is not None:
                copy.wait()
            if self._previous is not None and (before := self._previous()) is not None:
                before._fetch()
        return self._store.full(part, shape=self._form.shape)

    def _fetch(self) -> None:
        """Starts the copy to the device."""
        if self._fetched is None:
            away = self._place.tensor
            out = torch.empty(away.shape, dtype=away.dtype, device=self._form.device)
            copy = self._store.copy(self._place, source=away, out=out)
            self._fetched = out, copy


class InputStore:
    """Saves the inputs of recomputed blocks and returns their handles."""

    def __init__(
        self,
        policy: RecomputePolicy,
        *,
        num_regions: int,
        comm: Comm | None = None,
        ledger: MemoryLedger | None = None,
    ) -> None:
        self._policy, self._ledger = policy, ledger
        self._comm = comm if policy.partition_inputs and comm is not None and comm.size > 1 else None
        self._num_checkpoints = policy.num_checkpoints or num_regions
        self._arenas: dict[tuple, Arena] = {}
        self._last: weakref.ref | None = None

    @property
    def inputs_on_cpu(self) -> bool:
        """Whether parts are in main memory."""
        return self._policy.inputs_on_cpu

    @property
    def copies_inputs(self) -> bool:
        """Whether handles have copies rather than the tensors themselves."""
        return self._policy.inputs_on_cpu or self._policy.contiguous or self._comm is not None

    def save(self, tensor: Tensor, *, place: int) -> SavedInput | _SavedPart:
        """Saves an input of any shape. place: its index among its region's inputs; inputs with one index share a buffer.

        Raises RuntimeError if the contiguous buffer has no place for it.
        """
        if not self.copies_inputs:
            saved = SavedInput(tensor)
            self._book(saved, tensor)
            return saved
        part = self._own_part(tensor)
        target, arena = self._target(part, place=place)
        self.copy(target, source=part, out=target.tensor)
        form = _Form(shape=tensor.shape, device=tensor.device)
        saved = _SavedPart(target, form=form, store=self, previous=self._last)
        self._last = weakref.ref(saved)
        if arena is None:
            self._book(saved, target.tensor)
        else:
            # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
            weakref.finalize(saved, arena.give, target).atexit = False
        return saved

    @staticmethod
    def copy(place: Place, *, source: Tensor, out: Tensor) -> Copy | None:
        """Copies `source` to `out`, both flat [n], into a place or out of it, after its earlier copies. Returns None if the copy is
        done."""
        copy = start_copy(source, out=out, after=place.last_copy)
        if copy is None:
            out.copy_(source)
        else:
            place.last_copy = copy
        return copy

    def full(self, part: Tensor, *, shape: torch.Size) -> Tensor:
        """The tensor of `shape` whose flat part is `part`. Collective over the tensor-parallel ranks if inputs are partitioned."""
        if self._comm is None:
            return part.view(shape)
        full = self._comm.gather(part, label="recompute input")
        return full.view(-1)[: shape.numel()].view(shape)

    def _own_part(self, tensor: Tensor) -> Tensor:
        """`tensor`, flat, or this rank's part of it, padded to equal parts."""
        flat = tensor.reshape(-1)
        if self._comm is None:
            return flat
        size = -(-flat.numel() // self._comm.size)
        own = flat[self._comm.rank * size : (self._comm.rank + 1) * size]
        return own if own.numel() == size else torch.cat([own, own.new_zeros(size - own.numel())])

    def _target(self, part: Tensor, *, place: int) -> tuple[Place, Arena | None]:
        """Memory for a part, and the contiguous buffer that contains it or None."""
        device = torch.device("cpu") if self.inputs_on_cpu else part.device
        if not self._policy.contiguous:
            return Place(tensor=memory(part.shape, dtype=part.dtype, device=device, compute_device=part.device)), None
        key = part.dtype, device, place
        if key not in self._arenas:
            self._arenas[key] = Arena(
                slots=self._num_checkpoints,
                dtype=part.dtype,
                device=device,
                compute_device=part.device,
                on_resize=self._book_arena,
            )
        arena = self._arenas[key]
        return arena.take(part.numel()), arena

    def _book(self, handle: object, data: Tensor) -> None:
        """Counts the bytes in the ledger until autograd drops the handle."""
        if self._ledger is None:
            return
        entry = {"tier": self._tier, "category": CATEGORY, "nbytes": data.numel() * data.itemsize}
        self._ledger.add(**entry)
        # pyrefly: ignore[missing-attribute]  # a property, which typeshed leaves out of __slots__
        weakref.finalize(handle, self._ledger.remove, **entry).atexit = False

    def _book_arena(self, *, freed: int, taken: int) -> None:
        if self._ledger is not None:
            self._ledger.remove(tier=self._tier, category=CATEGORY, nbytes=freed)
            self._ledger.add(tier=self._tier, category=CATEGORY, nbytes=taken)

    @property
    def _tier(self) -> Tier:
        return Tier.host if self._policy.inputs_on_cpu else Tier.device
