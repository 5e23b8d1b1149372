"""The state for a checkpoint: every element once over all ranks, in ranges of one parameter and kind."""

from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.core.runtime.part import Part
from ztk.optim.states import FROZEN, MASTER
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.layout import Fragment
from ztk.zero.buckets.piece import Piece
from ztk.zero.gathering import Gathering
from ztk.zero.update.piece_states import PieceStates
from ztk.zero.update.update import ShardUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSlice:
    """This rank's elements [start, stop) of one parameter's flat state.

    kind: "master" (the weights; the parameter is their cast), a name of the optimizer's states, or "parameter" for a frozen
    parameter, which has nothing else. start and stop count the elements of the part that this rank holds of the parameter.
    """

    name: str
    kind: str
    part: Part
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShard(StateSlice):
    """A slice with its values."""

    value: Tensor  # [stop - start]


class ModelState:
    """Reads and sets the state of `buckets`, piece by piece."""

    def __init__(
        self, buckets: list[Bucket], *, context: ZeroContext, update: ShardUpdate, gathering: Gathering
    ) -> None:
        self._buckets, self._parts, self._states = buckets, context.parts, PieceStates(context)
        self._update, self._gathering = update, gathering
        self._dtypes = context.state_dtypes

    def part_of(self, name: str, *, bucket: Bucket) -> Part:
        """The part of parameter `name`, in `bucket`, that this rank holds."""
        return self._parts.get(name) or Part.everything(bucket.layout.placement(name).shape)

    # Save

    def slices(self) -> Iterator[StateSlice]:
        """The slices of `shards`, in the same order, without their values. Does not access the stores."""
        for bucket, piece in self._saved_pieces():
            kinds = {FROZEN: bucket.traits.dtype}
            if piece.states is not None:
                kinds = self._dtypes
            for kind, dtype in kinds.items():
                for fragment in piece.fragments:
                    yield StateSlice(dtype=dtype, **self._address(fragment, kind=kind, bucket=bucket))

    def shards(self, *, aside: bool = False) -> Generator[StateShard, None, None]:
        """Every state element of the model exactly once over all ranks. A shard's values are valid until the next one.

        aside: for another thread than the training thread, after `before_change`; pieces pass through separate memory.
        """
        self._update.await_last() if aside else self._update.finish()
        for bucket, piece in self._saved_pieces():
            with self._states.reading(bucket, piece=piece, aside=aside) as states:
                for kind, values in states.items():
                    for fragment in piece.fragments:
                        address = self._address(fragment, kind=kind, bucket=bucket)
                        yield StateShard(dtype=values.dtype, value=values[fragment.place], **address)

    def parameters(self) -> Iterator[StateShard]:
        """The elements of all parameters that this rank saves, in the model's dtype, without other states: each once over all ranks. Values
        are valid until the next ones."""
        self._update.finish()
        for bucket, piece in self._saved_pieces():
            values = self._states.parameter(bucket, piece=piece)
            for fragment in piece.fragments:
                address = self._address(fragment, kind=FROZEN, bucket=bucket)
                yield StateShard(dtype=values.dtype, value=values[fragment.place], **address)

    def before_change(self, action: Callable[[], None]) -> None:
        """Calls `action()` once, before the next update or other change of the state."""
        self._update.before_change(action)

    def _address(self, fragment: Fragment, *, kind: str, bucket: Bucket) -> dict[str, object]:
        """All fields of a slice except its dtype."""
        part = self.part_of(fragment.name, bucket=bucket)
        return {"name": fragment.name, "kind": kind, "part": part, "start": fragment.start, "stop": fragment.stop}

    def _saved_pieces(self) -> Iterator[tuple[Bucket, Piece]]:
        """The pieces that this rank saves: its own shards, also at stage 0, where it has all. Of several copies, one rank saves its
        copy."""
        for bucket in self._buckets:
            if bucket.traits.counted:
                yield from ((bucket, piece) for piece in bucket.own_pieces)

    # Load

    def load(self, read: Callable[..., Tensor], *, keep: Container[str] = ()) -> int:
        """Sets this rank's state from `read(name=, kind=, start=, stop=) -> Tensor [stop - start]`, piece by piece.

        keep: names of parameters that stay unchanged, with their optimizer states.
        A local call, after which all ranks call `share_parameters`. Raises RuntimeError if parameters are pinned.
        Returns the number of groups of 8-bit states that had to be rounded: 0 for a checkpoint of the same states and parts.
        """
        before = self._states.num_rounded
        self._gathering.reshard_before_change()
        self._update.finish()  # takes over writes of a script, which the load would hide
        self._gathering.parameters_change()
        for bucket in self._buckets:
            if all(placement.name in keep for placement in bucket.layout.placements):
                continue
            for piece in bucket.pieces:
                self._load_master(bucket, piece=piece, read=read, keep=keep)
                if piece.states is not None:
                    self._load_moments(piece, read=read, keep=keep)
        return self._states.num_rounded - before

    def loaded(self) -> Iterator[tuple[str, Part, int, int]]:
        """Name, part, start and stop of the ranges that `load` reads on this rank, of every kind of state. Does not access the stores."""
        for bucket in self._buckets:
            for piece in bucket.pieces:
                for fragment in piece.fragments:
                    yield fragment.name, self.part_of(fragment.name, bucket=bucket), fragment.start, fragment.stop

    def share_parameters(self) -> None:
        """Makes parameters that are never sharded full on all ranks after `load`. A collective call."""
        for bucket in self._buckets:
            bucket.share_parameters()

    def _load_master(self, bucket: Bucket, *, piece: Piece, read: Callable[..., Tensor], keep: Container[str]) -> None:
        values = torch.zeros(piece.numel, dtype=torch.float32)
        if any(fragment.name in keep for fragment in piece.fragments):
            with self._states.reading(bucket, piece=piece) as states:
                values.copy_(next(iter(states.values())))
        _read_into(values, piece=piece, kind=FROZEN if piece.states is None else MASTER, read=read, keep=keep)
        self._states.set_master(bucket, piece=piece, values=values)

    def _load_moments(self, piece: Piece, *, read: Callable[..., Tensor], keep: Container[str]) -> None:
        with self._states.changing(piece) as rows:
            for kind in self._states.names:
                values = torch.zeros(piece.numel, dtype=torch.float32)
                if any(fragment.name in keep for fragment in piece.fragments):
                    values.copy_(rows[kind])
                _read_into(values, piece=piece, kind=kind, read=read, keep=keep)
                rows[kind].copy_(values)


def _read_into(values: Tensor, *, piece: Piece, kind: str, read: Callable[..., Tensor], keep: Container[str]) -> None:
    """Reads the fragments of a piece into `values`, fp32 [n], except names in `keep`."""
    for fragment in piece.fragments:
        if fragment.name not in keep:
            values[fragment.place] = read(name=fragment.name, kind=kind, start=fragment.start, stop=fragment.stop)
