"""States that are moved off the device for a while, so that something else (generation, another model) has its memory.

A tensor keeps its identity and loses its memory, so everything that refers to it finds its content when it is back. States that are
offloaded anyway stay where they are. Where the device is the CPU its memory is host memory already: nothing is copied, only booked.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ztk.runtime import MemoryLedger, Tier
from ztk.zero.bucket import Bucket
from ztk.zero.gathering import Gathering
from ztk.zero.partitioned import placeholder
from ztk.zero.reduction import GradientReduction
from ztk.zero.store import Slot, Store, Stores
from ztk.zero.update import ShardUpdate


class StateKind(StrEnum):
    """What can be offloaded."""

    optim_states = "optim_states"  # the optimizer's moments
    hp_params = "hp_params"  # fp32 master weights; fp32 parameters have none
    lp_params = "lp_params"  # parameters, or their shards
    lp_grads = "lp_grads"  # reduced gradients
    contiguous_grad_buffer = "contiguous_grad_buffer"  # free buffers of gathered parameters and of unreduced gradients


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Candidate:
    """A tensor on the device. rows: (number of rows, whether they are offloaded), in order; none: all of it is."""

    tensor: Tensor
    category: str
    rows: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Offloaded:
    """A tensor without memory, and its content: rows that stayed on the device or went to the host, in order."""

    tensor: Tensor
    rows: tuple[Tensor, ...]
    category: str
    host_bytes: int


class StateOffloader:
    """Moves the states of one model to main memory and back. Every rank calls it alike, between steps.

    absent: the kinds that are offloaded now.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        stores: Stores,
        num_moments: int,
        gathering: Gathering,
        reduction: GradientReduction,
        update: ShardUpdate,
        free_buffers: Callable[[], None],
        device: torch.device,
        ledger: MemoryLedger,
    ) -> None:
        """num_moments: states of the optimizer per parameter. free_buffers: frees the buffers of the pools that are not in use."""
        self.absent: frozenset[StateKind] = frozenset()
        self._buckets, self._stores, self._num_moments = buckets, stores, num_moments
        self._gathering, self._reduction, self._update = gathering, reduction, update
        self._free_buffers, self._device, self._ledger = free_buffers, device, ledger
        self._unsharded = [bucket for bucket in buckets if not bucket.traits.shards_parameters]
        self._offloaded: list[_Offloaded] = []
        self._copied: list[Tensor] = []  # host memory that a copy to the device may still read

    def offload(self, kinds: Collection[StateKind], *, pin_memory: bool, non_blocking: bool) -> None:
        """Moves `kinds` to main memory, in addition to what is offloaded already.

        Raises RuntimeError if parameters are pinned.
        """
        self._gathering.reshard_before_change()
        self._update.finish()
        if self.absent:  # states of one tensor may be offloaded one after the other
            kinds = self.absent | frozenset(kinds)
            self.reload(non_blocking=False)
        for candidate in self._candidates(frozenset(kinds)):
            self._send(candidate, pin=pin_memory, non_blocking=non_blocking)
        if StateKind.lp_params in kinds:
            for bucket in self._unsharded:
                for parameter, placement in zip(bucket.parameters, bucket.layout.placements, strict=True):
                    parameter.data = placeholder(placement.shape, dtype=bucket.traits.dtype, device=self._device)
        if StateKind.contiguous_grad_buffer in kinds:
            self._free_buffers()
        self.absent = frozenset(kinds)
        if self._device.type == "cuda" and not non_blocking:
            torch.cuda.synchronize(self._device)

    def reload(self, *, non_blocking: bool) -> None:
        """Moves everything back to the device. non_blocking: the copies run in the order of the current stream."""
        self._copied.clear()
        for offloaded in self._offloaded:
            rows = [row.to(self._device, non_blocking=non_blocking) for row in offloaded.rows]
            offloaded.tensor.data = rows[0] if len(rows) == 1 else torch.cat(rows)
            if self._device.type == "cuda" and non_blocking:
                self._copied += offloaded.rows
            self._ledger.remove(tier=Tier.host, category=offloaded.category, nbytes=offloaded.host_bytes)
            self._ledger.add(tier=Tier.device, category=offloaded.category, nbytes=offloaded.host_bytes)
        self._offloaded.clear()
        if StateKind.lp_params in self.absent:
            for bucket in self._unsharded:
                bucket.residency.show_parameters()
        self.absent = frozenset()

    def _candidates(self, kinds: frozenset[StateKind]) -> Iterator[_Candidate]:
        """What is on the device of `kinds`."""
        masters, moments = StateKind.hp_params in kinds, StateKind.optim_states in kinds
        for piece in (piece for bucket in self._buckets for piece in bucket.pieces):
            if (states := _on_device(self._stores.optimizer, slot=piece.states)) is not None:
                counts = (states.shape[0] - self._num_moments, masters), (self._num_moments, moments)
                rows = tuple((number, is_sent) for number, is_sent in counts if number)
                if any(is_sent for _, is_sent in rows):
                    yield _Candidate(tensor=states, rows=rows, category="optimizer")
            if StateKind.lp_grads in kinds and (
                (gradient := _on_device(self._stores.gradients, slot=piece.gradient)) is not None
            ):
                yield _Candidate(tensor=gradient, category="gradients")
            if StateKind.lp_params in kinds and (
                (parameter := _on_device(self._stores.parameters, slot=piece.parameter)) is not None
            ):
                yield _Candidate(tensor=parameter, category="parameters")
        if StateKind.lp_params in kinds:
            yield from (_Candidate(tensor=bucket.full, category="parameters") for bucket in self._unsharded)
        if StateKind.lp_grads in kinds:
            yield from (_Candidate(tensor=full, category="gradients") for full in self._reduction.resident_buffers())

    def _send(self, candidate: _Candidate, *, pin: bool, non_blocking: bool) -> None:
        tensor, parts, is_sent = candidate.tensor, [candidate.tensor.data], [True]
        if not all(sent for _, sent in candidate.rows):
            parts = list(tensor.data.split([number for number, _ in candidate.rows]))
            is_sent = [sent for _, sent in candidate.rows]
        rows = tuple(
            _on_host(part, pin=pin, non_blocking=non_blocking) if sent else part.clone()
            for part, sent in zip(parts, is_sent, strict=True)
        )
        nbytes = sum(part.nbytes for part, sent in zip(parts, is_sent, strict=True) if sent)
        self._offloaded.append(_Offloaded(tensor=tensor, rows=rows, category=candidate.category, host_bytes=nbytes))
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._device)
        self._ledger.remove(tier=Tier.device, category=candidate.category, nbytes=nbytes)
        self._ledger.add(tier=Tier.host, category=candidate.category, nbytes=nbytes)


def _on_device(store: Store, *, slot: Slot | None) -> Tensor | None:
    """The tensor of a slot of the device tier."""
    return store.fetch(slot).wait() if slot is not None and store.tier is Tier.device else None


def _on_host(tensor: Tensor, *, pin: bool, non_blocking: bool) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return host.copy_(tensor, non_blocking=non_blocking)
