"""States that leave the device for a while, so that something else (generation, another model) has its memory.

A tensor keeps its identity and loses its memory, so everything that refers to it finds it again when it comes back. States that sleep
elsewhere anyway stay there. Where the device is the CPU, its memory is host memory already: nothing is copied, only booked.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ztk.runtime import MemoryLedger, Tier
from ztk.zero.bucket import Bucket
from ztk.zero.partitioned import placeholder
from ztk.zero.zero import Zero


class StateKind(StrEnum):
    """What can leave."""

    optim_states = "optim_states"  # the optimizer's moments
    hp_params = "hp_params"  # fp32 master weights; fp32 parameters have none
    lp_params = "lp_params"  # parameters, or their shards
    lp_grads = "lp_grads"  # reduced gradients
    contiguous_grad_buffer = (
        "contiguous_grad_buffer"  # free buffers of gathered parameters and of gradients on their way
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Away:
    """A tensor without memory, and its content: rows that stayed on the device or went to the host, in order."""

    tensor: Tensor
    rows: tuple[Tensor, ...]
    category: str
    host_bytes: int


class StateOffloader:
    """Moves the states of one `Zero` away and back. Every rank calls it alike, between steps."""

    def __init__(self, zero: Zero, *, ledger: MemoryLedger) -> None:
        self._zero, self._ledger = zero, ledger
        self._device = zero._comm.device
        self._away: list[_Away] = []
        self._copied: list[Tensor] = []  # host memory that a copy to the device may still read
        self.absent: frozenset[StateKind] = frozenset()

    def leave(self, kinds: Collection[StateKind], *, pin_memory: bool, non_blocking: bool) -> None:
        """Moves `kinds` to main memory, in addition to what left before; what is away already, stays.

        Raises RuntimeError if parameters are held whole.
        """
        self._zero.gathering.reshard_before_change()
        self._zero._update.finish()
        if self.absent:  # states of one tensor may leave one after the other
            kinds = self.absent | frozenset(kinds)
            self.reload(non_blocking=False)
        for tensor, rows, category in self._tensors(frozenset(kinds)):
            self._send(tensor, rows=rows, category=category, pin=pin_memory, non_blocking=non_blocking)
        if StateKind.lp_params in kinds:
            for bucket in self._whole_buckets():
                for parameter, spot in zip(bucket.parameters, bucket.layout.placements, strict=True):
                    parameter.data = placeholder(spot.shape, dtype=bucket.traits.dtype, device=self._device)
        if StateKind.contiguous_grad_buffer in kinds:
            self._zero.free_buffers()
        self.absent = frozenset(kinds)
        if self._device.type == "cuda" and not non_blocking:
            torch.cuda.synchronize(self._device)

    def reload(self, *, non_blocking: bool) -> None:
        """Everything is on the device again. non_blocking: the copies run in the order of the current stream."""
        self._copied.clear()
        for away in self._away:
            rows = [row.to(self._device, non_blocking=non_blocking) for row in away.rows]
            away.tensor.data = rows[0] if len(rows) == 1 else torch.cat(rows)
            if self._device.type == "cuda" and non_blocking:
                self._copied += away.rows
            self._ledger.remove(tier=Tier.host, category=away.category, nbytes=away.host_bytes)
            self._ledger.add(tier=Tier.device, category=away.category, nbytes=away.host_bytes)
        self._away.clear()
        if StateKind.lp_params in self.absent:
            for bucket in self._whole_buckets():
                bucket.show_parameters()
        self.absent = frozenset()

    def _whole_buckets(self) -> list[Bucket]:
        return [bucket for bucket in self._zero.buckets if not bucket.traits.shards_parameters]

    def _tensors(self, kinds: frozenset[StateKind]) -> Iterator[tuple[Tensor, tuple[tuple[int, bool], ...], str]]:
        """(tensor, ((rows, whether they leave), ...), category), of what lies on the device."""
        stores, num_moments = self._zero._stores, len(self._zero.optimizer.state_names)
        moments, masters = StateKind.optim_states in kinds, StateKind.hp_params in kinds
        for bucket in self._zero.buckets:
            for piece in bucket.pieces:
                if piece.states is not None and stores.optimizer.tier is Tier.device and (moments or masters):
                    first = piece.states.tensor.shape[0] - num_moments
                    rows = tuple(entry for entry in ((first, masters), (num_moments, moments)) if entry[0])
                    if any(leaves for _, leaves in rows):
                        yield piece.states.tensor, rows, "optimizer"
                if piece.gradient is not None and stores.gradients.tier is Tier.device and StateKind.lp_grads in kinds:
                    yield piece.gradient.tensor, (), "gradients"
                if (
                    piece.parameter is not None
                    and stores.parameters.tier is Tier.device
                    and StateKind.lp_params in kinds
                ):
                    yield piece.parameter.tensor, (), "parameters"
        if StateKind.lp_params in kinds:
            yield from ((bucket.full, (), "parameters") for bucket in self._whole_buckets())
        if StateKind.lp_grads in kinds:
            yield from ((buffer, (), "gradients") for buffer in self._zero.reduction.resident_buffers())

    def _send(
        self, tensor: Tensor, *, rows: tuple[tuple[int, bool], ...], category: str, pin: bool, non_blocking: bool
    ) -> None:
        parts, leaves = [tensor.data], [True]
        if rows and not all(leaving for _, leaving in rows):
            parts, leaves = list(tensor.data.split([number for number, _ in rows])), [leaving for _, leaving in rows]
        moved = []
        for part, leaving in zip(parts, leaves, strict=True):
            moved.append(_on_host(part, pin=pin, non_blocking=non_blocking) if leaving else part.clone())
        nbytes = sum(part.nbytes for part, leaving in zip(parts, leaves, strict=True) if leaving)
        self._away.append(_Away(tensor=tensor, rows=tuple(moved), category=category, host_bytes=nbytes))
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._device)
        self._ledger.remove(tier=Tier.device, category=category, nbytes=nbytes)
        self._ledger.add(tier=Tier.host, category=category, nbytes=nbytes)


def _on_host(tensor: Tensor, *, pin: bool, non_blocking: bool) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return host.copy_(tensor, non_blocking=non_blocking)
