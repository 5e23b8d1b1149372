"""Which sequences are computed in a step, and which prefixes need not be computed again."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ztk.inference.draft import DraftModel, common_length
from ztk.inference.policy import Completion, InferencePolicy, PromptLogprob, SamplingParams
from ztk.inference.room import Room
from ztk.inference.slab_cache import SlabCache, rounded

_WORTH_WAITING = 64  # tokens of a prefix that another sequence is computing right now


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One answer of one request. tokens: prompt and answer. computed: how many of them have keys and values in the slot.

    limit: answer tokens at most. logprobs, processed, tops: of the answer's tokens; prompt_logprobs: of the prompt's. cause: an exception that
    ended it.
    """

    request_id: int
    sample: int
    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    limit: int
    slot: int = -1
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cause: Exception | None = None

    @property
    def longest(self) -> int:
        """Tokens that it may have in the end."""
        return self.prompt_length + self.limit

    @property
    def answer(self) -> list[int]:
        """Tokens drawn so far."""
        return self.tokens[self.prompt_length :]

    def completion(self) -> Completion:
        """What `generate` returns of it."""
        asked = self.sampling
        return Completion(
            tokens=self.answer,
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            processed_logprobs=torch.tensor(self.processed, dtype=torch.float32),
            finish_reason=self.finish_reason or "error",
            top_logprobs=self.tops if asked.logprobs else None,
            prompt_logprobs=logprob_values(self.prompt_logprobs) if asked.prompt_logprobs else None,
            error=self.error,
        )


