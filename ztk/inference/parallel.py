"""Tensor parallelism in the engine: one rank leads, the others compute their parts of what it says.

[Note: One broadcast per step]
The leader schedules and draws; a broadcast at the beginning of a step has its tokens, their places, what happened to the cache since the step
before, and the rows whose logits are needed. Every rank computes its heads, inner columns and part of the vocabulary. Partial sums are
gathered and added in the order of the ranks, on each rank, so a row has the same bits everywhere and whatever is computed beside it; logits are
joined. Followers draw nothing, so ranks cannot disagree about a token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ztk.inference.cache import Cache
from ztk.inference.cut import Cut
from ztk.inference.describe import Description, Subject
from ztk.inference.model import InferenceModel
from ztk.inference.steps import Span
from ztk.inference.weights import Weights
from ztk.runtime.comm import Comm

BEAT_SECONDS = 2.0  # an idle leader says so this often: followers wait for it, and it hears of a follower that is gone
_INLINE = 4096  # numbers of the broadcast of a step; a longer message has a second one
_STEP, _LOCATE, _BEAT, _END = range(4)
_RESERVE, _COPY, _CLEAR = range(3)


class Ranks:
    """Sums and joins among the ranks that share a model. comm: theirs."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.cut = comm, Cut(rank=comm.rank, size=comm.size)

    def sum(self, partial: Tensor) -> Tensor:
        """Of all ranks' partial, fp32 [M, C], in their order."""
        parts = self._gathered(partial)
        found = parts[0] + parts[1]
        for part in parts[2:]:
            found += part
        return found

    def join(self, part: Tensor) -> Tensor:
        """All ranks' columns: fp32 [M, N] -> [M, size N]."""
        return torch.cat(list(self._gathered(part)), dim=1)

    def join_keys(self, part: Tensor, *, description: Description) -> Tensor:
        """The columns of all key heads, each once: fp32 [M, own heads D] -> [M, all heads D]."""
        copies = max(1, self.cut.size // description.kv_heads)
        return torch.cat(list(self._gathered(part)[::copies]), dim=1)

    def _gathered(self, part: Tensor) -> Tensor:
        with torch.inference_mode(False):  # the thread that communicates writes into it
            full = torch.empty(self.cut.size, *part.shape)
        full[self.cut.rank] = part
        self.comm.all_gather(full.view(-1), label="inference").wait()
        return full


class RecordedCache(Cache):
    """The leader's cache, which remembers what was done to it for the others."""

    def __init__(self, description: Description, *, slots: int) -> None:
        super().__init__(description, slots=slots)
        self.log: list[int] = []

    def reserve(self, positions: int) -> None:
        if positions > self.positions:
            self.log += [_RESERVE, positions, 0, 0]
        super().reserve(positions)

    def copy(self, source: int, *, target: int, positions: int) -> None:
        self.log += [_COPY, source, target, positions]
        super().copy(source, target=target, positions=positions)

    def clear(self, slot: int) -> None:
        self.log += [_CLEAR, slot, 0, 0]
        super().clear(slot)


class LeadingModel(InferenceModel):
    """The model on rank 0: what it is asked to compute, all ranks compute."""

    def __init__(self, subject: Subject, *, weights: Weights, ranks: Ranks) -> None:
        super().__init__(subject, weights=weights, ranks=ranks)
        self._channel = Channel(ranks.comm)

    def new_cache(self, *, slots: int) -> Cache:
        return RecordedCache(self.description, slots=slots)

    def step_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int]) -> Tensor:
        assert isinstance(cache, RecordedCache), "new_cache has made it"
        log, cache.log = cache.log, []
        self._channel.send(_STEP, tokens.tolist(), log, _flat(spans), rows)
        return super().step_logits(tokens, spans=spans, cache=cache, rows=rows)

    def first_broken(self, tokens: list[int]) -> int | None:
        self._channel.send(_LOCATE, tokens)
        return super().first_broken(tokens)

    def beat(self) -> None:
        """Says that it is idle."""
        self._channel.send(_BEAT)

    def dismiss(self) -> None:
        """Ends `follow` on the others."""
        self._channel.send(_END)


def follow(model: InferenceModel, *, cache: Cache, ranks: Ranks) -> None:
    """Computes this rank's part of what the leader is asked, until it dismisses the others.

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
            _repeat(log, cache=cache)
            model.step_logits(torch.tensor(tokens), spans=_spans(spans), cache=cache, rows=rows)
        elif kind == _LOCATE:
            model.first_broken(lists[0])


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
        """On the others: (kind, list, ...)."""
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


def _flat(spans: list[Span]) -> list[int]:
    return [number for span in spans for number in (span.slot, span.start, span.length, span.row)]


def _spans(numbers: list[int]) -> list[Span]:
    four = (numbers[at : at + 4] for at in range(0, len(numbers), 4))
    return [Span(slot=slot, start=start, length=length, row=row) for slot, start, length, row in four]


def _repeat(log: list[int], *, cache: Cache) -> None:
    """What happened to the leader's cache happens to this one."""
    for at in range(0, len(log), 4):
        what, first, second, third = log[at : at + 4]
        if what == _RESERVE:
            cache.reserve(first)
        elif what == _COPY:
            cache.copy(first, target=second, positions=third)
        else:
            cache.clear(first)
