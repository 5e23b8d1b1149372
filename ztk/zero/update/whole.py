"""The step of a torch optimizer over full parameters: every rank gathers weights and gradients, steps, and keeps its shards.

During the step the model's own parameter objects have their full fp32 weights and gradients and their original class, because an optimizer
may know them by identity. The ranks then compare a checksum of the new weights, since an optimizer that draws random numbers, or that
depends on the rank, would let them drift apart.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.runtime import Tier
from ztk.core.runtime.store import Slot
from ztk.kernels import Control
from ztk.optim import WholeStep
from ztk.optim.alone import Lent, lend, take_back
from ztk.optim.ema import update_average
from ztk.optim.states import MASTER
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import AVERAGE, ZeroContext
from ztk.zero.update.piece_states import PieceStates

_CATEGORY, _FULL = "optimizer states", "full parameters of the step"  # in the ledger
_DIFFER = (
    "optimizer={name}: its step gave other weights on rank {rank} than on rank 0. Every rank makes the same step over full parameters: draw "
    "random numbers from a generator with the same seed on all ranks, and do not depend on the rank"
)


class WholeUpdate:
    """Steps all parameters of `buckets` at once."""

    def __init__(self, buckets: list[Bucket], *, step: WholeStep, context: ZeroContext) -> None:
        self._buckets, self._step, self._context = buckets, step, context
        self._states, self._world = PieceStates(context), context.mesh.world
        self._on_host = context.stores.updates_on_host and context.optimizer_fraction > 0
        self.device = torch.device("cpu") if self._on_host else context.device
        self._tier = Tier.host if self._on_host else Tier.device
        self._weights: dict[Bucket, Tensor] = {}
        self._gradients: dict[Bucket, Tensor] = {}
        self._lent: dict[nn.Parameter, Lent] = {}
        self._store = context.stores.optimizer if context.stores.optimizer.tier is Tier.nvme and self._on_host else None
        self._stored: list[tuple[Tensor, Slot]] = []  # bytes [n] of the states that are on a disk
        self._free: dict[int, list[Slot]] = {}  # by size
        self._booked, self._has_stepped = 0, False

    def run(
        self,
        control: Tensor,
        *,
        skipped: frozenset[str],
        averages: bool,
        evaluate: Callable[[], Any] | None,
        after_write: Callable[[], None],
    ) -> None:
        """Steps once. control: [groups, 16]. skipped: names of parameters that have no gradient in this step.

        evaluate: computes the loss and reduced gradients again, for the optimizer's closure, and updates `control`. after_write: called
        after parameters have changed, before `evaluate`.
        """
        self._step.check_groups()
        self.fetch()
        self._gather_weights()
        self._gather_gradients(control)
        nbytes = sum(full.nbytes for full in (*self._weights.values(), *self._gradients.values()))
        self._context.ledger.add(tier=self._tier, category=_FULL, nbytes=nbytes)

        def closure() -> Any:
            assert evaluate is not None
            self._hide()
            self._write(averages=False)
            after_write()
            loss = evaluate()
            self._gather_gradients(control)
            self._show(skipped)
            return loss

        self._show(skipped)
        try:
            if self._step.has_modes and not self._has_stepped:
                self._step.set_mode("train")
            self._step.step(update=int(control[0, Control.step]), closure=None if evaluate is None else closure)
            self._check_states()
        finally:
            self._hide()
        self._check_same()
        self._write(averages=averages)
        self._weights, self._gradients = {}, {}
        self._book()
        self._context.ledger.remove(tier=self._tier, category=_FULL, nbytes=nbytes)
        self._warn_once()
        self.spill()
        self._book()

    def set_mode(self, name: str) -> None:
        """Calls `train()` or `eval()` of the optimizer, between steps."""
        self.fetch()
        self._gather_weights()
        self._show(frozenset(place.name for bucket in self._buckets for place in bucket.layout.placements))
        try:
            self._step.set_mode(name)
        finally:
            self._hide()
        self._write(averages=False)
        self._weights = {}
        self.spill()

    def _warn_once(self) -> None:
        """Warns after the first step of states that a checkpoint cannot hold."""
        if self._has_stepped:
            return
        self._has_stepped = True
        try:
            self._step.pack()
        except ValueError as error:
            if self._world.rank == 0:
                warnings.warn(f"{error}: saving a checkpoint will fail", stacklevel=2)

    # Full parameters

    def _gather_weights(self) -> None:
        for bucket in self._buckets:
            full = torch.zeros(bucket.size, dtype=torch.float32, device=bucket.comm.device)
            for piece in bucket.own_pieces:
                with self._states.reading(bucket, piece=piece) as states:
                    piece.of(full).copy_(states[MASTER])
            bucket.comm.all_gather(full, label=f"weights {bucket.traits.name}").wait()
            self._weights[bucket] = full.to(self.device)

    def _gather_gradients(self, control: Tensor) -> None:
        coefficient = control[0, Control.grad_coefficient]
        for bucket in self._buckets:
            full = torch.zeros(bucket.size, dtype=torch.float32, device=bucket.comm.device)
            for piece in bucket.own_pieces:
                with self._states.gradient(bucket, piece=piece) as gradient:
                    piece.of(full).copy_(gradient)
                if piece.gradient is not None:
                    piece.stores.gradients.forget(piece.gradient)
            bucket.comm.all_gather(full, label=f"gradients {bucket.traits.name}").wait()
            self._gradients[bucket] = full.mul_(coefficient).to(self.device)

    @torch.inference_mode(False)
    def _show(self, skipped: frozenset[str]) -> None:
        """Gives the parameter objects their full values and gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                for parameter, place in zip(bucket.parameters, bucket.layout.placements, strict=True):
                    span = slice(place.offset, place.stop)
                    gradient = None if place.name in skipped else self._gradients[bucket][span].view(place.shape)
                    value = self._weights[bucket][span].view(place.shape)
                    self._lent[parameter] = lend(parameter, value=value, gradient=gradient)

    @torch.inference_mode(False)
    def _hide(self) -> None:
        """Takes the new values and restores the parameter objects. Raises ValueError for a parameter of another shape."""
        moved, fault = [], ""
        if not self._lent:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                for parameter, place in zip(bucket.parameters, bucket.layout.placements, strict=True):
                    own = self._weights[bucket][place.offset : place.stop]
                    value = take_back(parameter, lent=self._lent.pop(parameter))
                    if value.shape != torch.Size(place.shape):
                        fault = f"{place.name} the shape {tuple(value.shape)}, and it has {tuple(place.shape)}"
                    elif value.data_ptr() != own.data_ptr() or value.stride() != own.view(place.shape).stride():
                        moved.append((own.view(place.shape), value.clone()))  # other parameters' memory may be among it
        if fault:
            raise ValueError(f"optimizer={self._step.name}: its step gave {fault}: a step may change values only")
        for own, value in moved:  # p.data = x, or p.set_(x)
            own.copy_(value)

    def _write(self, *, averages: bool) -> None:
        """Writes the full weights back to shards, parameters and the average."""
        ema = self._context.ema
        for bucket in self._buckets:
            weights = self._weights[bucket]
            for piece in bucket.pieces:
                values = piece.of(weights)
                self._states.set_master(bucket, piece=piece, values=values)
                if averages and ema is not None:
                    with self._states.changing(piece) as rows:
                        average = rows[AVERAGE]
                        update_average(average, weights=values.to(average.device), decay=ema.decay, skip=None)
            if not bucket.traits.shards_parameters:
                assert bucket.full is not None
                bucket.full.copy_(weights)

    def _check_same(self) -> None:
        """Raises RuntimeError on all ranks unless they have the same weights."""
        if self._world.size == 1:
            return
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for number, bucket in enumerate(self._buckets, start=1):
            for place in bucket.layout.placements:
                total += number * self._weights[bucket][place.offset : place.stop].view(torch.int32).sum(
                    dtype=torch.int64
                )
        high, low = divmod(int(total), 1 << 32)
        everyones = self._world.gather_numbers([high, low], label="new weights", dtype=torch.float64)
        for rank, sums in enumerate(everyones):
            if sums != everyones[0]:
                raise RuntimeError(_DIFFER.format(name=self._step.name, rank=rank))

    def _check_states(self) -> None:
        """Raises RuntimeError for a state in the memory of a parameter, which does not follow the parameter after the step."""
        storages = {weights.untyped_storage()._cdata for weights in self._weights.values()}
        for description, tensor in self._step.tensors():
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages:
                raise RuntimeError(
                    f"optimizer={self._step.name}: its {description} shares memory with a parameter, whose memory changes between steps: keep "
                    "a clone()"
                )

    # States on a disk

    def fetch(self) -> None:
        """Reads states that are on a disk into memory."""
        for memory, slot in self._stored:
            assert self._store is not None
            memory.untyped_storage().resize_(memory.numel())
            self._store.fetch_into(slot, out=memory).wait()
            self._free.setdefault(memory.numel(), []).append(slot)
        self._stored = []

    def spill(self) -> None:
        """Writes states to the disk and frees their memory, if the optimizer states are offloaded there."""
        if self._store is None:
            return
        found = {}
        for _, tensor in self._step.tensors():
            storage = tensor.untyped_storage()
            if tensor.layout is torch.strided and storage.nbytes() >= 4096 and storage.resizable():
                found[storage._cdata] = storage
        for storage in found.values():
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            free = self._free.get(memory.numel())
            if free:
                slot = free.pop()
            else:
                slot = self._store.allocate(
                    name=f"state {len(self._stored)}", shape=(memory.numel(),), dtype=torch.uint8, category=_CATEGORY
                )
            self._store.put(slot, value=memory).wait()
            self._stored.append((memory, slot))
        for memory, _ in self._stored:
            memory.untyped_storage().resize_(0)

    def _book(self) -> None:
        """Counts the states in memory."""
        nbytes = sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for _, t in self._step.tensors()}.values()
        )
        change, ledger = nbytes - self._booked, self._context.ledger
        if change:
            (ledger.add if change > 0 else ledger.remove)(tier=self._tier, category=_CATEGORY, nbytes=abs(change))
            self._booked = nbytes
