"""Tensor parallelism in the engine: one rank leads, the others compute their parts of what it says.

[Note: One broadcast per step]
The leader schedules and draws; a broadcast at the beginning of a step has its tokens, their places, what happened to the cache since the step
before, and the rows whose logits are needed. Every rank computes its heads, inner columns and part of the vocabulary. Partial sums are
gathered and added in the order of the ranks, on each rank, so a row has the same bits everywhere and whatever is computed beside it; logits are
joined. Followers draw nothing, so ranks cannot disagree about a token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.core.runtime.comm import Comm
from ztk.inference.block_cache import BlockCache
from ztk.inference.block_model import BlockModel
from ztk.inference.block_swap import Swap
from ztk.inference.block_weights import BlockWeights
from ztk.inference.cache import Cache
from ztk.inference.describe import Subject
from ztk.inference.model import InferenceModel
from ztk.inference.module_model import ModuleModel
from ztk.inference.module_stream import StreamedModuleModel
from ztk.inference.over_blocks import OverBlocks
from ztk.inference.over_slabs import OverSlabs
from ztk.inference.ranks import Ranks
from ztk.inference.recorded import RecordedBlocks, RecordedCache, Repeating
from ztk.inference.steps import Span
from ztk.inference.weights import Weights

BEAT_SECONDS = 2.0  # an idle leader says so this often: followers wait for it, and it hears of a follower that is gone
_INLINE = 4096  # numbers of the broadcast of a step; a longer message has a second one
_STEP, _LOCATE, _BEAT, _END = range(4)


class Leading:
    """A model on rank 0: what it is asked to compute, all ranks compute."""

    def __init__(self, ranks: Ranks) -> None:
        self._channel = Channel(ranks.comm)

    def tell_step(self, tokens: Tensor, *, spans: list[Span], log: list[int], rows: list[int]) -> None:
        """The others compute this step: tokens int64 [M]."""
        self._channel.send(_STEP, tokens.tolist(), log, _flat(spans), rows)

    def tell_to_locate(self, tokens: list[int], *, log: Sequence[int] = (), slot: int = 0, rows: int = 0) -> None:
        """The others compute a sequence once more, alone, in its slot, so many rows at a time."""
        self._channel.send(_LOCATE, tokens, log, [slot, rows])

    def beat(self) -> None:
        """Says that it is idle."""
        self._channel.send(_BEAT)

    def dismiss(self) -> None:
        """Ends `follow` on the others."""
        self._channel.send(_END)


class LeadingOverSlabs(Leading, OverSlabs):
    """In front of a model over slabs; tensors are those of the model, of the same shapes and dtypes: fp32 [R, V] logits."""

    def new_cache(self, *, slots: int) -> Cache:
        return RecordedCache(self.description, slots=slots)

    def step_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int]) -> Tensor:
        assert isinstance(cache, RecordedCache), "new_cache has made it"
        self.tell_step(tokens, spans=spans, log=cache.take_log(), rows=rows)
        return super().step_logits(tokens, spans=spans, cache=cache, rows=rows)

    def first_broken(self, tokens: list[int], *, cache: Cache, slot: int, rows: int) -> int | None:
        assert isinstance(cache, RecordedCache), "new_cache has made it"
        self.tell_to_locate(tokens, log=cache.take_log(), slot=slot, rows=rows)
        return super().first_broken(tokens, cache=cache, slot=slot, rows=rows)


class LeadingModel(LeadingOverSlabs, InferenceModel):
    """By the engine's own forward."""

    def __init__(self, subject: Subject, *, weights: Weights, ranks: Ranks) -> None:
        InferenceModel.__init__(self, subject, weights=weights, ranks=ranks)
        Leading.__init__(self, ranks)


class LeadingBlockModel(Leading, BlockModel):
    """Over blocks; tensors are those of `BlockModel`, of the same shapes and dtypes: fp32 [R, V] logits."""

    def __init__(self, subject: Subject, *, weights: BlockWeights, exact: bool, ranks: Ranks) -> None:
        BlockModel.__init__(self, subject, weights=weights, exact=exact, ranks=ranks)
        Leading.__init__(self, ranks)

    def new_cache(
        self, *, slots: int, blocks: int, dtype: torch.dtype | None = None, swap: Swap | None = None
    ) -> BlockCache:
        of, kind = self.description, self.dtype if dtype is None else dtype
        return RecordedBlocks(of, slots=slots, blocks=blocks, device=self.device, dtype=kind, swap=swap)

    def step_logits(self, tokens: Tensor, *, spans: list[Span], cache: BlockCache, rows: list[int]) -> Tensor:
        assert isinstance(cache, RecordedBlocks), "new_cache has made it"
        self.tell_step(tokens, spans=spans, log=cache.take_log(spans), rows=rows)
        return self.own_logits(tokens, spans=spans, cache=cache, rows=rows)

    def first_broken(self, tokens: list[int], *, cache: BlockCache, slot: int, rows: int) -> int | None:
        assert isinstance(cache, RecordedBlocks), "new_cache has made it"
        self.tell_to_locate(tokens, log=cache.take_log([]), slot=slot, rows=rows)
        return super().first_broken(tokens, cache=cache, slot=slot, rows=rows)


class LeadingModuleModel(LeadingOverSlabs, ModuleModel):
    """By a model's own modules. state: parameters of any shape and dtype."""

    def __init__(self, module: Any, *, state: Mapping[str, Tensor], kind: str, ranks: Ranks) -> None:
        ModuleModel.__init__(self, module, state=state, kind=kind, ranks=ranks)
        Leading.__init__(self, ranks)


class LeadingStreamedModuleModel(LeadingOverSlabs, StreamedModuleModel):
    """By a model's own modules, whose layers are read. state: parameters of any shape and dtype."""

    def __init__(self, module: Any, *, state: Mapping[str, Tensor], kind: str, folder: Path, ranks: Ranks) -> None:
        StreamedModuleModel.__init__(self, module, state=state, kind=kind, folder=folder, ranks=ranks)
        Leading.__init__(self, ranks)


def follow(model: InferenceModel | ModuleModel | OverBlocks, *, cache: Cache | BlockCache, ranks: Ranks) -> None:
    """Computes this rank's part of what the leader is asked, until it dismisses the others.

    Raises:
        PeerLost: the leader is gone.
    """
    channel, repeating = Channel(ranks.comm), Repeating(cache)
    while True:
        kind, *lists = channel.receive()
        if kind == _END:
            return
        if kind == _STEP:
            tokens, log, spans, rows = lists
            repeating.repeat(log)
            model.step_logits(torch.tensor(tokens), spans=_spans(spans), cache=cache, rows=rows)
        elif kind == _LOCATE:
            tokens, log, (slot, rows) = lists
            repeating.repeat(log)
            first_broken(tokens, model=model, cache=cache, slot=slot, rows=rows)


def first_broken(
    tokens: list[int],
    *,
    model: InferenceModel | ModuleModel | OverBlocks,
    cache: Cache | BlockCache,
    slot: int,
    rows: int,
) -> int | None:
    """The first layer whose output is not finite, of a sequence that is computed once more, alone; None: all are. slot: its own. rows: of a
    step at most."""
    if isinstance(model, OverBlocks):
        assert isinstance(cache, BlockCache), "the model computes over blocks"
        return model.first_broken(tokens, cache=cache, slot=slot, rows=rows)
    assert isinstance(cache, Cache), "the model computes over slabs"
    return model.first_broken(tokens, cache=cache, slot=slot, rows=rows)


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
