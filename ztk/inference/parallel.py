"""Tensor parallelism in the engine: one rank leads, the others compute their parts of its steps.

[Note: One broadcast per step]
The leader schedules and draws. A broadcast at the beginning of a step has its tokens, their places, changes of the cache since the last
step, and the rows whose logits are needed. Every rank computes its heads, inner columns and part of the vocabulary. Partial sums are
gathered and added in the order of the ranks, on each rank, so a row has the same bits everywhere and in any step; logits are joined.
Followers draw nothing, so ranks cannot disagree about a token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ztk.inference.base import Model
from ztk.inference.cache import Cache, Span
from ztk.inference.ranks import Ranks, computing

BEAT_SECONDS = 2.0  # interval of an idle leader's beats: followers wait for them, and they detect lost followers
_BEAT, _END, _PREPARE, _SWITCH = "beat", "end", "prepare", "switch"  # messages that are no methods of `Computing`


class Computing:
    """Steps of `model` over `cache`, by this process alone. `Generator.load` replaces the model."""

    def __init__(self, model: Model, *, cache: Cache) -> None:
        self.model, self.cache = model, cache

    def logits(self, tokens: list[int], *, spans: list[Span], rows: list[int]) -> Tensor:
        """One step: fp32 [len(rows), V] of those rows, on the device."""
        return self.model.own_logits(torch.tensor(tokens), spans=spans, cache=self.cache, rows=rows)

    def first_broken(self, tokens: list[int], *, slot: int, rows: int, adapter: int) -> int | None:
        """The first layer whose output is not finite, for the sequence in `slot`, which is computed again, alone, in its own memory. None if
        all are finite. rows: largest number in a step. adapter: the sequence's."""
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
        self._ranks = ranks
        cache.record()

    def logits(self, tokens: list[int], *, spans: list[Span], rows: list[int]) -> Tensor:
        given = {"tokens": tokens, "spans": spans, "rows": rows}
        with computing(self._ranks):
            self._ranks.tell(("logits", self.cache.take_log(spans), given))
            return super().logits(**given)

    def first_broken(self, tokens: list[int], *, slot: int, rows: int, adapter: int) -> int | None:
        given = {"tokens": tokens, "slot": slot, "rows": rows, "adapter": adapter}
        with computing(self._ranks):
            self._ranks.tell(("first_broken", self.cache.take_log([]), given))
            return super().first_broken(**given)

    def beat(self) -> None:
        """Notifies the followers that the leader is idle."""
        self._ranks.tell((_BEAT, [], {}))

    def prepare(self, folder: str) -> None:
        """Starts `Generator.prepare` on the followers."""
        self._ranks.tell((_PREPARE, self.cache.take_log([]), {"folder": folder}))

    def switch(self, folder: str) -> None:
        """Starts `Generator.switch` on the followers."""
        self._ranks.tell((_SWITCH, self.cache.take_log([]), {"folder": folder}))

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks."""
        self._ranks.tell((_END, [], {}))


def follow(own: Computing, *, ranks: Ranks, prepare: Callable[[str], object], switch: Callable[[str], object]) -> None:
    """Computes this rank's part of the leader's steps, until the leader dismisses the others. prepare: begins to read the weights of a folder.
    switch: takes them.

    Raises:
        PeerLost: the leader is gone.
    """
    while True:
        name, log, given = ranks.tell(None)
        if name == _END:
            return
        own.cache.repeat(log)
        if name in (_PREPARE, _SWITCH):
            (prepare if name == _PREPARE else switch)(given["folder"])
        elif name != _BEAT:
            getattr(own, name)(**given)
