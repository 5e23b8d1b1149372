"""Slots of running sequences, and the blocks of a cache that each of them owns or shares."""

from collections import deque

from ztk.inference.blocks import BlockPool
from ztk.inference.cache import Cache
from ztk.inference.requests import Owner, Sequence
from ztk.kernels.shared.cached_attention import BLOCK


class Slots:
    """Places for the keys and values of `count` running sequences in a cache. preempted: calls of `save` so far.

    A sequence takes blocks as it grows. Sequences of one owner that begin with the same tokens share the blocks of those, and need not
    compute them. Preemption copies blocks elsewhere, so that nothing is computed twice.
    """

    def __init__(self, cache: Cache, *, count: int) -> None:
        self._count, self._cache, self.preempted = count, cache, 0
        self._saved: dict[Sequence, list[int]] = {}  # copies of preempted sequences' blocks
        self._begin()

    def _begin(self) -> None:
        """Marks all slots as free."""
        self._members: list[Sequence] = []
        self._contents: list[list[int]] = [[] for _ in range(self._count)]
        self._owners: list[Owner | None] = [None] * self._count  # of the contents
        self._free: deque[int] = deque(range(self._count))  # the one that was freed first comes first
        for slot, _ in enumerate(self._cache.tables):
            self._cache.tables[slot] = []
        # A CPU reads blocks that follow each other in one piece.
        is_apart = self._cache.device.type == "cpu"
        self.pool = BlockPool(self._cache.blocks, tables=self._cache.tables, is_apart=is_apart)

    @property
    def usage(self) -> float:
        """The used fraction of the memory."""
        return 1 - self.pool.available / self._cache.blocks

    @property
    def are_full(self) -> bool:
        """Whether every possible slot has a sequence."""
        return len(self._members) == self._count

    def longest(self, positions: int) -> int:
        """Tokens of the longest sequence that fits alone, at most `positions`."""
        return min(positions, self._cache.positions)

    def check(self, *, prompt: int, limit: int) -> None:
        """Raises ValueError for a prompt of so many tokens, with an answer of up to `limit`, that there could never be room for."""
        blocks = -(-(prompt + limit) // BLOCK)
        if blocks <= self._cache.blocks:
            return
        needed = self._cache.nbytes // self._cache.blocks * blocks
        raise ValueError(
            f"a prompt of {prompt} tokens and an answer of up to {limit} need {needed} bytes of memory, and the cache may "
            f"take {self._cache.nbytes}: shorten the prompt, lower max_tokens, or allow more with inference.cache_tokens"
        )

    def reusable(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed: at most all but the last, whose logits are drawn from, and 0 if the
        request includes the prompt's log-probabilities."""
        return self._prefix(sequence)[1]

    def enter(self, sequence: Sequence) -> int | None:
        """Gives a waiting sequence a slot and returns how many of its tokens are computed there, or None without room for it."""
        if sequence in self._saved:
            return self._resume(sequence)
        blocks, length = self._prefix(sequence)
        missing = -(-len(sequence.tokens) // BLOCK) - len(blocks)
        if self._members and missing >= self._room_beside(blocks):
            return None
        self._give(sequence, blocks=blocks, computed=length)
        return length

    def extend(self, sequence: Sequence, *, start: int, stop: int) -> bool:
        """Makes room for the sequence's positions up to `stop`, which from `start` on it does not share; returns whether there is room."""
        pairs = self.pool.extend(sequence.slot, start=start, stop=stop)
        if pairs:
            self._cache.copy(pairs)
        return pairs is not None

    def save(self, sequence: Sequence) -> None:
        """Takes the slot away and keeps its keys and values, which `enter` restores."""
        used = -(-sequence.computed // BLOCK)
        self._saved[sequence] = self._cache.save(self.pool.tables[sequence.slot][:used])
        self._release(sequence, keep=True)
        self.preempted += 1

    def is_saved(self, sequence: Sequence) -> bool:
        """Whether the sequence lost its slot by `save`."""
        return sequence in self._saved

    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        """Frees the slot. keep: sequences that begin alike may reuse its keys and values."""
        self._cache.drop(self._saved.pop(sequence, []))
        if sequence in self._members:
            if not keep:
                self._cache.clear(self.pool.owned(sequence.slot))
            self._release(sequence, keep=keep)

    def advance(self, sequence: Sequence, *, computed: int) -> None:
        """Records that the first `computed` tokens are in the sequence's slot."""
        held = self._contents[sequence.slot]
        held += sequence.tokens[len(held) : computed]
        sequence.computed = computed
        self.pool.register(sequence.slot, tokens=sequence.tokens, computed=computed, owner=sequence.owner)

    def forget(self) -> None:
        """Drops all reusable prefixes, because the weights have changed."""
        self._contents = [[] for _ in self._contents]
        self.pool.forget()

    def reset(self) -> None:
        """Removes all sequences and the keys and values of earlier ones."""
        for copies in self._saved.values():
            self._cache.drop(copies)
        self._saved.clear()
        self._begin()

    def _give(self, sequence: Sequence, *, blocks: list[int], computed: int) -> None:
        sequence.slot = self._free.popleft()
        self._owners[sequence.slot] = sequence.owner
        self.pool.share(sequence.slot, blocks=blocks)
        self._members.append(sequence)
        self.advance(sequence, computed=computed)

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        self._members.remove(sequence)
        self.pool.release(sequence.slot, keep=keep, tokens=self._contents[sequence.slot], owner=sequence.owner)
        self._contents[sequence.slot] = []
        self._free.append(sequence.slot)
        sequence.slot = -1

    def _resume(self, sequence: Sequence) -> int | None:
        """Shares full blocks that still exist and copies the others back, if there is room for them and one more."""
        copies, computed = self._saved[sequence], sequence.computed
        blocks = self.pool.match(sequence.tokens[:computed], owner=sequence.owner)
        if self._members and len(copies) - len(blocks) >= self._room_beside(blocks):
            return None
        self._give(sequence, blocks=blocks, computed=len(blocks) * BLOCK)
        if len(copies) > len(blocks):
            pairs = self.pool.extend(sequence.slot, start=len(blocks) * BLOCK, stop=computed)
            assert pairs == [], "there is room, and the blocks are its own"
            own = self.pool.tables[sequence.slot][len(blocks) : len(copies)]
            self._cache.restore(copies[len(blocks) :], blocks=own)
        self._cache.drop(self._saved.pop(sequence))
        self.advance(sequence, computed=computed)
        return computed

    def _room_beside(self, blocks: list[int]) -> int:
        """Blocks that are available while these are kept."""
        return self.pool.available - sum(self.pool.is_kept(block) for block in blocks)

    def _prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        """Returns (blocks, tokens) that need no computation, because a running sequence or ended ones have them."""
        if sequence.sampling.prompt_logprobs:
            return [], 0
        tokens = sequence.tokens[:-1]  # one at least is computed, for its logits
        blocks, length = self.pool.match_tail(tokens, owner=sequence.owner)
        for other in self._members:
            common = self._in_common(other.slot, sequence=sequence)
            if common > length:
                blocks, length = self.pool.tables[other.slot][: -(-common // BLOCK)], common
        return list(blocks), length

    def _in_common(self, slot: int, *, sequence: Sequence) -> int:
        """Tokens in the slot that a waiting sequence begins with and need not compute, all but its last at most."""
        if self._owners[slot] != sequence.owner:
            return 0
        return common_length(self._contents[slot], other=sequence.tokens[:-1])


def common_length(first: list[int], *, other: list[int]) -> int:
    """Length of the common beginning of two lists of tokens."""
    length = min(len(first), len(other))
    if first[:length] == other[:length]:
        return length
    return next(place for place in range(length) if first[place] != other[place])
