"""Speculative drafts from a smaller model (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192), with exact acceptance.

The draft model samples with the same steps and with the random number that belongs to the token's position. A draft is accepted if the large
model draws the same token with that number. Drafts therefore change no token and no log-probability at any temperature. The closer the two
models, the more drafts are accepted.
"""

import torch

from ztk.inference.base import Model
from ztk.inference.blocks import BlockPool
from ztk.inference.cache import Cache, Span
from ztk.inference.masks import NothingDrawn
from ztk.inference.requests import Sequence
from ztk.inference.sample import draw

PROMPT_TOKENS = 2048  # computed at one time


class DraftModel:
    """A small model with its own cache, which has the engine's slots. count: the largest number of proposed tokens."""

    def __init__(self, model: Model, *, count: int, cache: Cache) -> None:
        self.model, self.count, self.cache = model, count, cache
        self._contents: list[list[int]] = [[] for _ in cache.tables]
        self._pool = BlockPool(cache.blocks, tables=cache.tables, is_apart=True)

    def leave(self, slot: int) -> None:
        """Frees the blocks of a slot."""
        self._contents[slot] = []
        self._pool.release(slot, keep=False)

    def reset(self) -> None:
        """Frees the blocks of all slots."""
        for slot, _ in enumerate(self._contents):
            self.leave(slot)

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence up to so many tokens that may come next; fewer where the draft model takes no more, its cache has no room for
        more, or its logits are not finite."""
        drafts: list[list[int]] = [[] for _ in asked]
        limit = self.model.description.max_len
        counts = [min(count, limit - len(sequence.tokens)) for sequence, count in asked]
        counts = [
            count if count > 0 and self._has_room(sequence, count=count) else 0
            for (sequence, _), count in zip(asked, counts, strict=True)
        ]
        self._compute_prompts([sequence for (sequence, _), count in zip(asked, counts, strict=True) if count > 0])
        for step in range(max(counts, default=0)):
            at = [number for number, count in enumerate(counts) if count > step]
            if not at:  # the last drafts have ended before their count
                break
            rows = [(asked[number][0], drafts[number]) for number in at]
            for number, (sequence, own), line in zip(at, rows, self._logits(rows), strict=True):
                if not line.isfinite().all():
                    counts[number] = 0
                    self.cache.clear(self.cache.tables[sequence.slot])
                    self.leave(sequence.slot)
                    continue
                try:
                    own.append(draw(line, by=sequence.draw(own, vocabulary=len(line))).token)
                except NothingDrawn:  # after a guess that the model itself may never draw
                    counts[number] = 0
        return drafts

    def _has_room(self, sequence: Sequence, *, count: int) -> bool:
        """Whether the slot has blocks for the sequence and so many drafts; takes them if they are there."""
        held, stop = len(self._contents[sequence.slot]), len(sequence.tokens) + count
        return self._pool.extend(sequence.slot, start=min(held, stop), stop=stop) is not None

    def _compute_prompts(self, sequences: list[Sequence]) -> None:
        """Keys and values of all tokens but the last."""
        for sequence in sequences:
            wanted, held = sequence.tokens[:-1], self._contents[sequence.slot]
            start = common_length(held, other=wanted)
            while start < len(wanted):
                part = wanted[start : start + PROMPT_TOKENS]
                span = Span(slot=sequence.slot, start=start, length=len(part), row=0)
                self.model.own_logits(torch.tensor(part), spans=[span], cache=self.cache, rows=[])
                start += len(part)
            self._contents[sequence.slot] = wanted

    def _logits(self, rows: list[tuple[Sequence, list[int]]]) -> torch.Tensor:
        """Of the token after each sequence and its drafts so far: fp32 [len(rows), V]."""
        tokens, spans = [], []
        for row, (sequence, drafts) in enumerate(rows):
            tokens.append(drafts[-1] if drafts else sequence.tokens[-1])
            spans.append(Span(slot=sequence.slot, start=len(sequence.tokens) + len(drafts) - 1, length=1, row=row))
            self._contents[sequence.slot] = [*sequence.tokens, *drafts]
        return self.model.own_logits(torch.tensor(tokens), spans=spans, cache=self.cache, rows=list(range(len(rows))))


def common_length(first: list[int], *, other: list[int]) -> int:
    """Of the common beginning of two lists of tokens."""
    length = min(len(first), len(other))
    if first[:length] == other[:length]:
        return length
    return next(place for place in range(length) if first[place] != other[place])
