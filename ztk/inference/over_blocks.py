"""What every model over a cache of blocks has: its cache, a step's logits, and draws from them on the device."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache
from ztk.inference.block_swap import Swap
from ztk.inference.describe import Description
from ztk.inference.ranks import Ranks
from ztk.inference.sample import Drawn, DrawSteps, changes_scores, penalised
from ztk.inference.steps import Span
from ztk.kernels import select_rows


class OverBlocks(ABC):
    """A model whose keys and values are in blocks. device, dtype: of its weights and activations. ranks: those that share it."""

    description: Description

    def __init__(self, *, device: torch.device, dtype: torch.dtype, ranks: Ranks | None) -> None:
        self.device, self.dtype, self.ranks = device, dtype, ranks

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of the products' weights and scales."""

    @abstractmethod
    def own_logits(self, tokens: Tensor, *, spans: list[Span], cache: BlockCache, rows: list[int]) -> Tensor:
        """As `step_logits`, where every rank that shares the model makes the call: tokens int64 [M]."""

    @abstractmethod
    def own_broken(self, tokens: list[int], *, span: Span, cache: BlockCache) -> int | None:
        """The first layer whose output is not finite, of rows of one sequence alone; None: all are. Every rank that shares the model makes the
        call."""

    def first_broken(self, tokens: list[int], *, cache: BlockCache, slot: int, rows: int) -> int | None:
        """The first layer whose output is not finite, of a sequence that is computed once more, alone; None: all are. It takes no memory: keys
        and values of the tokens that have been computed are written where they are, in blocks that it shares by the same numbers again. rows:
        of a step at most."""
        computed, found = tokens[: len(cache.tables[slot]) * BLOCK], []
        for start in range(0, len(computed), rows):
            part = computed[start : start + rows]
            found.append(self.own_broken(part, span=Span(slot=slot, start=start, length=len(part), row=0), cache=cache))
        return min((number for number in found if number is not None), default=None)

    def step_logits(self, tokens: Tensor, *, spans: list[Span], cache: BlockCache, rows: list[int]) -> Tensor:
        """One step: tokens int64 [M] -> logits fp32 [len(rows), V] of those rows, on the device."""
        return self.own_logits(tokens, spans=spans, cache=cache, rows=rows)

    def new_cache(
        self, *, slots: int, blocks: int, dtype: torch.dtype | None = None, swap: Swap | None = None
    ) -> BlockCache:
        """Blocks for so many sequences; dtype: of keys and values, as of `BlockCache`, None: the model's."""
        of, kind = self.description, self.dtype if dtype is None else dtype
        return BlockCache(of, slots=slots, blocks=blocks, device=self.device, dtype=kind, swap=swap)

    def scratch(self, positions: int, *, dtype: torch.dtype | None = None) -> BlockCache:
        """A cache for one sequence of so many tokens."""
        blocks = -(-positions // BLOCK)
        cache = OverBlocks.new_cache(self, slots=1, blocks=blocks, dtype=dtype)
        cache.tables[0] = list(range(blocks))
        return cache

    def select(
        self, logits: Tensor, *, steps: list[DrawSteps], temperatures: list[float], keys: list[int]
    ) -> list[Drawn]:
        """A token for each row of logits fp32 [R, V] on the device, after the sampling steps of each; keys: see `noise_key`."""
        lines = [penalised(line, steps=one) for line, one in zip(logits, steps, strict=True)]
        scores = torch.stack(lines) if any(changes_scores(one.sampling) for one in steps) else logits

        def column(values: list, *, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device)

        asked = [one.sampling for one in steps]
        results = select_rows(
            logits,
            scores,
            column(temperatures),
            column(keys, dtype=torch.int64),
            column([one.top_k for one in asked], dtype=torch.int32),
            column([one.top_p for one in asked]),
            column([one.min_p for one in asked]),
        )
        return drawn_of(torch.stack([part.double() for part in results]))


def drawn_of(results: Tensor) -> list[Drawn]:
    """fp64 [3, R] of tokens and both log-probabilities, for which the host waits once."""
    return [
        Drawn(token=int(token), logprob=logprob, processed_logprob=processed, top=None)
        for token, logprob, processed in zip(*results.cpu().tolist(), strict=True)
    ]
