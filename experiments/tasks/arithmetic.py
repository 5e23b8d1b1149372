"""Sums: `7+15=` -> `22`."""

import torch

from ztk.core.runtime.seed import generator
from ztk.experiments.tasks.task import Task

SIZE = 20  # upper bound of the summands


class Arithmetic(Task):
    """400 sums, to be memorized."""

    def text(self, *, seed: int, number: int) -> str:
        """Two summands below 20."""
        first, second = torch.randint(SIZE, (2,), generator=generator(seed, "arithmetic", number)).tolist()
        return f"{first}+{second}="

    def answer(self, text: str) -> str:
        """The sum in decimal digits."""
        return str(sum(map(int, text.removesuffix("=").split("+"))))

    def wrong(self, text: str, *, seed: int, number: int) -> str:
        """A number that is off by 1 to 9, not below 0."""
        right = int(self.answer(text))
        off = int(torch.randint(1, 10, (), generator=generator(seed, "wrong", number)))
        return str(right - off if right >= off and number % 2 else right + off)
