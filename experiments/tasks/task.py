"""The interface of a task with generated prompts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ztk.data import ByteTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """text, tokens: the prompt for the policy. answer: the right one, if it is known. record: further columns, passed to reward functions
    as keywords.
    is_chat: whether the record has a conversation.
    """

    text: str
    tokens: list[int]
    answer: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False


class Task(ABC):
    """An endless sequence of prompts for every seed, with known answers."""

    @abstractmethod
    def text(self, *, seed: int, number: int) -> str:
        """Returns prompt `number` of the sequence for `seed`."""

    @abstractmethod
    def answer(self, text: str) -> str:
        """Returns the right answer to a prompt."""

    @abstractmethod
    def wrong(self, text: str, *, seed: int, number: int) -> str:
        """Returns a random answer of the right form that is wrong, if there is one."""

    def prompt(self, *, seed: int, number: int) -> Prompt:
        """Returns prompt `number` with its answer."""
        text = self.text(seed=seed, number=number)
        tokens = ByteTokenizer().encode(text).tolist()
        return Prompt(text=text, tokens=tokens, answer=self.answer(text), record={"number": number})

    def score(self, *, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        """Returns 1 for the right answer to `prompt`, else 0."""
        return float(answer == self.answer(prompt))
