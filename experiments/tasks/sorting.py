"""Sorting letters: `dbace>` -> `abcde`."""

import torch

from ztk.core.runtime.seed import generator
from ztk.experiments.tasks.task import Task

LETTERS, COUNT = "abcdefgh", 5


class Sorting(Task):
    """The right answer is one of up to 120 orders."""

    def text(self, *, seed: int, number: int) -> str:
        """Five of eight letters, which may repeat, and `>`."""
        drawn = torch.randint(len(LETTERS), (COUNT,), generator=generator(seed, "sorting", number)).tolist()
        return f"{''.join(LETTERS[index] for index in drawn)}>"

    def answer(self, text: str) -> str:
        """The letters in order."""
        return "".join(sorted(text.removesuffix(">")))

    def wrong(self, text: str, *, seed: int, number: int) -> str:
        """The same letters in another order."""
        return reordered(self.answer(text), seed=seed, number=number)


def reordered(right: str, *, seed: int, number: int) -> str:
    """Returns the letters of `right` in another random order, if there is one."""
    letters = list(right)
    answer = right
    for attempt in range(8):
        order = torch.randperm(len(letters), generator=generator(seed, "wrong", number, attempt)).tolist()
        answer = "".join(letters[index] for index in order)
        if answer != right:
            break
    return answer
