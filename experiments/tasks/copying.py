"""Copying letters: `dbace>` -> `dbace`."""

import torch

from ztk.core.runtime.seed import generator
from ztk.experiments.tasks.sorting import reordered
from ztk.experiments.tasks.task import Task

LETTERS, COUNT = "abcdefghijklmnop", 5


class Copying(Task):
    """The first skill that an attention head learns."""

    def text(self, *, seed: int, number: int) -> str:
        """Five of sixteen letters, which may repeat, and `>`."""
        drawn = torch.randint(len(LETTERS), (COUNT,), generator=generator(seed, "copying", number)).tolist()
        return f"{''.join(LETTERS[index] for index in drawn)}>"

    def answer(self, text: str) -> str:
        """The letters in their order."""
        return text.removesuffix(">")

    def wrong(self, text: str, *, seed: int, number: int) -> str:
        """The same letters in another order."""
        return reordered(self.answer(text), seed=seed, number=number)
