"""Chooses the tokens and sequences of a step. `Slots` place their keys and values."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ztk.inference.draft import DraftModel, common_length
from ztk.inference.masks import packed_mask
from ztk.inference.policy import Completion, GrammarState, InferencePolicy, PromptLogprob, SamplingParams
from ztk.inference.sample import DrawSteps

_LEAST_CHUNK = 32  # tokens of prompts in a step, however slow it is
_MEASURED = _LEAST_CHUNK // 2  # tokens of prompts in a step that is measured, so that steps of the least chunk are
_WORTH_WAITING = 64  # tokens of a prefix that another sequence is computing right now


Owner = tuple[int, str]


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One answer of one request. tokens: prompt and answer. computed: how many of them have keys and values in the slot.

    limit: answer tokens at most. adapter: its number, 0 of the base. state: in the request's grammar. logprobs, processed, tops, kept: of the
    answer's tokens; prompt_logprobs: of the prompt's. cause: an exception that ended it.
    """

    request_id: int
    sample: int
    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    limit: int
    adapter: int = 0
    state: GrammarState | None = None
    slot: int = -1
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    cause: Exception | None = None

    @property
    def owner(self) -> Owner:
        """Sequences of one owner may share keys and values: the adapter that computes them, and the salt of the request."""
        return self.adapter, self.sampling.cache_salt

    @property
    def longest(self) -> int:
        """Maximum number of tokens at the end."""
        return self.prompt_length + self.limit

    @property
    def answer(self) -> list[int]:
        """Tokens drawn so far."""
        return self.tokens[self.prompt_length :]

    def draw_steps(self, drafts: list[int], *, vocabulary: int) -> DrawSteps:
        """The steps of the draw after these guesses. Raises NothingDrawn as `packed_mask`."""
        answer = [*self.answer, *drafts]
        mask = packed_mask(self.sampling, state=self.state, answer=answer, size=vocabulary)
        return DrawSteps(sampling=self.sampling, prompt=self.tokens[: self.prompt_length], answer=answer, mask=mask)

    def completion(self) -> Completion:
        """The result of `generate` for this sequence."""
        asked = self.sampling
        return Completion(
            tokens=self.answer,
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            processed_logprobs=torch.tensor(self.processed, dtype=torch.float32),
            finish_reason=self.finish_reason or "error",
            top_logprobs=self.tops if asked.logprobs else None,
            prompt_logprobs=logprob_values(self.prompt_logprobs) if asked.prompt_logprobs else None,
            kept=self.kept or None,
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

    @abstractmethod
    def longest(self, positions: int) -> int:
        """Tokens of a sequence that `check` takes, `positions` at most."""

    @abstractmethod
    def reusable(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed: at most all but the last, whose logits are drawn from, and 0 if the
        request includes the prompt's log-probabilities."""

    @abstractmethod
    def enter(self, sequence: Sequence) -> int | None:
        """Gives a waiting sequence a slot and returns how many of its tokens are computed there, or None without room for it."""

    @abstractmethod
    def extend(self, sequence: Sequence, *, start: int, stop: int) -> bool:
        """Makes room for the sequence's positions up to `stop`, which from `start` on it does not share; returns whether there is room."""

    @abstractmethod
    def save(self, sequence: Sequence) -> None:
        """Takes the slot away and keeps its keys and values, which `enter` restores."""

    @abstractmethod
    def is_saved(self, sequence: Sequence) -> bool:
        """Whether the sequence lost its slot by `save`."""

    @abstractmethod
    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        """Frees the slot. keep: sequences that begin alike may reuse its keys and values."""

    @abstractmethod
    def forget(self) -> None:
        """Drops all reusable prefixes, because the weights have changed."""

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


class Scheduler:
    """Continuous batching: sequences join and leave between steps (Yu et al. 2022, Orca), admitted in the order of their arrival.

    A sequence without room for its next rows preempts the one that arrived last (Kwon et al. 2023, swapping), which then waits before all
    new ones and continues where it stopped.
    """

    def __init__(self, policy: InferencePolicy, *, slots: Slots, drafts: DraftModel | None = None) -> None:
        self._policy, self.slots, self._draft_model = policy, slots, drafts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.reused_tokens = 0
        self._seconds_per_token = 0.0  # of the last step with a prompt; 0: not measured yet

    def plan(self) -> list[Work]:
        """The next step's rows, which have room. The oldest sequence always gets some."""
        self._admit()
        works, preempted = self._works(), set[Sequence]()
        for work in sorted(works, key=lambda work: _age(work.sequence)):
            sequence, stop = work.sequence, work.start + len(work.tokens)
            while sequence not in preempted and not self.slots.extend(sequence, start=work.start, stop=stop):
                youngest = max(self.running, key=_age)
                self._preempt(youngest)
                preempted.add(youngest)
        return [work for work in works if work.sequence not in preempted]

    def measured(self, works: list[Work], *, seconds: float) -> None:
        """Records the duration of a step of `works`."""
        tokens = sum(len(work.tokens) for work in works)
        if tokens - len(works) >= _MEASURED:
            self._seconds_per_token = seconds / tokens

    def advance(self, sequence: Sequence, *, computed: int) -> None:
        """Records that the first `computed` tokens of `sequence` have keys and values."""
        self.slots.advance(sequence, computed=computed)

    def finish(self, sequence: Sequence, *, reason: str, error: str | None = None) -> None:
        """Frees the slot. Its content can be reused by sequences that begin alike, unless the sequence ended with an error."""
        sequence.finish_reason, sequence.error = reason, error
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.slots.leave(sequence, keep=reason != "error")

    def forget(self) -> None:
        """Drops all reusable prefixes, because the weights have changed."""
        self.slots.forget()

    def reset(self) -> None:
        """Removes all sequences and their memory."""
        self.waiting.clear()
        self.running.clear()
        self.slots.reset()

    def _works(self) -> list[Work]:
        """Sequences that draw a token first, then prompts, within the budget of tokens and, where some draw, of seconds."""
        budget, works = self._policy.max_step_tokens, []
        ready = [sequence for sequence in self.running if len(sequence.tokens) - sequence.computed == 1]
        found = self._drafts(ready[:budget], room=budget - len(ready))
        for sequence in ready[:budget]:
            drafts = found.get(sequence, [])
            budget -= 1 + len(drafts)
            tokens = [sequence.tokens[-1], *drafts]
            works.append(Work(sequence=sequence, start=sequence.computed, tokens=tokens, drafts=len(drafts)))
        if ready and self._policy.step_seconds and self._seconds_per_token:
            budget = min(budget, max(_LEAST_CHUNK, int(self._policy.step_seconds / self._seconds_per_token)))
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            if left > 1 and budget > 0:
                chunk = sequence.tokens[sequence.computed : sequence.computed + min(left, budget)]
                works.append(Work(sequence=sequence, start=sequence.computed, tokens=chunk))
                budget -= len(chunk)
        return works

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if self.slots.are_full:
                return
            is_saved = self.slots.is_saved(sequence)
            if not is_saved and self._should_wait(sequence):
                continue
            computed = self.slots.enter(sequence)
            if computed is None:
                return  # later sequences do not overtake it
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if not is_saved:
                self.reused_tokens += computed

    def _preempt(self, sequence: Sequence) -> None:
        self.slots.save(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def _should_wait(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute much of this one's prompt."""
        if sequence.sampling.prompt_logprobs:
            return False
        alike = [other for other in self.running if other.owner == sequence.owner]
        soon = max((common_length(other.tokens, other=sequence.tokens[:-1]) for other in alike), default=0)
        return soon >= _WORTH_WAITING and soon - self.slots.reusable(sequence) >= _WORTH_WAITING

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
        """Maximum number of guesses. The last token of an answer is drawn, not guessed."""
        return min(wanted, sequence.limit - len(sequence.answer) - 1, room)

    def _looked_up(self, sequence: Sequence, *, count: int) -> list[int]:
        """The tokens that followed an earlier occurrence of the last two tokens."""
        tokens = sequence.tokens
        if count <= 0 or len(tokens) < 3:
            return []
        last = tokens[-2:]
        for start in range(len(tokens) - 3, -1, -1):
            if tokens[start : start + 2] == last:
                return tokens[start + 2 : start + 2 + count]
        return []


def _age(sequence: Sequence) -> tuple[int, int]:
    """Order of arrival."""
    return sequence.request_id, sequence.sample
