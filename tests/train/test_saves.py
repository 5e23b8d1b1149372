"""`Loop` with a saver that fails, and with steps that take longer than a signal leaves."""

from types import SimpleNamespace

import pytest
import torch

from ztk.checkpoint.errors import SaveFailed
from ztk.train import loop as loop_module
from ztk.train.loop import Loop


class Saver:
    """Fails at the given steps. is_late: raises the error of a save in the next one, as an asynchronous saver does."""

    def __init__(self, engine, *, fails: set[int], is_late: bool = False) -> None:
        self.engine, self.fails, self.is_late = engine, set(fails), is_late
        self.saved: list[int] = []
        self.late: list[int] = []

    def save(self, *, data_state, extra, metric) -> None:
        step = self.engine.global_steps
        if self.late:
            raise failure(self.late.pop())
        if step in self.fails and not self.is_late:
            raise failure(step)
        self.late += [step] if step in self.fails else []
        self.saved.append(step)


def failure(step: int) -> SaveFailed:
    error = SaveFailed(f"the checkpoint of step {step} was not saved")
    error.step = step
    return error


def made(*, fails: set[int] = frozenset(), is_late: bool = False, **options) -> tuple[Loop, Saver]:
    process = SimpleNamespace(rank=0, world_size=1, local_world_size=1)
    engine = SimpleNamespace(global_steps=0, process=process)

    def train_step(step: int) -> torch.Tensor:
        engine.global_steps = step
        return torch.zeros(())

    saver = Saver(engine, fails=fails, is_late=is_late)
    loop = Loop(engine, train_step=train_step, steps=3, saver=saver, saves=lambda step, ends: True, **options)
    return loop, saver


def test_a_save_that_fails_ends_nothing():
    loop, saver = made(fails={1, 2})
    with pytest.warns(RuntimeWarning) as told:
        loop.run()
    assert saver.saved == [3]
    texts = [str(warning.message) for warning in told]
    assert texts[0].startswith("the run goes on: the checkpoint of step 1")
    assert texts[-1] == "the checkpoints of these steps were not saved: 1, 2"


def test_a_save_that_fails_late_does_not_cost_the_next_one():
    loop, saver = made(fails={2}, is_late=True)
    with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
        loop.run()
    assert saver.saved == [1, 2, 3]


def test_the_last_save_that_fails_is_the_runs_failure():
    loop, _ = made(fails={3})
    with pytest.raises(SaveFailed, match="step 3"):
        loop.run()


def test_steps_longer_than_the_grace_are_reported_once_with_the_arithmetic(monkeypatch):
    clock = iter(range(0, 86_000, 86))  # every look at the clock is 86 s later
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    loop, _ = made(grace_seconds=30.0)
    with pytest.warns(RuntimeWarning) as told:
        loop.run()
    (text,) = {str(warning.message) for warning in told}
    assert "a step takes 258.0 s and its save 86.0 s, and a signal leaves checkpoint.grace_seconds=30" in text
    assert "checkpoint.grace_seconds=516" in text and len(told) == 1
