"""The interface of a task with generated prompts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ztk.data import ByteTokenizer
from ztk.rl.align import Prompt


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
