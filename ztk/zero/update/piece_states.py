"""Reads and changes the states of one piece at a time, in any store."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ztk.core.runtime import Tier
from ztk.core.runtime.planned import host_bytes, is_planned
from ztk.core.runtime.store import Slot
from ztk.optim import eight_bit
from ztk.optim.states import FROZEN, MASTER
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import AVERAGE, ZeroContext
from ztk.zero.buckets.piece import Piece


class PieceStates:
    """Reads and changes the states of pieces. names: the optimizer's states, and the average of the weights if it is kept.

    num_rounded: groups of 8-bit states that were set to values without an exact code, see `ztk.optim.eight_bit`.
    """

    def __init__(self, context: ZeroContext) -> None:
        self._format, self.names = context.states, context.state_names
        self.num_rounded, self._is_planned = 0, is_planned(context.device)

    @contextmanager
    def reading(self, bucket: Bucket, *, piece: Piece, aside: bool = False) -> Iterator[dict[str, Tensor]]:
        """The states by kind: "master" and the optimizer's, or "parameter" alone for a frozen bucket, each flat [n], in the dtypes of
        `StateFormat.read_dtypes`. Valid inside the context.

        aside: for another thread than the training thread; states pass through separate memory.
        """
        if piece.states is None:
            yield {FROZEN: self.parameter(bucket, piece=piece)}
            return
        with (
            self._fetched(piece, slot=piece.states, aside=aside) as states,
            self._fetched(piece, slot=piece.momentum, aside=aside) as momentum,
        ):
            rows = self._views(piece, states=states)
            if piece.moments is not None:
                rows = piece.moments.spread(rows, momentum=momentum, numel=piece.numel)
            master = rows.pop(MASTER) if MASTER in rows else self.parameter(bucket, piece=piece)
            with self.average(piece, aside=aside) as apart:
                yield self._format.read(rows, master=master) | apart

    @contextmanager
    def _fetched(self, piece: Piece, *, slot: Slot | None, aside: bool) -> Iterator[Any]:
        """The tensor of a slot of the piece's optimizer store; None without a slot."""
        store = piece.stores.optimizer
        if slot is None:
            yield None
        elif aside:
            memory = torch.empty(slot.shape, dtype=slot.dtype)
            yield store.fetch_into(slot, out=memory).wait()
        else:
            fetched = store.fetch(slot).wait()
            try:
                yield fetched
            finally:  # also if the caller stops early
                store.release(slot)

    @contextmanager
    def changing(self, piece: Piece) -> Iterator[dict[str, Tensor]]:
        """The states [n] of a trained piece by kind, "master" only if it has a row. They are written back at the end."""
        with self._rows(piece) as rows, self.average(piece, changes=True) as apart:
            if piece.moments is not None:
                with self._changed(piece, slot=piece.momentum) as momentum:
                    full = piece.moments.spread(rows, momentum=momentum, numel=piece.numel)
                    yield full | apart
                    piece.moments.gather(full, rows=rows, momentum=momentum)
                return
            if not self._format.is_eight_bit:
                yield rows | apart
                return
            moments = eight_bit.read_moments(rows)
            master = {MASTER: eight_bit.read_master(rows[MASTER], rows=rows)} if MASTER in rows else {}
            yield master | moments | apart
            for values in master.values():
                self._write_master(rows, values=values)
            self.num_rounded += eight_bit.write_moments(rows, **moments)

    @contextmanager
    def average(self, piece: Piece, *, changes: bool = False, aside: bool = False) -> Iterator[dict[str, Tensor]]:
        """The average of a trained piece if it is stored on a tier of its own, fp32 [n] under `AVERAGE`, on the device or in main memory;
        else an empty dict. changes: writes it back at the end. aside: the same as in `reading`."""
        store = piece.stores.average
        if store is None or piece.average is None:
            yield {}
            return
        if aside or store.tier is Tier.nvme:  # not through the pool, whose buffers the states may take
            memory = (
                host_bytes(4 * piece.numel) if self._is_planned else torch.empty(4 * piece.numel, dtype=torch.uint8)
            )
            values = store.fetch_into(piece.average, out=memory.view(torch.float32)).wait()
        else:
            values = store.fetch(piece.average).wait()
        assert values is not None, "a fetch has a value"
        yield {AVERAGE: values}
        if changes:
            store.put(piece.average, value=values).wait()

    @contextmanager
    def _rows(self, piece: Piece) -> Iterator[dict[str, Tensor]]:
        """The rows of a trained piece as they are stored. They are written back at the end."""
        with self._changed(piece, slot=piece.states) as states:
            yield self._views(piece, states=states)

    @contextmanager
    def _changed(self, piece: Piece, *, slot: Slot | None) -> Iterator[Tensor]:
        """The tensor of a slot of the piece's optimizer store. It is written back at the end."""
        assert slot is not None, "of a trained piece"
        fetched = piece.stores.optimizer.fetch(slot).wait()
        assert fetched is not None, "a fetch has a value"
        try:
            yield fetched
        finally:  # a failed change must not keep a buffer of the pool
            piece.stores.optimizer.put(slot, value=fetched).wait()

    def _views(self, piece: Piece, *, states: Tensor) -> dict[str, Tensor]:
        """The rows of a piece's stored states by name."""
        given = {"numel": piece.numel, "has_master": piece.has_master, "with_rows": piece.with_rows}
        return self._format.views(states, **given)

    @contextmanager
    def gradient(self, bucket: Bucket, *, piece: Piece, changes: bool = False) -> Iterator[Tensor]:
        """The reduced gradient [n], which may be changed inside if `changes`."""
        if piece.gradient is None:
            yield piece.of(bucket.gradient.full)
            return
        gradient = piece.stores.gradients.fetch(piece.gradient).wait()
        assert gradient is not None, "a fetch has a value"
        try:
            yield gradient
        finally:
            if changes:
                piece.stores.gradients.put(piece.gradient, value=gradient).wait()
            else:
                piece.stores.gradients.release(piece.gradient)

    def set_master(self, bucket: Bucket, *, piece: Piece, values: Tensor) -> None:
        """Sets the master weights of a piece to `values`, fp32 [n], and the parameter to their cast."""
        if piece.states is None:
            self._set_parameter(bucket, piece=piece, values=values)
            return
        self._set_parameter(bucket, piece=piece, values=self._format.cast(values, dtype=bucket.traits.dtype))
        if piece.has_master or self._format.is_eight_bit:
            with self._rows(piece) as rows:
                self._write_master(rows, values=values)

    def _write_master(self, rows: dict[str, Tensor], *, values: Tensor) -> None:
        """Sets the rows of the master weights in `rows` from `values`, fp32 [n]."""
        if not self._format.is_eight_bit:
            rows[MASTER].copy_(values)
            return
        high, low = eight_bit.split(values)
        rows["low"].copy_(low)
        if MASTER in rows:
            rows[MASTER].copy_(high)

    def follows(self, piece: Piece) -> bool:
        """Whether the states contain master weights, or a part of them, that must follow a new value of the parameter."""
        return piece.states is not None and (piece.has_master or self._format.is_eight_bit)

    def follow(self, bucket: Bucket, *, piece: Piece, places: Iterable[tuple[slice, bool]]) -> None:
        """Updates master weights after a script may have changed parameters that are full on every rank. A master weight whose cast differs
        from the parameter takes the parameter's value; the others keep their precision. places: (elements of the piece, whether they were
        certainly written).

        8-bit states: a parameter that is its own master has no copy to compare with. So, on every tier alike, a certain write clears the
        extra bits. Otherwise `low`, at most half a unit in the last place, stays, except where the value is 0 or not finite, because it
        would decode to NaN.
        """
        with self._rows(piece) as rows:
            for place, is_written in places:
                value = piece.of(bucket.full)[place]
                if self._format.is_eight_bit:
                    low = rows["low"][place]
                    value = value.to(low.device)
                    low.mul_(torch.isfinite(value) & (value != 0) & (not is_written))
                    if MASTER in rows:
                        rows[MASTER][place].copy_(value)
                else:
                    master = rows[MASTER][place]
                    value = value.to(master.device)
                    master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))

    def start_average(self, piece: Piece, *, values: Tensor) -> None:
        """Starts the average as a copy of the weights `values`, fp32 [n]. Does nothing if no average is kept."""
        if piece.states is not None and AVERAGE in self.names:
            with self.changing(piece) as rows:
                rows[AVERAGE].copy_(values)

    def exchange_average(self, bucket: Bucket, *, piece: Piece) -> None:
        """Exchanges the average of a trained piece and its master weights; the parameter follows."""
        with self.changing(piece) as rows:
            average = rows[AVERAGE].clone()
            if MASTER in rows:
                rows[AVERAGE].copy_(rows[MASTER])
                rows[MASTER].copy_(average)
            else:
                rows[AVERAGE].copy_(self.parameter(bucket, piece=piece))
        self._set_parameter(bucket, piece=piece, values=average)

    def _set_parameter(self, bucket: Bucket, *, piece: Piece, values: Tensor) -> None:
        bucket.exchange.invalidate()
        parameter = values.to(bucket.traits.dtype)
        if piece.parameter is not None:
            piece.stores.parameters.put(piece.parameter, value=parameter).wait()
        else:
            piece.of(bucket.full).copy_(parameter)

    def parameter(self, bucket: Bucket, *, piece: Piece) -> Tensor:
        """The parameter's values [n] of a piece, in its dtype; a copy if they are stored elsewhere."""
        if piece.parameter is None:
            return piece.of(bucket.full)
        out = torch.empty(piece.numel, dtype=bucket.traits.dtype, device=bucket.comm.device)
        return piece.stores.parameters.fetch_into(piece.parameter, out=out).wait()
