"""`Loop`: runs optimizer steps with evaluations, checkpoints and reporting between them, the same on every rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ztk.checkpoint import Saver
from ztk.core.runtime.interrupts import Interrupts
from ztk.report import Reporter
from ztk.train.engine import Engine


class Callback:
    """The hooks of a `Loop`. A callback may have any of these methods; it need not be a subclass.

    Every rank calls them in the same order. `loop.step` is the number of the step, starting at 1. A hook may add numbers to
    `loop.measured`, which go into the step's row, and may set `loop.ended_by` to a reason, which stops the run after this step. Both must
    be the same on every rank.
    """

    def before_step(self, loop: "Loop") -> None:
        """Called before the step's first forward."""

    def after_step(self, loop: "Loop", *, loss: Tensor) -> None:
        """Called after the update. loss: this replica's mean, a scalar on the device."""

    def before_evaluation(self, loop: "Loop") -> None:
        """Called before a validation."""

    def after_evaluation(self, loop: "Loop", *, loss: float) -> None:
        """Called after a validation. loss: the mean over all ranks."""

    def before_save(self, loop: "Loop") -> None:
        """Called before a checkpoint of this step."""

    def after_save(self, loop: "Loop") -> None:
        """Called after a checkpoint. An asynchronous save may still be writing."""


class Loop:
    """Trains an engine for `steps` optimizer steps: `loop.run()`.

    step: number of the current step. measured: extra values for the step's row. ended_by: the reason to stop after this step; None to
    continue.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        train_step: Callable[[int], Tensor],
        steps: int,
        tokens: int = 0,
        evaluate: Callable[[], float] | None = None,
        eval_every: int = 0,
        reporter: Reporter | None = None,
        saver: Saver | None = None,
        saves: Callable[[int, bool], bool] | None = None,
        judges_saves: bool = False,
        shows_stalls: bool = False,
        state: Callable[[], Mapping[str, Any]] = dict,
        callbacks: Sequence[Any] = (),
    ) -> None:
        """train_step: runs the optimizer step of the given number and returns this replica's mean loss, a scalar, as `engine.train_batch`
        does.
        steps: number of the last step; a resumed engine continues after `engine.global_steps`.
        tokens: tokens per step over all ranks.
        evaluate: returns the held-out loss, the same on every rank. Called every `eval_every` steps except after the last; 0 disables it.
        reporter: the caller must have entered it.
        saver: writes the steps for which saves(step, ends) returns True; `ends` is True if the run stops early.
        judges_saves: evaluates before every save and passes the loss to the saver.
        shows_stalls: adds the seconds for which saves stopped the training to the rows.
        state: returns the data position that a checkpoint contains.
        callbacks: see `Callback`.
        """
        self.engine, self.reporter, self.saver = engine, reporter, saver
        self.step = engine.global_steps
        self.steps = steps
        self.measured: dict[str, Any] = {}
        self.ended_by: str | None = None
        self._train_step, self._evaluate, self._eval_every, self._tokens = train_step, evaluate, eval_every, tokens
        self._saves, self._judges_saves, self._state = saves or (lambda step, ends: False), judges_saves, state
        self._shows_stalls, self._callbacks = shows_stalls, tuple(callbacks)

    def run(self) -> str | None:
        """Trains up to `steps`, or until a callback sets `ended_by`. Returns `ended_by`.

        Raises Interrupted after the step in which SIGINT or SIGTERM arrived, if there is a saver; that step is saved.
        """
        with Interrupts(self.engine.process, is_active=self.saver is not None) as interrupts:
            while self.step < self.steps and self.ended_by is None:
                self.step += 1
                self._run_step(interrupts)
        return self.ended_by

    def evaluate(self) -> float:
        """Returns the held-out loss and calls the hooks of an evaluation. A collective call."""
        assert self._evaluate is not None, "the loop was given something to evaluate"
        self._call("before_evaluation")
        loss = self._evaluate()
        self._call("after_evaluation", loss=loss)
        return loss

    def _run_step(self, interrupts: Interrupts) -> None:
        self.measured = {}
        self._call("before_step")
        loss = self._train_step(self.step)
        self._call("after_step", loss=loss)
        interrupted = interrupts.are_pending()
        saves = self._is_saved()
        is_due = bool(self._eval_every) and self.step % self._eval_every == 0 and self.step < self.steps
        if self._evaluate is not None and not interrupted and (is_due or (saves and self._judges_saves)):
            with self._aside():
                self.measured["validation_loss"] = self.evaluate()
            interrupted = interrupts.are_pending()
        saves = self.saver is not None and (interrupted or self._is_saved())
        self._record(loss, row=saves or interrupted or self.ended_by is not None)
        if saves:
            self._save()
        if interrupted:
            interrupts.stop()

    def _is_saved(self) -> bool:
        return self.saver is not None and self._saves(self.step, self.ended_by is not None)

    def _record(self, loss: Tensor, *, row: bool) -> None:
        if self.reporter is not None:
            engine = self.engine
            self.reporter.step(
                loss=loss,
                tokens=self._tokens,
                metrics=engine.read_metrics,
                module_metrics=self._module_metrics,
                row=row,
                **self.measured,
            )

    def _module_metrics(self) -> dict[str, Any]:
        stalled = {}
        if self.saver is not None and self._shows_stalls:
            stalled["checkpoint.stall_seconds"] = self.saver.stall_seconds
        return stalled | dict(self.engine.read_module_metrics())

    def _save(self) -> None:
        assert self.saver is not None
        with self._aside():
            self._call("before_save")
            loss = self.measured.get("validation_loss", math.nan)
            self.saver.save(
                data_state=self._state(),
                extra={} if self.reporter is None else self.reporter.past(),
                metric=loss if self._judges_saves and math.isfinite(loss) else None,
            )
            self._call("after_save")

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.reporter is None else self.reporter.aside()

    def _call(self, hook: str, **arguments: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is not None:
                method(self, **arguments)
