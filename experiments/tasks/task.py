"""What a task that is made on the spot consists of."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ztk.data import ByteTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """text, tokens: the prompt as the policy gets it. answer: the right one, if it is known. record: further columns, which reward
    functions get as keywords. is_chat: the record has a conversation."""

    text: str
    tokens: list[int]
    answer: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False


class Task(ABC):
    """Prompts by number, without end for every seed, whose right answers are known."""

    @abstractmethod
    def text(self, *, seed: int, number: int) -> str:
        """Prompt `number` of the endless sequence for `seed`."""

    @abstractmethod
    def answer(self, text: str) -> str:
        """The right answer to a prompt."""

    @abstractmethod
    def wrong(self, text: str, *, seed: int, number: int) -> str:
        """An answer of the right form, drawn by chance, that is not the right one if there is another."""

    def prompt(self, *, seed: int, number: int) -> Prompt:
        """Prompt `number` with all that is known of it."""
        text = self.text(seed=seed, number=number)
        tokens = ByteTokenizer().encode(text).tolist()
        return Prompt(text=text, tokens=tokens, answer=self.answer(text), record={"number": number})

    def score(self, *, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        """1 for the right answer to `prompt`, else 0."""
        return float(answer == self.answer(prompt))