def logprob_values(logprobs: list[PromptLogprob]) -> Tensor:
    """Without the likeliest tokens: fp32 [len(logprobs)]."""
    return torch.tensor([item.value for item in logprobs], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Rows of one sequence in a step: tokens from `start` on; the last `drafts` of them are guesses."""

    sequence: Sequence
    start: int
    tokens: list[int]
    drafts: int = 0


class Scheduler:
    """Continuous batching: sequences join and leave between steps (Yu et al. 2022, Orca).

    A slot that is free remembers the tokens whose keys and values it has; a sequence that begins alike copies them. Sequences are admitted in
    the order in which they came, each when the slabs have room for it: [Note: Bytes of slabs] in ztk/inference/room.py.
    """

    def __init__(
        self, policy: InferencePolicy, *, cache: SlabCache, room: Room | None = None, drafts: DraftModel | None = None
    ) -> None:
        self._policy, self._cache, self._draft_model = policy, cache, drafts
        self._room = room or Room(slots=policy.max_sequences)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._contents: list[list[int]] = [[] for _ in range(policy.max_sequences)]
        self._free: deque[int] = deque(range(policy.max_sequences))  # the one that was freed first comes first
        self.reused_tokens = 0

    def plan(self) -> list[Work]:
        """The next step's rows. Sequences that draw a token first, then prompts, within the budget of tokens."""
        self._admit()
        budget, works = self._policy.max_step_tokens, []
        ready = [sequence for sequence in self.running if len(sequence.tokens) - sequence.computed == 1]
        found = self._drafts(ready[:budget], room=budget - len(ready))
        for sequence in ready[:budget]:
            drafts = found.get(sequence, [])
            budget -= 1 + len(drafts)
            works.append(
                Work(
                    sequence=sequence,
                    start=sequence.computed,
                    tokens=[sequence.tokens[-1], *drafts],
                    drafts=len(drafts),
                )
            )
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            if left > 1 and budget > 0:
                chunk = sequence.tokens[sequence.computed : sequence.computed + min(left, budget)]
                works.append(Work(sequence=sequence, start=sequence.computed, tokens=chunk))
                budget -= len(chunk)
        return works

    def check(self, *, prompt: int, limit: int) -> None:
        """Raises ValueError for a prompt of so many tokens, with an answer of up to `limit`, that there could never be room for."""
        self._room.check(prompt=prompt, limit=limit)

    def longest(self, positions: int) -> int:
        """Tokens of a sequence that `check` takes, `positions` at most."""
        return self._room.longest(positions)

    def advance(self, sequence: Sequence, *, computed: int) -> None:
        """The first `computed` tokens of `sequence` are in its slot, which had those that were computed before."""
        held = self._contents[sequence.slot]
        held += sequence.tokens[len(held) : computed]
        sequence.computed = computed

    def finish(self, sequence: Sequence, *, reason: str, error: str | None = None) -> None:
        """Frees the slot; what it has stays for sequences that begin alike, unless the sequence ended with an error."""
        sequence.finish_reason, sequence.error = reason, error
        if sequence in self.running:
            self.running.remove(sequence)
            if reason == "error":
                self._cache.clear(sequence.slot)
                self._contents[sequence.slot] = []
            self._free.append(sequence.slot)
        else:
            self.waiting.remove(sequence)

    def forget(self) -> None:
        """No prefix is reused: the weights have changed."""
        self._contents = [[] for _ in self._contents]

    def reset(self) -> None:
        """Without any sequence, and with the memory of none."""
        slots = self._policy.max_sequences
        self.waiting.clear()
        self.running.clear()
        for kept in (self._cache, self._draft_model):
            if isinstance(kept, SlabCache | DraftModel):
                kept.arrange(slots=slots, positions=0)
        self._contents, self._free = [[] for _ in range(slots)], deque(range(slots))

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) == self._room.slots:
                return
            if self._should_wait(sequence):
                continue
            if not self._make_room(sequence):
                return  # who came later does not pass it
            source, length = self._longest_prefix(sequence)
            slot = source if source in self._free else self._free[0]
            self._free.remove(slot)
            if length and slot != source:
                self._cache.copy(source, target=slot, positions=length)
            self.waiting.remove(sequence)
            sequence.slot = slot
            self.reused_tokens += length
            self.running.append(sequence)
            self._contents[slot] = []
            self.advance(sequence, computed=length)

    def _make_room(self, sequence: Sequence) -> bool:
        """A free slot that is long enough, for which the slabs are laid out anew where they have to be; whether there is one."""
        if self._free and self._cache.positions >= sequence.longest:
            return True
        positions = rounded(max(one.longest for one in (*self.running, sequence)))
        slots = self._room.most(positions)
        if slots <= len(self.running):
            return False
        self._lay_out(slots=slots, positions=positions)
        return True

    def _lay_out(self, *, slots: int, positions: int) -> None:
        """Running sequences keep what they have, in other slots if theirs are gone; of free ones those that remain do."""
        free = deque(slot for slot in self._free if slot < slots)
        for sequence in self.running:
            if sequence.slot >= slots:
                source, sequence.slot = sequence.slot, free.popleft()
                held = self._contents[sequence.slot] = self._contents[source]
                self._cache.copy(source, target=sequence.slot, positions=len(held))
        self._cache.arrange(slots=slots, positions=positions)
        if self._draft_model is not None:
            self._draft_model.arrange(slots=slots, positions=positions)
        before = len(self._contents)
        self._contents = [contents[:positions] for contents in self._contents[:slots]]
        self._contents += [[] for _ in range(before, slots)]
        self._free = free + deque(range(before, slots))

    def _longest_prefix(self, sequence: Sequence) -> tuple[int, int]:
        """(slot, tokens); one token at least is computed, for its logits, and all of a prompt whose log-probabilities are asked for."""
        if sequence.sampling.prompt_logprobs:
            return -1, 0
        lengths = [common_length(contents, other=sequence.tokens[:-1]) for contents in self._contents]
        best = max(range(len(lengths)), key=lengths.__getitem__)
        return best, lengths[best]

    def _should_wait(self, sequence: Sequence) -> bool:
        """A running sequence is about to compute much of this one's prompt."""
        if sequence.sampling.prompt_logprobs:
            return False
        now = self._longest_prefix(sequence)[1]
        soon = max((common_length(other.tokens, other=sequence.tokens[:-1]) for other in self.running), default=0)
        return soon - now >= _WORTH_WAITING

    def _drafts(self, ready: list[Sequence], *, room: int) -> dict[Sequence, list[int]]:
        """Tokens that may come next, `room` in all: those that followed the last two tokens before, else the draft model's."""
        found, asked = {}, []
        if not self._policy.lookup_tokens and self._draft_model is None:
            return found
        for sequence in ready:
            found[sequence] = self._looked_up(
                sequence, count=self._most(sequence, wanted=self._policy.lookup_tokens, room=room)
            )
            room -= len(found[sequence])
        for sequence in ready if self._draft_model is not None else ():
            count = 0 if found[sequence] else self._most(sequence, wanted=self._policy.draft_tokens, room=room)
            if count > 0:
                asked.append((sequence, count))
                room -= count
        if asked and self._draft_model is not None:
            proposed = self._draft_model.propose(asked)
            found |= {sequence: drafts for (sequence, _), drafts in zip(asked, proposed, strict=True)}
        return found

    def _most(self, sequence: Sequence, *, wanted: int, room: int) -> int:
        """The last token of an answer is drawn, not guessed."""
        return min(wanted, sequence.limit - len(sequence.answer) - 1, room)

    def _looked_up(self, sequence: Sequence, *, count: int) -> list[int]:
        """What followed the last two tokens where they stood before."""
        tokens = sequence.tokens
        if count <= 0 or len(tokens) < 3:
            return []
        last = tokens[-2:]
        for start in range(len(tokens) - 3, -1, -1):
            if tokens[start : start + 2] == last:
                return tokens[start + 2 : start + 2 + count]
        return []
