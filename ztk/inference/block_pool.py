"""Which block of a cache belongs to whom: tables, shared prefixes, copies on write. Arithmetic only; no tensor is touched.

A block of a finished sequence whose 64 positions are all computed keeps its content until the block is needed, and is found again by the
chain of tokens that leads to it: key = (the block before it in the chain, its 64 tokens), compared in full, so no hash can collide. A block
that several sequences have is copied by the one that writes into it first. The chains of each adapter begin at a node of its own.
"""

from collections import OrderedDict, deque

from ztk.inference.attention import BLOCK

_ROOT = 0  # the node before a chain's first block; that of adapter n is _ROOT - n

Key = tuple[int, tuple[int, ...]]


class BlockPool:
    """`blocks` blocks for the sequences in the slots of `tables`, which it changes."""

    def __init__(self, blocks: int, *, tables: list[list[int]]) -> None:
        self.tables = tables
        self._free = deque(range(blocks))
        self._kept: OrderedDict[int, None] = (
            OrderedDict()
        )  # nobody's, but with a content that may be found; the oldest first
        self._counts = [0] * blocks
        self._nodes: dict[Key, tuple[int, int]] = {}  # -> (node, block)
        self._keys: dict[int, Key] = {}  # of registered blocks
        self._chains: list[list[int]] = [[] for _ in tables]  # per slot, the nodes of its registered full blocks
        self._next_node = _ROOT + 1

    @property
    def available(self) -> int:
        """Blocks that nobody has."""
        return len(self._free) + len(self._kept)

    def is_kept(self, block: int) -> bool:
        """Nobody has the block, and its content may be found."""
        return block in self._kept

    def match(self, tokens: list[int], *, adapter: int = 0) -> list[int]:
        """The blocks of the longest registered chain of full blocks of the adapter that `tokens` begin with."""
        found, node = [], _ROOT - adapter
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            at = self._nodes.get((node, tuple(tokens[start : start + BLOCK])))
            if at is None:
                break
            node, block = at
            found.append(block)
        return found

    def share(self, slot: int, *, blocks: list[int]) -> None:
        """The slot's table begins with these blocks, which it shares with whoever has them."""
        assert not self.tables[slot], "a slot is filled once"
        for block in blocks:
            self._kept.pop(block, None)
            self._counts[block] += 1
        self.tables[slot] = list(blocks)

    def extend(self, slot: int, *, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Blocks for the slot's positions up to `stop`, those from `start` on its own; (source, target) of what must be copied before
        the positions are written. None: not enough blocks, and nothing has changed."""
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
                self._forget(block)  # it was another's, and its content changes now
        pairs = []
        for place in shared:
            block = self._take()
            pairs.append((table[place], block))
            self._counts[table[place]] -= 1
            table[place] = block
        table += [self._take() for _ in range(missing)]
        # Only a block that begins before `start` has something worth copying.
        return [pair for place, pair in zip(shared, pairs, strict=True) if place * BLOCK < start]

    def register(self, slot: int, *, tokens: list[int], computed: int, adapter: int = 0) -> None:
        """The first `computed` tokens of the slot's sequence are in its blocks, by the adapter: full ones can be found from now on."""
        chain, table = self._chains[slot], self.tables[slot]
        for place in range(len(chain), computed // BLOCK):
            key = (chain[-1] if chain else _ROOT - adapter, tuple(tokens[place * BLOCK : (place + 1) * BLOCK]))
            if key not in self._nodes:  # else another block has the same content, and is found
                self._nodes[key] = (self._next_node, table[place])
                self._keys[table[place]] = key
                self._next_node += 1
            chain.append(self._nodes[key][0])

    def release(self, slot: int, *, keep: bool = True) -> None:
        """The slot has no sequence any more. keep: what its full blocks have may be found."""
        for block in reversed(
            self.tables[slot]
        ):  # the end of a chain is of no use without its beginning, and goes first
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
        """No content is found any more: the weights are others now."""
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
