"""Slots that are tables of blocks: sequences share the blocks of a prefix, and preemption copies blocks elsewhere, so that nothing is computed
twice."""

from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache
from ztk.inference.block_pool import BlockPool
from ztk.inference.draft import DraftModel
from ztk.inference.room import Room
from ztk.inference.schedule import Sequence, Slots


class BlockSlots(Slots):
    """A sequence takes blocks as it grows. draft_room: room of the draft model's own slabs, where there is a draft model."""

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

    def longest(self, positions: int) -> int:
        return positions

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
        self._contents = [[] for _ in self._contents]
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
