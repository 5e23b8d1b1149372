"""Continuous batching over a cache of blocks: shared prefixes, and preemption that copies blocks elsewhere and computes nothing again."""

from typing import Any

from ztk.inference.attention import BLOCK
from ztk.inference.block_cache import BlockCache
from ztk.inference.block_pool import BlockPool
from ztk.inference.draft import DraftModel, common_length
from ztk.inference.policy import InferencePolicy
from ztk.inference.room import Room
from ztk.inference.schedule import Scheduler, Sequence, Work


class BlockScheduler(Scheduler):
    """As `Scheduler`, with blocks for slots' memory.

    A sequence that finds no block for its next rows takes those of the sequence that came last, whose blocks are copied elsewhere
    (Kwon et al. 2023, swapping). It waits in front of all new ones, and goes on where it was.
    """

    def __init__(
        self,
        policy: InferencePolicy,
        *,
        cache: BlockCache,
        drafts: DraftModel | None = None,
        draft_room: Room | None = None,
    ) -> None:
        """draft_room: what the draft model's own slabs may take; None: there is no draft model."""
        super().__init__(policy, cache=cache, drafts=drafts)
        self._draft_room = draft_room
        self._blocks = cache
        self.pool = BlockPool(cache.blocks, tables=cache.tables)
        self._saved: dict[Sequence, list[Any]] = {}  # copies of preempted sequences' blocks
        self.preempted = 0  # times so far

    def plan(self) -> list[Work]:
        """The next step's rows; their places are in the tables. The oldest sequence always gets its blocks."""
        works = {work.sequence: work for work in super().plan()}
        for sequence in sorted(works, key=_age):
            work = works[sequence]
            while sequence in self.running:
                pairs = self.pool.extend(sequence.slot, start=work.start, stop=work.start + len(work.tokens))
                if pairs is not None:
                    if pairs:
                        self._blocks.copy(pairs)
                    break
                self._preempt(max(self.running, key=_age))
        return [work for work in works.values() if work.sequence in self.running]

    def advance(self, sequence: Sequence, *, computed: int) -> None:
        """The first `computed` tokens of `sequence` are in its blocks."""
        super().advance(sequence, computed=computed)
        self.pool.register(sequence.slot, tokens=sequence.tokens, computed=computed)

    def finish(self, sequence: Sequence, *, reason: str, error: str | None = None) -> None:
        """Frees the blocks; full ones stay for sequences that begin alike, unless the sequence ended with an error."""
        self._blocks.drop(self._saved.pop(sequence, []))
        if sequence in self.running:
            self._leave(sequence, keep=reason != "error")
            sequence.finish_reason, sequence.error = reason, error
        else:
            super().finish(sequence, reason=reason, error=error)

    def forget(self) -> None:
        """No prefix is reused: the weights are others now."""
        super().forget()
        self.pool.forget()

    def reset(self) -> None:
        """As `Scheduler.reset`. All blocks are free."""
        for copies in self._saved.values():
            self._blocks.drop(copies)
        self._saved.clear()
        super().reset()
        for slot, _ in enumerate(self._blocks.tables):
            self._blocks.tables[slot] = []
        self.pool = BlockPool(self._blocks.blocks, tables=self._blocks.tables)

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if not self._free:
                return
            if sequence in self._saved:
                if not self._resume(sequence):
                    return  # new ones would only take its blocks
            elif not self._should_wait(sequence):
                blocks, length = self._prefix(sequence)
                missing = -(-len(sequence.tokens) // BLOCK) - len(blocks)
                if self.running and missing >= self._room_beside(blocks):
                    return
                self._enter(sequence, blocks=blocks, computed=length)
                self.reused_tokens += length

    def _enter(self, sequence: Sequence, *, blocks: list[int], computed: int) -> None:
        self.waiting.remove(sequence)
        sequence.slot = self._free.popleft()
        self.pool.share(sequence.slot, blocks=blocks)
        self.running.append(sequence)
        self.advance(sequence, computed=computed)
        if self._draft_model is not None and self._drafts_fit(sequence.longest):
            self._draft_model.reserve(sequence.longest)

    def _drafts_fit(self, positions: int) -> bool:
        """Sequences that the draft model has no room for go on without drafts."""
        return self._draft_room is not None and self._draft_room.most(positions) == self._draft_room.slots

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.slot, keep=keep)
        self._contents[sequence.slot] = []
        self._free.append(sequence.slot)
        sequence.slot = -1

    def _preempt(self, sequence: Sequence) -> None:
        used = -(-sequence.computed // BLOCK)
        self._saved[sequence] = self._blocks.save(self.pool.tables[sequence.slot][:used])
        self._leave(sequence, keep=True)
        self.waiting.appendleft(sequence)
        self.preempted += 1

    def _resume(self, sequence: Sequence) -> bool:
        """Full blocks that are still there are shared; the others are copied back, if there is room for them and one more."""
        copies = self._saved[sequence]
        blocks = self.pool.match(sequence.tokens[: sequence.computed])
        if self.running and len(copies) - len(blocks) >= self._room_beside(blocks):
            return False
        computed = sequence.computed
        self._enter(sequence, blocks=blocks, computed=len(blocks) * BLOCK)
        if len(copies) > len(blocks):
            pairs = self.pool.extend(sequence.slot, start=len(blocks) * BLOCK, stop=computed)
            assert pairs == [], "there is room, and the blocks are its own"
            own = self.pool.tables[sequence.slot][len(blocks) : len(copies)]
            self._blocks.restore(copies[len(blocks) :], blocks=own)
        self._blocks.drop(self._saved.pop(sequence))
        self.advance(sequence, computed=computed)
        return True

    def _room_beside(self, blocks: list[int]) -> int:
        """Blocks that are available while these are kept."""
        return self.pool.available - sum(self.pool.is_kept(block) for block in blocks)

    def _longest_prefix(self, sequence: Sequence) -> tuple[int, int]:
        return -1, self._prefix(sequence)[1]

    def _prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        """(blocks, tokens) that need not be computed: of a sequence that runs, or full blocks that are still there."""
        if sequence.sampling.prompt_logprobs:
            return [], 0
        tokens = sequence.tokens[:-1]  # one at least is computed, for its logits
        blocks = self.pool.match(tokens)
        length = len(blocks) * BLOCK
        for other in self.running:
            common = common_length(self._contents[other.slot], other=tokens)
            if common > length:
                blocks, length = self.pool.tables[other.slot][: -(-common // BLOCK)], common
        return list(blocks), length


def _age(sequence: Sequence) -> tuple[int, int]:
    """Order of arrival."""
    return sequence.request_id, sequence.sample
