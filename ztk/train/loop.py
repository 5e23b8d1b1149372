"""`Loop`: runs optimizer steps with evaluations, checkpoints and reporting between them, the same on every rank."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, Protocol

from torch import Tensor

from ztk.checkpoint.errors import SaveFailed
from ztk.core.policies.columns import column_fault
from ztk.core.runtime.interrupts import Interrupts
from ztk.core.runtime.logged import Logged, logging_to
from ztk.core.runtime.sections import EVALUATION, FIRST_STEP, STEP, section
from ztk.core.runtime.sources import check_clocks, check_sources
from ztk.report import Reporter
from ztk.train.engine import Engine


class Measured(MutableMapping[str, Any]):
    """Numbers by column. writer: the hook's object, or a name; it may change its own values. is_recorded: whether the row is written.

    Raises ValueError for a column of ztk's or of another writer, for another value than a number or a tensor without dimensions, and after
    the row is written.
    """

    def __init__(self) -> None:
        self.writer: Any = "train_step"
        self.is_recorded = False
        self._values: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if fault := column_fault(name):
            raise ValueError(f"loop.measured: {fault}")
        self._check_writer(name)
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.dim() == 0):
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ValueError(
                f"loop.measured[{name!r}]: {value!r} is a {type(value).__name__}{shape}; give a number, or a tensor without dimensions"
            )
        self._values[name] = value
        self._writers[name] = self.writer

    def _check_writer(self, name: str) -> None:
        if self.is_recorded:
            raise ValueError(
                f"loop.measured[{name!r}]: the step's row is written: add it in after_step or after_evaluation"
            )
        first = self._writers.get(name, self.writer)
        if first is not self.writer:
            raise ValueError(
                f"loop.measured[{name!r}]: {_label(first)} has written this column in this step, and {_label(self.writer)} would replace "
                "it: use another name"
            )

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __delitem__(self, name: str) -> None:
        self._check_writer(name)
        del self._values[name], self._writers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __ior__(self, values: Any) -> "Measured":
        self.update(values)
        return self

    def __repr__(self) -> str:
        return f"Measured({self._values!r})"


def _label(writer: Any) -> str:
    return writer if isinstance(writer, str) else type(writer).__name__


class Callback:
    """The hooks of a `Loop`. A callback may have any of these methods; it need not be a subclass.

    Every rank calls them in the same order. `loop.step` is the number of the step, starting at 1. A hook may add numbers to
    `loop.measured`, which go into the step's row, under names that nothing else writes, and may set `loop.ended_by` to a reason, which
    stops the run after this step. Both must be the same on every rank. A difference is found after the step in which it arises, by an exchange
    between the ranks; a class whose hooks cannot differ has the attribute `ends_alike = True` and needs none.
    """

    def before_step(self, loop: "Loop") -> None:
        """Called before the step's first forward."""

    def before_update(self, loop: "Loop") -> None:
        """Called between the last backward and the update, when `loop.engine.full_grad(name)` is this step's gradient."""

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


class Saves(Protocol):
    """Writes checkpoints, as `ztk.checkpoint.Saver` does."""

    def save(self, *, data_state: Mapping[str, Any], extra: dict[str, Any], metric: float | None) -> Any:
        """Saves the current step. A collective call."""
        ...


