"""A piece's states, read and changed one piece at a time, in whatever store they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ztk.zero.bucket import Bucket
from ztk.zero.context import AVERAGE, ZeroContext
from ztk.zero.piece import Piece

MASTER, FROZEN, GRADIENT = (
    "master",
    "parameter",
    "gradient",
)  # kinds of state, beside the names of the optimizer's states


def rows_by_kind(states: Tensor, *, names: Sequence[str]) -> dict[str, Tensor]:
    """The rows [n] of a piece's states [k, n]: "master" unless the parameter is its own master, then `names`."""
    kinds = names if states.shape[0] == len(names) else (MASTER, *names)
    return dict(zip(kinds, states, strict=True))


class PieceStates:
    """Reads and changes the states of pieces. names: of the optimizer's states, and of the average of the weights if it is kept."""

    def __init__(self, context: ZeroContext) -> None:
        self._stores, self.names = context.stores, context.state_names

    @contextmanager
    def reading(self, bucket: Bucket, *, piece: Piece, aside: bool = False) -> Iterator[dict[str, Tensor]]:
        """The states by kind, fp32: "master" and the optimizer's, or "parameter" alone for a frozen bucket, each flat [n]. Valid inside.

        aside: for another thread than the one that trains; states pass through memory of their own.
        """
        if piece.states is None:
            yield {FROZEN: self.parameter(bucket, piece=piece)}
            return
        if aside:
            memory = torch.empty(piece.states.shape, dtype=piece.states.dtype)
            states = self._stores.optimizer.fetch_into(piece.states, out=memory).wait()
        else:
            states = self._stores.optimizer.fetch(piece.states).wait()
        try:
            # pyrefly: ignore[missing-attribute]  # a fetch gives a tensor
            rows = rows_by_kind(states.to(torch.float32), names=self.names)
            master = rows.pop(MASTER) if MASTER in rows else self.parameter(bucket, piece=piece).to(torch.float32)
            yield {MASTER: master, **rows}
        finally:  # also when the caller stops early
            if not aside:
                self._stores.optimizer.release(piece.states)

    @contextmanager
    def changing(self, piece: Piece) -> Iterator[dict[str, Tensor]]:
        """The rows [n], fp32, of a trained piece, see `rows_by_kind`, which are written back at the end."""
        states = self._stores.optimizer.fetch(piece.states).wait()
        assert states is not None
        wide = states.to(torch.float32)
        try:
            yield rows_by_kind(wide, names=self.names)
        finally:  # a failed change must not keep a buffer of the pool
            if wide is not states:
                states.copy_(wide)
            self._stores.optimizer.put(piece.states, value=states).wait()

    @contextmanager
    def gradient(self, bucket: Bucket, *, piece: Piece, changes: bool = False) -> Iterator[Tensor]:
        """The reduced gradient [n], which may be changed inside if `changes`."""
        if piece.gradient is None:
            yield piece.of(bucket.gradient.full)
            return
        gradient = self._stores.gradients.fetch(piece.gradient).wait()
        try:
            yield gradient
        finally:
            if changes:
                self._stores.gradients.put(piece.gradient, value=gradient).wait()
            else:
                self._stores.gradients.release(piece.gradient)

    def set_master(self, bucket: Bucket, *, piece: Piece, values: Tensor) -> None:
        """Sets the master weights of a piece to `values`, fp32 [n], and the parameter to their cast."""
        self._set_parameter(bucket, piece=piece, values=values)
        if piece.states is not None and piece.states.shape[0] > len(self.names):
            with self.changing(piece) as rows:
                rows[MASTER].copy_(values)

    def start_average(self, piece: Piece, *, values: Tensor) -> None:
        """The average begins as a copy of the weights `values`, fp32 [n]; nothing where none is kept."""
        if piece.states is not None and AVERAGE in self.names:
            with self.changing(piece) as rows:
                rows[AVERAGE].copy_(values)

    def exchange_average(self, bucket: Bucket, *, piece: Piece) -> None:
        """The average of a trained piece becomes its master weights, and the other way round; the parameter follows."""
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
            self._stores.parameters.put(piece.parameter, value=parameter).wait()
        else:
            piece.of(bucket.full).copy_(parameter)

    def parameter(self, bucket: Bucket, *, piece: Piece) -> Tensor:
        """The parameter's values [n] of a piece, in its dtype; a copy where they are stored elsewhere."""
        if piece.parameter is None:
            return piece.of(bucket.full)
        out = torch.empty(piece.numel, dtype=bucket.traits.dtype, device=bucket.comm.device)
        return self._stores.parameters.fetch_into(piece.parameter, out=out).wait()
