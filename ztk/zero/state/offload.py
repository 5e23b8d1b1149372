"""Temporarily moves states off the device, to free its memory for generation or another model.

A tensor keeps its identity and loses its memory, so all references to it are valid again after the reload. States that are
offloaded anyway stay where they are. If the device is the CPU, its memory is host memory already: nothing is copied, only booked.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.core.policies.tier import StateKind
from ztk.core.runtime import Tier
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.piece import Piece
from ztk.zero.gathering import Gathering
from ztk.zero.parameters.released import placeholder, release
from ztk.zero.reduction import GradientReduction
from ztk.zero.update.update import ShardUpdate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Offloaded:
    """A tensor without memory, and its content along dimension 0: leading rows that stayed, offloaded rows, trailing rows that stayed."""

    tensor: Tensor
    category: str
    before: Tensor
    content: Tensor
    after: Tensor


class StateOffloader:
    """Moves the states of one model to main memory and back. Every rank must make the same calls, between steps.

    absent: the kinds that are offloaded now.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        context: ZeroContext,
        gathering: Gathering,
        reduction: GradientReduction,
        update: ShardUpdate,
    ) -> None:
        self.absent: frozenset[StateKind] = frozenset()
        self._buckets, self._gathered = buckets, context.gathered
        self._gathering, self._reduction, self._update = gathering, reduction, update
        self._format = context.states
        self._device, self._ledger = context.device, context.ledger
        self._unsharded = [bucket for bucket in buckets if not bucket.traits.shards_parameters]
        self._offloaded: list[_Offloaded] = []
        self._copied: list[Tensor] = []  # host memory that a copy to the device may still read

    def offload(self, kinds: Collection[StateKind], *, pin_memory: bool, non_blocking: bool) -> None:
        """Moves `kinds` to main memory, in addition to kinds that are offloaded already.

        Raises RuntimeError if parameters are pinned.
        """
        self._gathering.reshard_before_change()
        self._update.finish()
        if self.absent:  # states of one tensor may be offloaded one after the other
            kinds = self.absent | frozenset(kinds)
            self.reload(non_blocking=False)
        for tensor, rows, category in self._on_device(frozenset(kinds)):
            self._send(tensor, rows=rows, category=category, pin=pin_memory, non_blocking=non_blocking)
        if StateKind.lp_params in kinds:
            for bucket in self._unsharded:
                for parameter, placement in zip(bucket.parameters, bucket.layout.placements, strict=True):
                    empty = placeholder(placement.shape, dtype=bucket.traits.dtype, device=self._device)
                    release(parameter, value=empty)
        if StateKind.contiguous_grad_buffer in kinds:
            self.free_buffers()
        self.absent = frozenset(kinds)
        if self._device.type == "cuda" and not non_blocking:
            torch.cuda.synchronize(self._device)

    def reload(self, *, non_blocking: bool) -> None:
        """Moves everything back to the device. non_blocking: the copies run in the order of the current stream."""
        self._copied.clear()
        for away in self._offloaded:
            content = away.content.to(self._device, non_blocking=non_blocking)
            is_full = not (away.before.numel() or away.after.numel())
            away.tensor.data = content if is_full else torch.cat([away.before, content, away.after])
            if self._device.type == "cuda" and non_blocking:
                self._copied.append(away.content)
            self._ledger.remove(tier=Tier.host, category=away.category, nbytes=away.content.nbytes)
            self._ledger.add(tier=Tier.device, category=away.category, nbytes=away.content.nbytes)
        self._offloaded.clear()
        if StateKind.lp_params in self.absent:
            for bucket in self._unsharded:
                bucket.residency.show_parameters()
        self.absent = frozenset()

    def free_buffers(self) -> None:
        """Frees the buffers of gathered parameters that are not pinned, and of unreduced gradients."""
        self._gathering.reshard_all()
        self._update.finish()  # its thread uses one of the pools
        for pool in (self._gathered, self._reduction.pool, *self._update.pools):
            pool.drop_free()

    def _on_device(self, kinds: frozenset[StateKind]) -> Iterator[tuple[Tensor, slice, str]]:
        """(tensor, its rows that are offloaded, category) of all tensors of `kinds` that are on the device."""
        for piece in (piece for bucket in self._buckets for piece in bucket.pieces):
            stores = piece.stores
            if piece.states is not None and not stores.updates_on_host:
                rows = self._rows(piece, kinds=kinds)
                if rows.start < rows.stop:
                    # pyrefly: ignore[missing-attribute]  # a slot of the device's store is a DeviceSlot
                    yield piece.states.tensor, rows, "optimizer"
            for slot, store, kind, category in (
                (piece.gradient, stores.gradients, StateKind.lp_grads, "gradients"),
                (piece.parameter, stores.parameters, StateKind.lp_params, "parameters"),
                (piece.momentum, stores.optimizer, StateKind.optim_states, "optimizer"),
                (piece.average, stores.average, StateKind.optim_states, "average"),
            ):
                if slot is not None and store is not None and store.tier is Tier.device and kind in kinds:
                    # pyrefly: ignore[missing-attribute]  # a slot of the device's store is a DeviceSlot
                    yield slot.tensor, slice(None), category
        if StateKind.lp_params in kinds:
            yield from (
                (bucket.full, slice(None), "parameters") for bucket in self._unsharded if bucket.full is not None
            )
        if StateKind.lp_grads in kinds:
            yield from ((full, slice(None), "gradients") for full in self._reduction.resident_buffers())

    def _rows(self, piece: Piece, *, kinds: frozenset[StateKind]) -> slice:
        """The part of a piece's stored states along dimension 0 that belongs to `kinds`: first the master weights, if there are some, then
        the moments."""
        assert piece.states is not None
        count = piece.states.shape[0]
        moments = self._format.first_state(piece.numel, with_rows=piece.with_rows) if piece.has_master else 0
        start = 0 if StateKind.hp_params in kinds else moments
        return slice(start, count if StateKind.optim_states in kinds else moments)

    def _send(self, tensor: Tensor, *, rows: slice, category: str, pin: bool, non_blocking: bool) -> None:
        start, stop, _ = rows.indices(tensor.shape[0])
        content = tensor.data[start:stop]
        if content.device.type != "cpu":
            host = torch.empty(content.shape, dtype=content.dtype, pin_memory=pin)
            content = host.copy_(content, non_blocking=non_blocking)
        before, after = tensor.data[:start].clone(), tensor.data[stop:].clone()
        self._offloaded.append(
            _Offloaded(tensor=tensor, category=category, before=before, content=content, after=after)
        )
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._device)
        self._ledger.remove(tier=Tier.device, category=category, nbytes=content.nbytes)
        self._ledger.add(tier=Tier.host, category=category, nbytes=content.nbytes)
