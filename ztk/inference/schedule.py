"""Chooses the tokens and sequences of a step. `Slots` place their keys and values."""

from collections import deque

from ztk.core.policies.inference import InferencePolicy
from ztk.inference.requests import Sequence, Work
from ztk.inference.slots import Slots, common_length

_LEAST_CHUNK = 32  # tokens of prompts in a step, however slow it is
_MEASURED = _LEAST_CHUNK // 2  # tokens of prompts in a step that is measured, so that steps of the least chunk are
_WORTH_WAITING = 64  # tokens of a prefix that another sequence is computing right now


class Scheduler:
    """Continuous batching: sequences join and leave between steps (Yu et al. 2022, Orca), admitted in the order of their arrival.

    A sequence without room for its next rows preempts the one that arrived last (Kwon et al. 2023, swapping), which then waits before all
    new ones and continues where it stopped.
    """

    def __init__(self, policy: InferencePolicy, *, slots: Slots) -> None:
        self._policy, self.slots = policy, slots
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

    def finish(self, sequence: Sequence, *, reason: str, error: str | None = None) -> None:
        """Frees the slot. Its content can be reused by sequences that begin alike, unless the sequence ended with an error."""
        sequence.finish_reason, sequence.error = reason, error
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.slots.leave(sequence, keep=reason != "error")

    def recompute(self) -> None:
        """Takes the keys and values of all sequences away, because the weights have changed: `plan` computes every token again."""
        sequences = sorted([*self.running, *self.waiting], key=_age)
        for sequence in sequences:
            self.slots.leave(sequence, keep=True)
            sequence.computed = 0
            if not sequence.drawn:
                sequence.prompt_logprobs.clear()
        self.running.clear()
        self.waiting = deque(sequences)
        self.slots.forget()

    def reset(self) -> None:
        """Removes all sequences and their memory."""
        self.waiting.clear()
        self.running.clear()
        self.slots.reset()

    def _works(self) -> list[Work]:
        """Sequences that draw a token first, then prompts, within the budget of tokens and, where some draw, of seconds."""
        budget, works = self._policy.max_step_tokens, []
        assert budget is not None, "set where the model is opened"
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
        """Tokens that may come next, `room` in all: those that followed the last two tokens before."""
        found = {}
        if self._policy.lookup_tokens:
            for sequence in ready:
                left = sequence.limit - len(sequence.answer) - 1  # the last token of an answer is drawn, not guessed
                found[sequence] = self._looked_up(sequence, count=min(self._policy.lookup_tokens, left, room))
                room -= len(found[sequence])
        return found

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
