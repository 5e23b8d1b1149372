"""Where the keys and values of running sequences lie: slabs of one length, or tables of blocks."""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Hashable

from ztk.inference.block_cache import BlockCache
from ztk.inference.cache_attention import BLOCK
from ztk.inference.capacity import Room
from ztk.inference.draft import DraftModel, common_length
from ztk.inference.requests import Owner, Sequence
from ztk.inference.slab_cache import SlabCache, rounded

Key = tuple[Hashable, tuple[int, ...]]  # the node before the block, or the owner; its tokens


class Slots(ABC):
    """Places for the keys and values of running sequences. draft_model: has as many slots. preempted: calls of `save` so far.

    A slot remembers the tokens whose keys and values it has, and their owner. A sequence of the same owner that begins with the same tokens
    need not compute them.
    """

    def __init__(self, count: int, *, draft_model: DraftModel | None) -> None:
        self._count, self._draft_model, self.preempted = count, draft_model, 0
        self._begin()

    def _begin(self) -> None:
        """Marks all slots as free."""
        self._members: list[Sequence] = []
        self._contents: list[list[int]] = [[] for _ in range(self._count)]
        self._owners: list[Owner | None] = [None] * self._count  # of the contents
        self._free: deque[int] = deque(range(self._count))  # the one that was freed first comes first

    @property
    def usage(self) -> float:
        """The used fraction of the memory."""
        return len(self._members) / self._count

    @property
    def are_full(self) -> bool:
        """Whether every possible slot has a sequence."""
        return len(self._members) == self._count

    @abstractmethod
    def check(self, *, prompt: int, limit: int) -> None:
        """Raises ValueError for a prompt of so many tokens, with an answer of up to `limit`, that there could never be room for."""

    def longest(self, positions: int) -> int:
        """Tokens of a sequence that `check` takes, `positions` at most."""
        return positions

    @abstractmethod
    def reusable(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed: at most all but the last, whose logits are drawn from, and 0 if the
        request includes the prompt's log-probabilities."""

    @abstractmethod
    def enter(self, sequence: Sequence) -> int | None:
        """Gives a waiting sequence a slot and returns how many of its tokens are computed there, or None without room for it."""

    def extend(self, sequence: Sequence, *, start: int, stop: int) -> bool:
        """Makes room for the sequence's positions up to `stop`, which from `start` on it does not share; returns whether there is room."""
        return True

    def save(self, sequence: Sequence) -> None:
        """Takes the slot away and keeps its keys and values, which `enter` restores. Raises AssertionError where `extend` finds room."""
        raise AssertionError("every sequence has room for all of its tokens")

    def is_saved(self, sequence: Sequence) -> bool:
        """Whether the sequence lost its slot by `save`."""
        return False

    @abstractmethod
    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        """Frees the slot. keep: sequences that begin alike may reuse its keys and values."""

    def forget(self) -> None:
        """Drops all reusable prefixes, because the weights have changed."""
        self._contents = [[] for _ in self._contents]

    @abstractmethod
    def reset(self) -> None:
        """Removes all sequences and their memory."""

    def _own(self, sequence: Sequence) -> None:
        """Records the owner of the sequence's slot. Other owners' drafts are not reused either."""
        if self._draft_model is not None and self._owners[sequence.slot] != sequence.owner:
            self._draft_model.forget(sequence.slot)
        self._owners[sequence.slot] = sequence.owner

    def _in_common(self, slot: int, *, sequence: Sequence) -> int:
        """Tokens in the slot that a waiting sequence begins with and need not compute, all but its last at most."""
        if self._owners[slot] != sequence.owner:
            return 0
        return common_length(self._contents[slot], other=sequence.tokens[:-1])

    def advance(self, sequence: Sequence, *, computed: int) -> None:
        """Records that the first `computed` tokens are in the sequence's slot."""
        held = self._contents[sequence.slot]
        held += sequence.tokens[len(held) : computed]
        sequence.computed = computed


class SlabSlots(Slots):
    """Slabs of one length, laid out anew where a sequence needs longer or fewer ones: [Note: Bytes of slabs] in ztk/inference/capacity.py.

    A sequence that has a slab has room for all of its tokens, so that none is preempted.
    """

    def __init__(self, cache: SlabCache, *, room: Room, draft_model: DraftModel | None) -> None:
        super().__init__(room.slots, draft_model=draft_model)
        self._cache, self._room = cache, room

    def check(self, *, prompt: int, limit: int) -> None:
        self._room.check(prompt=prompt, limit=limit)

    def longest(self, positions: int) -> int:
        return self._room.longest(positions)

    def reusable(self, sequence: Sequence) -> int:
        return self._longest_prefix(sequence)[1]

    def enter(self, sequence: Sequence) -> int | None:
        if not self._make_room(sequence):
            return None
        source, length = self._longest_prefix(sequence)
        slot = source if length and source in self._free else self._free[0]
        self._free.remove(slot)
        if length and slot != source:
            self._cache.copy(source, target=slot, positions=length)
        sequence.slot = slot
        self._members.append(sequence)
        self._contents[slot] = []
        self._own(sequence)
        self.advance(sequence, computed=length)
        return length

    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        if sequence not in self._members:
            return
        self._members.remove(sequence)
        if not keep:
            self._cache.clear(sequence.slot)
            self._contents[sequence.slot] = []
        self._free.append(sequence.slot)

    def reset(self) -> None:
        self._arrange(slots=self._count, positions=0)
        self._begin()

    def _make_room(self, sequence: Sequence) -> bool:
        """Finds a free slot that is long enough, and lays out the slabs anew if needed. Returns whether there is one."""
        if self._free and self._cache.positions >= sequence.longest:
            return True
        positions = rounded(max(one.longest for one in (*self._members, sequence)))
        slots = self._room.most(positions)
        if slots <= len(self._members):
            return False
        self._lay_out(slots=slots, positions=positions)
        return True

    def _lay_out(self, *, slots: int, positions: int) -> None:
        """Running sequences keep their data, in other slots if theirs are removed. Remaining free slots keep theirs."""
        free = deque(slot for slot in self._free if slot < slots)
        for sequence in self._members:
            if sequence.slot >= slots:
                source, sequence.slot = sequence.slot, free.popleft()
                held = self._contents[sequence.slot] = self._contents[source]
                self._own(sequence)
                self._cache.copy(source, target=sequence.slot, positions=len(held))
        self._arrange(slots=slots, positions=positions)
        before = len(self._contents)
        self._contents = [contents[:positions] for contents in self._contents[:slots]]
        self._contents += [[] for _ in range(before, slots)]
        self._owners = [*self._owners[:slots], *[None] * max(0, slots - before)]
        self._free = free + deque(range(before, slots))

    def _arrange(self, *, slots: int, positions: int) -> None:
        self._cache.arrange(slots=slots, positions=positions)
        if self._draft_model is not None:
            self._draft_model.arrange(slots=slots, positions=positions)

    def _longest_prefix(self, sequence: Sequence) -> tuple[int, int]:
        """(slot, tokens)."""
        if sequence.sampling.prompt_logprobs:
            return -1, 0
        lengths = [self._in_common(slot, sequence=sequence) for slot in range(len(self._contents))]
        best = max(range(len(lengths)), key=lengths.__getitem__)
        return best, lengths[best]


class BlockSlots(Slots):
    """Tables of blocks: sequences share the blocks of a prefix, and preemption copies blocks elsewhere, so that nothing is computed twice.

    A sequence takes blocks as it grows. draft_room: room of the draft model's own slabs, where there is a draft model."""

    def __init__(
        self, cache: BlockCache, *, count: int, draft_model: DraftModel | None, draft_room: Room | None
    ) -> None:
        super().__init__(count, draft_model=draft_model)
        self._cache, self._draft_room = cache, draft_room
        self.pool = BlockPool(cache.blocks, tables=cache.tables)
        self._saved: dict[Sequence, list[int]] = {}  # copies of preempted sequences' blocks

    @property
    def usage(self) -> float:
        return 1 - self.pool.available / self._cache.blocks

    def check(self, *, prompt: int, limit: int) -> None:
        """Accepts every request: there is room for the model's longest sequence."""

    def reusable(self, sequence: Sequence) -> int:
        return self._prefix(sequence)[1]

    def enter(self, sequence: Sequence) -> int | None:
        if sequence in self._saved:
            return self._resume(sequence)
        blocks, length = self._prefix(sequence)
        missing = -(-len(sequence.tokens) // BLOCK) - len(blocks)
        if self._members and missing >= self._room_beside(blocks):
            return None
        self._give(sequence, blocks=blocks, computed=length)
        return length

    def extend(self, sequence: Sequence, *, start: int, stop: int) -> bool:
        pairs = self.pool.extend(sequence.slot, start=start, stop=stop)
        if pairs:
            self._cache.copy(pairs)
        return pairs is not None

    def save(self, sequence: Sequence) -> None:
        used = -(-sequence.computed // BLOCK)
        self._saved[sequence] = self._cache.save(self.pool.tables[sequence.slot][:used])
        self._release(sequence, keep=True)
        self.preempted += 1

    def is_saved(self, sequence: Sequence) -> bool:
        return sequence in self._saved

    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        self._cache.drop(self._saved.pop(sequence, []))
        if sequence in self._members:
            self._release(sequence, keep=keep)

    def advance(self, sequence: Sequence, *, computed: int) -> None:
        super().advance(sequence, computed=computed)
        self.pool.register(sequence.slot, tokens=sequence.tokens, computed=computed, owner=sequence.owner)

    def forget(self) -> None:
        super().forget()
        self.pool.forget()

    def reset(self) -> None:
        for copies in self._saved.values():
            self._cache.drop(copies)
        self._saved.clear()
        if self._draft_model is not None:
            self._draft_model.arrange(slots=self._count, positions=0)
        self._begin()
        for slot, _ in enumerate(self._cache.tables):
            self._cache.tables[slot] = []
        self.pool = BlockPool(self._cache.blocks, tables=self._cache.tables)

    def _give(self, sequence: Sequence, *, blocks: list[int], computed: int) -> None:
        sequence.slot = self._free.popleft()
        self._own(sequence)
        self.pool.share(sequence.slot, blocks=blocks)
        self._members.append(sequence)
        self.advance(sequence, computed=computed)
        room = self._draft_room  # sequences beyond it continue without drafts
        if self._draft_model is not None and room is not None and room.most(sequence.longest) == room.slots:
            self._draft_model.reserve(sequence.longest)

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        self._members.remove(sequence)
        self.pool.release(sequence.slot, keep=keep)
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
        """(blocks, tokens) that need not be computed: of a sequence that runs, or full blocks that are still there."""
        if sequence.sampling.prompt_logprobs:
            return [], 0
        tokens = sequence.tokens[:-1]  # one at least is computed, for its logits
        blocks = self.pool.match(tokens, owner=sequence.owner)
        length = len(blocks) * BLOCK
        for other in self._members:
            common = self._in_common(other.slot, sequence=sequence)
            if common > length:
                blocks, length = self.pool.tables[other.slot][: -(-common // BLOCK)], common
        return list(blocks), length


class BlockPool:
    """Ownership of `blocks` blocks by the sequences in the slots of `tables`, which it changes: shared prefixes, copies on write. No tensor
    is touched.

    A block of a finished sequence whose 64 positions are all computed keeps its content until the block is needed, and is found again by the
    chain of tokens that leads to it: key = (the block before it in the chain, its 64 tokens), compared in full, so no hash can collide. A
    block that several sequences have is copied before one of them writes into it. The first key of a chain has the owner of its sequences.
    """

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
