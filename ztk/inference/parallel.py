"""Tensor parallelism in the engine: one rank leads, the others compute their parts of its steps.

[Note: One broadcast per step]
The leader schedules and draws. A broadcast at the beginning of a step has its tokens, their places, changes of the cache since the last
step, and the rows whose logits are needed. Every rank computes its heads, inner columns and part of the vocabulary. Partial sums are
gathered and added in the order of the ranks, on each rank, so a row has the same bits everywhere and in any step; logits are joined.
Followers draw nothing, so ranks cannot disagree about a token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ztk.core.runtime.comm import Comm
from ztk.inference.base import Model
from ztk.inference.cache import Cache
from ztk.inference.ranks import Ranks, computing
from ztk.inference.steps import Span

BEAT_SECONDS = 2.0  # interval of an idle leader's beats: followers wait for them, and they detect lost followers
_INLINE = 4096  # numbers of the broadcast of a step; a longer message has a second one
_STEP, _LOCATE, _BEAT, _END = range(4)


class Computing:
    """Steps of `model` over `cache`, by this process alone. `Generator.load` replaces the model."""

    def __init__(self, model: Model, *, cache: Cache) -> None:
        self.model, self.cache = model, cache

    def logits(self, tokens: list[int], *, spans: list[Span], rows: list[int]) -> Tensor:
        """One step: fp32 [len(rows), V] of those rows, on the device."""
        return self.model.own_logits(torch.tensor(tokens), spans=spans, cache=self.cache, rows=rows)

    def first_broken(self, tokens: list[int], *, slot: int, rows: int, adapter: int) -> int | None:
        """The first layer whose output is not finite, for the sequence in `slot`, which is computed again, alone, in its own memory. None if
        all are finite. rows: of a step at most. adapter: the sequence's."""
        computed, found = self.cache.recompute(slot, tokens=tokens), []
        for start in range(0, len(computed), rows):
            part = computed[start : start + rows]
            span = Span(slot=slot, start=start, length=len(part), row=0, adapter=adapter)
            found.append(self.model.own_broken(part, span=span, cache=self.cache))
        return min((number for number in found if number is not None), default=None)


class Leading(Computing):
    """Rank 0: sends each call to the other ranks, which compute it over their parts of the model."""

    def __init__(self, model: Model, *, cache: Cache, ranks: Ranks) -> None:
        super().__init__(model, cache=cache)
        self._channel, self._ranks = Channel(ranks.comm), ranks
        cache.record()

    def logits(self, tokens: list[int], *, spans: list[Span], rows: list[int]) -> Tensor:
        with computing(self._ranks):
            flat = [number for one in spans for number in (one.slot, one.start, one.length, one.row, one.adapter)]
            self._channel.send(_STEP, tokens, self.cache.take_log(spans), flat, rows)
            return super().logits(tokens, spans=spans, rows=rows)

    def first_broken(self, tokens: list[int], *, slot: int, rows: int, adapter: int) -> int | None:
        with computing(self._ranks):
            self._channel.send(_LOCATE, tokens, self.cache.take_log([]), [slot, rows, adapter])
            return super().first_broken(tokens, slot=slot, rows=rows, adapter=adapter)

    def beat(self) -> None:
        """Notifies the followers that the leader is idle."""
        self._channel.send(_BEAT)

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks."""
        self._channel.send(_END)


def follow(own: Computing, *, ranks: Ranks) -> None:
    """Computes this rank's part of the leader's steps, until the leader dismisses the others.

    Raises:
        PeerLost: the leader is gone.
    """
    channel = Channel(ranks.comm)
    while True:
        kind, *lists = channel.receive()
        if kind == _END:
            return
        if kind == _STEP:
            tokens, log, spans, rows = lists
            own.cache.repeat(log)
            own.logits(tokens, spans=_spans(spans), rows=rows)
        elif kind == _LOCATE:
            tokens, log, (slot, rows, adapter) = lists
            own.cache.repeat(log)
            own.first_broken(tokens, slot=slot, rows=rows, adapter=adapter)


class Channel:
    """Messages of numbers from rank 0: a kind and lists, in one broadcast unless they are long."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def send(self, kind: int, *lists: Sequence[int]) -> None:
        """On rank 0."""
        message = [kind, len(lists), *map(len, lists)]
        for numbers in lists:
            message += numbers
        first = torch.zeros(_INLINE, dtype=torch.int64)
        head = [len(message), *message[: _INLINE - 1]]
        first[: len(head)] = torch.tensor(head)
        self._broadcast(first)
        if len(message) >= _INLINE:
            self._broadcast(torch.tensor(message))

    def receive(self) -> tuple:
        """Receives (kind, list, ...) on the other ranks."""
        first = self._broadcast(torch.zeros(_INLINE, dtype=torch.int64)).tolist()
        message = first[1 : 1 + first[0]]
        if first[0] >= _INLINE:
            message = self._broadcast(torch.zeros(first[0], dtype=torch.int64)).tolist()
        kind, count = message[:2]
        sizes, at, lists = message[2 : 2 + count], 2 + count, []
        for size in sizes:
            lists.append(message[at : at + size])
            at += size
        return kind, *lists

    def _broadcast(self, numbers: Tensor) -> Tensor:
        with torch.inference_mode(False):
            memory = numbers.clone()
        self._comm.broadcast(memory, source=0, label="inference step").wait()
        return memory


def _spans(numbers: list[int]) -> list[Span]:
    five = (numbers[at : at + 5] for at in range(0, len(numbers), 5))
    return [
        Span(slot=slot, start=start, length=length, row=row, adapter=adapter)
        for slot, start, length, row, adapter in five
    ]
