"""Slots that are slabs of one length; a prefix that two sequences have in common is copied."""

from collections import deque

from ztk.inference.draft import DraftModel
from ztk.inference.room import Room
from ztk.inference.schedule import Sequence, Slots
from ztk.inference.slab_cache import SlabCache, rounded


class SlabSlots(Slots):
    """Slabs of one length, laid out anew where a sequence needs longer or fewer ones: [Note: Bytes of slabs] in ztk/inference/room.py.

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

    def extend(self, sequence: Sequence, *, start: int, stop: int) -> bool:
        return True

    def save(self, sequence: Sequence) -> None:
        """Raises AssertionError: a sequence that has a slab is never preempted."""
        raise AssertionError("every sequence has room for all of its tokens")

    def is_saved(self, sequence: Sequence) -> bool:
        return False

    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        if sequence not in self._members:
            return
        self._members.remove(sequence)
        if not keep:
            self._cache.clear(sequence.slot)
            self._contents[sequence.slot] = []
        self._free.append(sequence.slot)

    def forget(self) -> None:
        self._contents = [[] for _ in self._contents]

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
