"""What the leader's scheduler does to its cache, written down for the ranks that follow: four numbers each, in the order in which it was done.

Keys and values have the cache's dtype on every rank.
"""

from typing import Any

import torch

from ztk.inference.block_cache import BlockCache
from ztk.inference.block_swap import Swap
from ztk.inference.cache import Cache
from ztk.inference.describe import Description
from ztk.inference.steps import Span

_ARRANGE, _COPY, _CLEAR = range(3)  # of slabs
_COPY_BLOCK, _SAVE, _RESTORE, _DROP, _SHORTEN, _PLACE = range(6)  # of blocks


class RecordedCache(Cache):
    """Slabs, with what was done to them."""

    def __init__(self, description: Description, *, slots: int) -> None:
        super().__init__(description, slots=slots)
        self._log: list[int] = []

    def arrange(self, *, slots: int, positions: int) -> None:
        self._log += [_ARRANGE, slots, positions, 0]
        super().arrange(slots=slots, positions=positions)

    def copy(self, source: int, *, target: int, positions: int) -> None:
        self._log += [_COPY, source, target, positions]
        super().copy(source, target=target, positions=positions)

    def clear(self, slot: int) -> None:
        self._log += [_CLEAR, slot, 0, 0]
        super().clear(slot)

    def take_log(self) -> list[int]:
        """Since the last time."""
        log, self._log = self._log, []
        return log


class RecordedBlocks(BlockCache):
    """Blocks, with what was done to them and to the tables of the sequences that are computed.

    Copies of preempted sequences' blocks have numbers, under which every rank keeps its own.
    """

    def __init__(
        self,
        description: Description,
        *,
        slots: int,
        blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        swap: Swap | None = None,
    ) -> None:
        super().__init__(description, slots=slots, blocks=blocks, device=device, dtype=dtype, swap=swap)
        self._log: list[int] = []
        self._told: list[list[int]] = [[] for _ in range(slots)]  # tables as the others have them
        self._copies: dict[int, Any] = {}
        self._next = 0

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._log += [_COPY_BLOCK, source, target, 0]
        super().copy(pairs)

    def save(self, blocks: list[int]) -> list[int]:
        numbers = list(range(self._next, self._next + len(blocks)))
        self._next += len(blocks)
        self._copies.update(zip(numbers, super().save(blocks), strict=True))
        for number, block in zip(numbers, blocks, strict=True):
            self._log += [_SAVE, number, block, 0]
        return numbers

    def restore(self, copies: list[int], *, blocks: list[int]) -> None:
        for number, block in zip(copies, blocks, strict=True):
            self._log += [_RESTORE, number, block, 0]
        super().restore([self._copies[number] for number in copies], blocks=blocks)

    def drop(self, copies: list[int]) -> None:
        for number in copies:
            self._log += [_DROP, number, 0, 0]
        super().drop([self._copies.pop(number) for number in copies])

    def take_log(self, spans: list[Span]) -> list[int]:
        """Since the last time, and how the tables of these sequences have changed."""
        for span in spans:
            own, told = self.tables[span.slot], self._told[span.slot]
            if len(told) > len(own):
                self._log += [_SHORTEN, span.slot, len(own), 0]
                del told[len(own) :]
            same = len(told) if own[: len(told)] == told else 0  # a sequence that goes on: its new blocks alone
            for place, block in enumerate(own[same:], start=same):
                if place >= len(told) or told[place] != block:
                    self._log += [_PLACE, span.slot, place, block]
            told[:] = own
        log, self._log = self._log, []
        return log


class Repeating:
    """On a rank that follows: does to its cache what was done to the leader's."""

    def __init__(self, cache: Cache | BlockCache) -> None:
        self.cache = cache
        self._copies: dict[int, Any] = {}

    def repeat(self, log: list[int]) -> None:
        """What `take_log` gave on the leader. Raises DiskError as `SwapFile`."""
        for at in range(0, len(log), 4):
            what, numbers = log[at], log[at + 1 : at + 4]
            if isinstance(self.cache, BlockCache):
                self._repeat_of_blocks(what, numbers=numbers, cache=self.cache)
            else:
                _repeat_of_slabs(what, numbers=numbers, cache=self.cache)

    def _repeat_of_blocks(self, what: int, *, numbers: list[int], cache: BlockCache) -> None:
        first, second, third = numbers
        if what == _COPY_BLOCK:
            cache.copy([(first, second)])
        elif what == _SAVE:
            [self._copies[first]] = cache.save([second])
        elif what == _RESTORE:
            cache.restore([self._copies[first]], blocks=[second])
        elif what == _DROP:
            cache.drop([self._copies.pop(first)])
        elif what == _SHORTEN:
            del cache.tables[first][second:]
        else:
            cache.tables[first][second : second + 1] = [third]


def _repeat_of_slabs(what: int, *, numbers: list[int], cache: Cache) -> None:
    first, second, third = numbers
    if what == _ARRANGE:
        cache.arrange(slots=first, positions=second)
    elif what == _COPY:
        cache.copy(first, target=second, positions=third)
    else:
        cache.clear(first)
