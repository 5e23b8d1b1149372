"""Keys and values of answers that are drawn in step, several to each prompt. Blocks filled by a prompt are stored once for all its
answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.inference.attention import BLOCK
from ztk.inference.slab_cache import SlabCache


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Keys, or values, of one layer. shared: full blocks of prompts, [blocks, prompts, K, BLOCK, D]; finite numbers beyond a prompt's end.

    own: the following blocks of each answer, [blocks, answers, K, BLOCK, D].
    """

    shared: Tensor
    own: Tensor


class AnswerCache:
    """keys[layer] and values[layer] of A answers; own[layer]: their own blocks, of keys and of values, [2, blocks, A, K, BLOCK, D].

    live: number of answers that continue; they are in the first places.
    prompts: of every prompt, in the slot of its number. lengths: their tokens. prompt_of: number of each answer's prompt. longest: tokens of an
    answer at most. shares: blocks that prompts fill are stored once; else every answer has a copy.

    filled: full blocks of each prompt that are shared. blocks: of an answer's own, at most.
    """

    def __init__(
        self, prompts: SlabCache, *, lengths: Sequence[int], prompt_of: Sequence[int], longest: int, shares: bool
    ) -> None:
        self.filled = [length // BLOCK if shares else 0 for length in lengths]
        self.prompt_of, self.live = list(prompt_of), len(prompt_of)
        pairs = list(zip(lengths, self.filled, strict=True))
        self.blocks = max(-(-(length + longest) // BLOCK) - own for length, own in pairs)
        self._opened = 0
        size = (2, self.blocks, self.live, *prompts.keys[0].shape[2:])
        self.own = [prompts.keys[0].new_empty(size) for _ in prompts.keys]
        self.keys, self.values = (
            [
                Kept(shared=slab[:, : max(self.filled)].transpose(0, 1).contiguous(), own=both[which])
                for slab, both in zip(slabs, self.own, strict=True)
            ]
            for which, slabs in enumerate((prompts.keys, prompts.values))
        )
        self.open(max(-(-length // BLOCK) - own for length, own in pairs))
        for prompt, (length, filled) in enumerate(pairs):
            answers = torch.tensor([answer for answer, of in enumerate(prompt_of) if of == prompt])
            for slabs, each in ((prompts.keys, self.keys), (prompts.values, self.values)):
                for slab, kept in zip(slabs, each, strict=True):
                    for block in range(filled, -(-length // BLOCK)):
                        kept.own[block - filled, answers] = slab[prompt, block]

    def open(self, blocks: int) -> None:
        """Prepares the first `blocks` own blocks for reading. Positions after a text's end must be finite: their scores are masked, and
        zero times their values must be zero."""
        for kept in self.values:
            kept.own[self._opened : blocks].zero_()
        self._opened = max(self._opened, blocks)

    def keep(self, places: list[int]) -> None:
        """Moves the answers in `places` that are not in the first places to the places of ended answers. `places` is updated: places[n] is
        n, or a larger number, whose answer is at n from now on."""
        moved = [(source, target) for target, source in enumerate(places) if source != target]
        if moved:
            sources, targets = (torch.tensor(part) for part in zip(*moved, strict=True))
            for own in self.own:
                own.index_copy_(2, targets, own.index_select(2, sources))
        self.prompt_of = [self.prompt_of[place] for place in places]
        self.live = len(places)
