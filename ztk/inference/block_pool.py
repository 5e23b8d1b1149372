"""Ownership of a cache's blocks: tables, shared prefixes, copies on write. Arithmetic only; no tensor is touched.

A block of a finished sequence whose 64 positions are all computed keeps its content until the block is needed, and is found again by the
chain of tokens that leads to it: key = (the block before it in the chain, its 64 tokens), compared in full, so no hash can collide. A block
that several sequences have is copied before one of them writes into it. The first key of a chain has the owner of its sequences.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable

from ztk.inference.attention import BLOCK

Key = tuple[Hashable, tuple[int, ...]]  # the node before the block, or the owner; its tokens


class BlockPool:
    """`blocks` blocks for the sequences in the slots of `tables`, which it changes."""

    def __init__(self, blocks: int, *, tables: list[list[int]]) -> None:
        self.tables = tables
        self._free = deque(range(blocks))
        self._kept: OrderedDict[int, None] = (
            OrderedDict()
        )  # unused blocks whose content can be reused, the oldest first
        self._counts = [0] * blocks
        self._nodes: dict[Key, tuple[int, int]] = {}  # -> (node, block)
        self._keys: dict[int, Key] = {}  # of registered blocks
        self._chains: list[list[int]] = [[] for _ in tables]  # per slot, the nodes of its registered full blocks
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
        found, node = [], owner
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            at = self._nodes.get((node, tuple(tokens[start : start + BLOCK])))
            if at is None:
                break
            node, block = at
            found.append(block)
        return found

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
            block = self._take()
            pairs.append((table[place], block))
            self._counts[table[place]] -= 1
            table[place] = block
        table += [self._take() for _ in range(missing)]
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

    def release(self, slot: int, *, keep: bool = True) -> None:
        """Ends the slot's sequence. keep: the content of its full blocks can be reused."""
        for block in reversed(
            self.tables[slot]
        ):  # the end of a chain is useless without its beginning, so it is evicted first
            self._counts[block] -= 1
            if not keep:
                self._forget(block)
            if not self._counts[block]:
                if block in self._keys:
                    self._kept[block] = None
                else:
                    self._free.append(block)
        self.tables[slot], self._chains[slot] = [], []

    def forget(self) -> None:
        """Drops all content, because the weights have changed."""
        self._nodes.clear()
        self._keys.clear()
        self._free.extend(self._kept)
        self._kept.clear()
        self._chains = [[] for _ in self._chains]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        self._counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._nodes[key]