class Loop:
    """Trains an engine for `steps` optimizer steps: `loop.run()`.

    step: number of the current step. tokens: number in this step, over all ranks. measured: extra values for the step's row, which it then has.
    row_values: returns further values if the step has a row; a collective call. is_regular: whether `eval_every` evaluates this step.
    ended_by: the reason to stop after this step; None to continue. `train_step` may set them, too.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        train_step: Callable[[int], Tensor],
        steps: int,
        tokens: int = 0,
        evaluate: Callable[[], float | Mapping[str, float]] | None = None,
        eval_every: int = 0,
        evaluates_last: bool = False,
        reporter: Reporter | None = None,
        saver: Saves | None = None,
        saves: Callable[[int, bool], bool] | None = None,
        metric: Callable[[Mapping[str, Any]], float | None] | None = None,
        state: Callable[[], Mapping[str, Any]] = dict,
        callbacks: Sequence[Any] = (),
        grace_seconds: float | None = None,
    ) -> None:
        """train_step: runs the optimizer step of the given number and returns this replica's mean loss, a scalar, as `engine.train_batch`
        does.
        steps: number of the last step; a resumed engine continues after `engine.global_steps`.
        tokens: tokens per step over all ranks.
        evaluate: returns the held-out loss, or named values, the same on every rank. Called every `eval_every` steps; 0 disables it. After
        the last step only if it `evaluates_last`.
        reporter: the caller must have entered it.
        saver: writes the steps for which saves(step, ends) returns True; `ends` is True if the run stops early.
        metric: evaluates before every save and passes the metric of the row's values to the saver; smaller is better.
        state: returns the data position that a checkpoint contains.
        callbacks: see `Callback`.
        grace_seconds: time between a signal and the end of the process. A step that takes longer is reported once.
        """
        self.engine, self.reporter, self.saver = engine, reporter, saver
        self.step, self.steps, self.tokens = engine.global_steps, steps, tokens
        self._measured, self._logged = Measured(), Logged()
        self.row_values: Callable[[], Mapping[str, Any]] = dict
        self.is_regular = False
        self.ended_by: str | None = None
        self._train_step, self._evaluate = train_step, evaluate
        self._eval_every, self._evaluates_last = eval_every, evaluates_last
        self._saves, self._metric, self._state = saves or (lambda step, ends: False), metric, state
        self._callbacks = tuple(callbacks)
        self._grace_seconds, self._save_seconds = grace_seconds, 0.0
        self._unsaved: list[int] = []  # steps whose checkpoints failed

    @property
    def measured(self) -> Measured:
        """The values of this step's row, in addition to ztk's."""
        return self._measured

    @measured.setter
    def measured(self, values: Measured) -> None:
        if values is not self._measured:
            raise AttributeError('loop.measured cannot be replaced: add values by loop.measured["name"] = 1.0')

    def run(self) -> str | None:
        """Trains up to `steps`, or until a callback sets `ended_by`. Returns `ended_by`.

        A checkpoint that cannot be written ends the run only if it is the last step's.

        Raises Interrupted after the step in which a signal of `ENDING` arrived, if there is a saver; that step is saved. Raises ValueError
        if the ranks of several nodes run different code.
        """
        check_sources(self.engine.process)
        check_clocks(self.engine.process)
        if any(hasattr(callback, "before_update") for callback in self._callbacks):
            self.engine.before_update = partial(self._call, "before_update")
        first = self.step + 1
        agrees = not all(getattr(callback, "ends_alike", False) for callback in self._callbacks)
        try:
            with Interrupts(self.engine.process, is_active=self.saver is not None, agrees=agrees) as interrupts:
                while self.step < self.steps and self.ended_by is None:
                    self.step += 1
                    started = time.monotonic()
                    part = STEP if self.step > first else FIRST_STEP
                    with logging_to(Logged()) as self._logged, section(part, detail=f"step {self.step}"):
                        self._run_step(interrupts)
                    if self.step > first:  # which compiles
                        self._check_grace(time.monotonic() - started)
        finally:
            self.engine.before_update = None
        if self._unsaved:
            self._say(f"the checkpoints of these steps were not saved: {', '.join(map(str, self._unsaved))}")
        return self.ended_by

    def evaluate(self) -> float:
        """Adds the held-out loss or values to `measured`, and calls the hooks of an evaluation. Returns the loss, or NaN without one.

        A collective call.
        """
        with section(EVALUATION, detail=f"the evaluation after step {self.step}"):
            return self._evaluated()

    def _evaluated(self) -> float:
        assert self._evaluate is not None, "the loop was given something to evaluate"
        self._call("before_evaluation")
        with logging_to(Logged()) as logged:
            found = self._evaluate()
        values = found if isinstance(found, Mapping) else {"validation_loss": found}
        loss = values.get("validation_loss", math.nan)
        with self._writing("evaluate"):
            self.measured |= {**self.row_values(), **values}
        with self._writing("ztk.log"):
            means = logged.means(self.engine.comm)
            self.measured |= {f"validation_{name}": value for name, value in means.items()}
        self.row_values = dict
        self._call("after_evaluation", loss=loss)
        return loss

    def _run_step(self, interrupts: Interrupts) -> None:
        self._measured, self.row_values, evaluated = Measured(), dict, False
        self._call("before_step")
        loss = self._train_step(self.step)
        self._call("after_step", loss=loss)
        interrupted = self._agreed(interrupts)
        is_due = bool(self._eval_every) and self.step % self._eval_every == 0
        self.is_regular = is_due and (self._evaluates_last or self.step < self.steps)
        judges = self._metric is not None and self._is_saved()
        if self._evaluate is not None and not interrupted and (self.is_regular or judges):
            with self._aside():
                self.evaluate()
            interrupted, evaluated = self._agreed(interrupts), True
        saves = self.saver is not None and (interrupted or self._is_saved())
        self._record(loss, row=saves or interrupted or self.ended_by is not None)
        if saves:
            self._measured.is_recorded = self._logged.is_recorded = True
            self._save(
                metric=self._metric(self.measured) if self._metric is not None and evaluated else None,
                is_last=interrupted or self.ended_by is not None or self.step == self.steps,
            )
            self._measured.is_recorded = False
        if interrupted:
            interrupts.stop()

    def _agreed(self, interrupts: Interrupts) -> bool:
        """Returns whether a signal is pending. Raises ValueError on every rank if only some of them set `ended_by`."""
        interrupted, differs = interrupts.agree(ends=self.ended_by is not None)
        if differs:
            how = f"to {self.ended_by!r}" if self.ended_by is not None else "on another rank"
            raise ValueError(
                f"step {self.step}: a hook has set loop.ended_by {how}, and not on every rank: decide by numbers that all ranks have, such as "
                "the loss of after_evaluation, or sum your own over the ranks"
            )
        return interrupted

    def _is_saved(self) -> bool:
        return self.saver is not None and self._saves(self.step, self.ended_by is not None)

    def _record(self, loss: Tensor, *, row: bool) -> None:
        if self.reporter is not None:
            engine = self.engine
            self.reporter.step(
                loss=loss,
                tokens=self.tokens,
                metrics=engine.read_metrics,
                module_metrics=self._module_metrics,
                row=row,
                values=self.measured,
                logged=self._logged,
            )

    def _module_metrics(self) -> dict[str, Any]:
        return {**self.row_values(), **self.engine.read_module_metrics()}

    def _save(self, *, metric: float | None, is_last: bool) -> None:
        started = time.monotonic()
        with self._aside():
            self._call("before_save")
            if self._has_saved(metric=metric, is_last=is_last):
                self._call("after_save")
        self._save_seconds = time.monotonic() - started

    def _has_saved(self, *, metric: float | None, is_last: bool) -> bool:
        """Saves, and returns whether it succeeded. An asynchronous save of an earlier step may raise its error here, too."""
        assert self.saver is not None
        extra = {} if self.reporter is None else self.reporter.past()
        while True:
            try:
                self.saver.save(data_state=self._state(), extra=extra, metric=metric)
                return True
            except SaveFailed as error:
                if is_last and error.step == self.step:
                    raise
                self._say(f"the run goes on: {error}")
                if error.step is None:
                    return True
                self._unsaved.append(error.step)
                if error.step == self.step:
                    return False

    def _check_grace(self, seconds: float) -> None:
        """Reports once that a signal would end the process before the running step is saved. seconds: duration of the last step."""
        limit, needed = self._grace_seconds, seconds + self._save_seconds
        if self.saver is None or limit is None or needed <= limit:
            return
        self._grace_seconds = None
        self._say(
            f"a step takes {seconds:.1f} s and its save {self._save_seconds:.1f} s, and a signal leaves checkpoint.grace_seconds={limit:g}: "
            "the steps since the last checkpoint would be lost; use "
            f"checkpoint.grace_seconds={math.ceil(1.5 * needed)} if the sender of the signal waits so long, or save often with "
            "checkpoint.every=N"
        )

    def _say(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.say(text)
        elif self.engine.process.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.reporter is None else self.reporter.aside()

    def _call(self, hook: str, **arguments: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is not None:
                with self._writing(callback):
                    method(self, **arguments)

    @contextmanager
    def _writing(self, writer: Any) -> Iterator[None]:
        """Names the writer of `measured` inside."""
        measured = self._measured
        measured.writer, before = writer, measured.writer
        try:
            yield
        finally:
            measured.writer = before
