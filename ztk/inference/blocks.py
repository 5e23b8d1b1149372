"""Ownership of a cache's blocks: shared prefixes, copies on write, and contents that later sequences reuse."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from ztk.kernels.shared.cached_attention import BLOCK

Key = tuple[Hashable, tuple[int, ...]]  # the node before the block, or the owner; its tokens


class BlockPool:
    """Ownership of `blocks` blocks by the sequences in the slots of `tables`, which it changes: shared prefixes, copies on write. No tensor
    is touched.

    A block of a finished sequence whose 64 positions are all computed keeps its content until the block is needed, and is found again by the
    chain of tokens that leads to it: key = (the block before it in the chain, its 64 tokens), compared in full, so no hash can collide. A
    block that several sequences have is copied before one of them writes into it. The first key of a chain has the owner of its sequences.
    So is the last block of a finished sequence, whose tokens are its tail, found by a sequence that begins with some of them.

    is_apart: the blocks of a sequence follow each other where they can, from a part of the cache on that is its slot's, and replace what
    finished sequences have left there. Otherwise the block that has been free for longest is next.
    """

    def __init__(self, blocks: int, *, tables: list[list[int]], is_apart: bool = False) -> None:
        self.tables = tables
        self._part = max(1, blocks // len(tables)) if is_apart else 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._kept: OrderedDict[int, None] = (
            OrderedDict()
        )  # unused blocks whose content can be reused, the oldest first
        self._counts = [0] * blocks
        self._nodes: dict[Key, tuple[int, int]] = {}  # -> (node, block)
        self._keys: dict[int, Key] = {}  # of registered blocks
        self._chains: list[list[int]] = [[] for _ in tables]  # per slot, the nodes of its registered full blocks
        self._tails: dict[int, Key] = {}  # of finished sequences, by block
        self._tails_of: dict[Hashable, list[int]] = {}  # their blocks, by the node before them
        self._next_node = 1

    @property
    def available(self) -> int:
        """Number of blocks without an owner."""
        return len(self._free) + len(self._kept)

    def is_kept(self, block: int) -> bool:
        """Whether the block has no owner and its content can be reused."""
        return block in self._kept

    def match(self, tokens: list[int], *, owner: Hashable = None) -> list[int]:
        """The blocks of the longest registered chain of full blocks of the owner that `tokens` begin with."""
        return self._matched(tokens, owner=owner)[0]

    def match_tail(self, tokens: list[int], *, owner: Hashable = None) -> tuple[list[int], int]:
        """Returns the blocks of `match` and the tail that shares most of the next tokens, if there is one; and the number of all these
        tokens."""
        found, node = self._matched(tokens, owner=owner)
        left = tuple(tokens[len(found) * BLOCK : (len(found) + 1) * BLOCK])
        common = {block: _common(self._tails[block][1], other=left) for block in self._tails_of.get(node, ())}
        best = max(common, key=common.__getitem__, default=None)
        if best is None or not common[best]:
            return found, len(found) * BLOCK
        return [*found, best], len(found) * BLOCK + common[best]

    def _matched(self, tokens: list[int], *, owner: Hashable) -> tuple[list[int], Hashable]:
        """The blocks of `match`, and the last one's node."""
        found, node = [], owner
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            at = self._nodes.get((node, tuple(tokens[start : start + BLOCK])))
            if at is None:
                break
            node, block = at
            found.append(block)
        return found, node

    def share(self, slot: int, *, blocks: list[int]) -> None:
        """Begins the slot's table with these blocks, shared with their other owners."""
        assert not self.tables[slot], "a slot is filled once"
        for block in blocks:
            self._kept.pop(block, None)
            self._counts[block] += 1
        self.tables[slot] = list(blocks)

    def extend(self, slot: int, *, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Allocates blocks for the slot's positions up to `stop`, unshared from `start` on. Returns (source, target) of blocks to copy
        before the positions are written, or None, without any change, if there are not enough blocks."""
        table = self.tables[slot]
        shared = [
            place
            for place in range(start // BLOCK, min(len(table), -(-stop // BLOCK)))
            if self._counts[table[place]] > 1
        ]
        missing = max(0, -(-stop // BLOCK) - len(table))
        if len(shared) + missing > self.available:
            return None
        for block in table[start // BLOCK : -(-stop // BLOCK)]:
            if self._counts[block] == 1:
                self._forget(block)  # it had another owner, and its content changes now
        pairs = []
        for place in shared:
            block = self._take(slot, after=place)
            pairs.append((table[place], block))
            self._counts[table[place]] -= 1
            table[place] = block
        for _ in range(missing):
            table.append(self._take(slot, after=len(table)))
        # Only a block that begins before `start` has something worth copying.
        return [pair for place, pair in zip(shared, pairs, strict=True) if place * BLOCK < start]

    def register(self, slot: int, *, tokens: list[int], computed: int, owner: Hashable = None) -> None:
        """Records that the first `computed` tokens of the slot's sequence are computed, so that the owner finds full blocks."""
        chain, table = self._chains[slot], self.tables[slot]
        for place in range(len(chain), computed // BLOCK):
            key = (chain[-1] if chain else owner, tuple(tokens[place * BLOCK : (place + 1) * BLOCK]))
            if key not in self._nodes:  # else another block has the same content, and is found
                self._nodes[key] = (self._next_node, table[place])
                self._keys[table[place]] = key
                self._next_node += 1
            chain.append(self._nodes[key][0])

    def release(self, slot: int, *, keep: bool = True, tokens: Sequence[int] = (), owner: Hashable = None) -> None:
        """Ends the slot's sequence. keep: the content of its blocks can be reused; `tokens` are all that were computed, of the owner."""
        chain, table = self._chains[slot], self.tables[slot]
        tail = tuple(tokens[len(chain) * BLOCK :])
        if keep and tail and self._counts[table[len(chain)]] == 1:
            node, block = chain[-1] if chain else owner, table[len(chain)]
            self._forget(block)
            self._tails[block] = (node, tail)
            self._tails_of.setdefault(node, []).append(block)
        for block in reversed(
            self.tables[slot]
        ):  # the end of a chain is useless without its beginning, so it is evicted first
            self._counts[block] -= 1
            if not keep:
                self._forget(block)
            if not self._counts[block]:
                if block in self._keys or block in self._tails:
                    self._kept[block] = None
                else:
                    self._free[block] = None
        self.tables[slot], self._chains[slot] = [], []

    def forget(self) -> None:
        """Drops all content, because the weights have changed."""
        self._nodes.clear()
        self._keys.clear()
        self._tails.clear()
        self._tails_of.clear()
        self._free.update(self._kept)
        self._kept.clear()
        self._chains = [[] for _ in self._chains]

    def owned(self, slot: int) -> list[int]:
        """The blocks that the slot's sequence shares with no other."""
        return [block for block in self.tables[slot] if self._counts[block] == 1]

    def _take(self, slot: int, *, after: int) -> int:
        """A block for the place `after` so many others of the slot."""
        block = self._next(slot, after=after)
        if block in self._kept:
            del self._kept[block]
            self._forget(block)
        else:
            del self._free[block]
        self._counts[block] = 1
        return block

    def _next(self, slot: int, *, after: int) -> int:
        table = self.tables[slot]
        if self._part and after:
            follows = table[after - 1] + 1
            if follows in self._free or follows in self._kept:
                return follows
        own = slot * self._part + after
        if self._part and (own in self._free or own in self._kept):
            return own
        return next(iter(self._free or self._kept))

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._nodes[key]
        tail = self._tails.pop(block, None)
        if tail is not None:
            others = self._tails_of[tail[0]]
            others.remove(block)
            if not others:
                del self._tails_of[tail[0]]


def _common(first: tuple[int, ...], *, other: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    length = min(len(first), len(other))
    return next((place for place in range(length) if first[place] != other[place]), length)
