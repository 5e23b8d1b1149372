"""Time limits for the parts of a run: setup, first step, step, evaluation and save.

[Note: Overruns]
A thread of each rank measures the open section. The first rank that exceeds a limit puts a request into the store. A rank looks for a
request once its own section has used half of its limit, and answers with the stack of its main thread. So the store holds nothing while a
run is well. The rank that asked waits up to `_ANSWER_SECONDS`, names every rank, its host and its place, and stores that text as the error
of all ranks. A rank without an answer is stopped, lost, or in a call that holds Python's lock. Each rank that reads the error prints the stacks
of all its threads and ends, because its main thread may be in a call that cannot be interrupted.

Time in which the process itself was stopped does not count: a scheduler that suspends a whole job must not end it. A call that holds
Python's lock also stops the thread. `faulthandler` prints the stacks then, from a thread that needs no lock, and the other ranks report it.
"""

import faulthandler
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ztk.core.policies.machine import place_of, ranks_text
from ztk.core.runtime.comm.connect import default_store
from ztk.core.runtime.ending import end_with_process, forget, join_busy
from ztk.core.runtime.process import Process

_ROOT = Path(__file__).parents[2]
_COMM = os.fspath(Path(__file__).parent / "comm")
_LONGEST_TICK_SECONDS = 1.0
_ANSWER_SECONDS = (
    12.0  # at most: for ranks that look every quarter of it for a request, once half of a limit has passed
)
_STORE_SECONDS = 5.0  # for one exchange with the store, whose host may be lost
_NAMED = 8  # groups of ranks in a message
_FRAMES = 8  # innermost ones of a rank's stack in an answer
_TIMES = 10.0  # steps may take this many times the longest one so far, if launch.step_seconds is not set

SETUP, FIRST_STEP, STEP, EVALUATION, SAVE = "setup", "compile", "step", "evaluation", "save"
KEYS = {
    SETUP: "launch.setup_seconds",
    FIRST_STEP: "launch.compile_seconds",
    STEP: "launch.step_seconds",
    EVALUATION: "launch.eval_seconds",
    SAVE: "launch.save_seconds",
}


class SectionOverrun(TimeoutError):
    """A section took longer than its limit. stacks: text with the stack of each rank that answered."""

    shows_trace = False

    def __init__(self, message: str, *, stacks: str = "") -> None:
        super().__init__(message)
        self.stacks = stacks


@dataclass(kw_only=True, slots=True)
class _Open:
    """An open section. age: its seconds so far, without inner sections. entered: when it last became the innermost."""

    name: str
    detail: str
    entered: float
    age: float = 0.0


_watched = itertools.count()  # the same number on all ranks
_watchers: "list[_Watcher]" = []  # of this process, at most one


def _print_and_exit(error: SectionOverrun) -> None:
    sys.stderr.write(f"{error.stacks}\n{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(1)


_ends: list[Callable[[SectionOverrun], None]] = [_print_and_exit]  # the last one ends the process


def end_overruns_by(end: Callable[[SectionOverrun], None]) -> None:
    """Sets the function that ends this process after an overrun, in the watching thread. By default the error is printed.

    If it returns, the process goes on and nothing is watched any more.
    """
    _ends.append(end)


@contextmanager
def watch_sections(limits: Mapping[str, float | None], *, process: Process) -> Iterator[None]:
    """Limits the sections inside, on every rank. A process that exceeds a limit ends with exit code 1.

    limits: seconds by section; one that is missing or None has no limit, except that a step may take ten times the longest one so far, and
    at least `process.timeout_seconds`, if `STEP` is None. Outside of other sections, `SETUP` is open. Without limits nothing is watched.
    """
    if not any(limits.values()):
        yield
        return
    assert not _watchers, "one watcher per process"
    watcher = _Watcher(limits, process=process)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.clear()
        watcher.close()


@contextmanager
def section(name: str, *, detail: str = "") -> Iterator[None]:
    """Measures a part of the run against its limit, if sections are watched. name: a key of `KEYS`. detail: for the message."""
    if not _watchers:
        yield
        return
    watcher = _watchers[0]
    watcher.enter(name, detail=detail)
    try:
        yield
    finally:
        watcher.leave()


class _Watcher:
    def __init__(self, limits: Mapping[str, float | None], *, process: Process) -> None:
        self._limits = {name: limits[name] for name in KEYS if name in limits}
        self._rank, self._world, self._timeout = process.rank, process.world_size, process.timeout_seconds
        self._longest_step = 0.0
        self._lock = threading.Lock()
        self._open = [_Open(name=SETUP, detail="", entered=time.monotonic())]
        self._main = threading.main_thread().ident
        self._store: dist.Store | None = None
        if process.world_size > 1:  # a connection of its own: the main thread may wait in the other one
            # pyrefly: ignore[missing-attribute]  # torch's stub lacks it
            own_connection: dist.Store = default_store().clone()
            self._store = dist.PrefixStore(f"ztk/sections/{next(_watched)}", own_connection)
        self._asked, self._is_answered = 0.0, False
        self._ended = threading.Event()
        given = [seconds for seconds in self._limits.values() if seconds]
        self._tick = min(_LONGEST_TICK_SECONDS, *(seconds / 10 for seconds in given))
        self._thread = threading.Thread(target=self._watch, name="ztk-sections", daemon=True)
        end_with_process(self._thread, end=partial(_stop, self._thread, self._ended))
        self._thread.start()

    def enter(self, name: str, *, detail: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._open[-1].age += now - self._open[-1].entered
            self._open.append(_Open(name=name, detail=detail, entered=now))

    def leave(self) -> None:
        now = time.monotonic()
        with self._lock:
            left, outer = self._open.pop(), self._open[-1]
            if left.name == STEP:
                self._longest_step = max(self._longest_step, left.age + now - left.entered)
            outer.entered = now
            if len(self._open) == 1:
                outer.age = 0.0  # the run has made progress

    def close(self) -> None:
        _stop(self._thread, self._ended)

    def _watch(self) -> None:
        try:
            last, armed = time.monotonic(), 0.0
            while not self._ended.wait(self._tick):
                now = time.monotonic()
                gap, last = now - last - self._tick, now
                with self._lock:
                    top = self._open[-1]
                    if gap > _LONGEST_TICK_SECONDS:  # the process was stopped
                        top.entered = min(now, top.entered + gap)
                    seconds = top.age + now - top.entered
                limit = self._limit(top.name)
                if limit is not None and now - armed > _LONGEST_TICK_SECONDS:
                    armed = now
                    faulthandler.dump_traceback_later(max(1.0, limit - seconds) + _ANSWER_SECONDS, file=2)
                elif limit is None:
                    faulthandler.cancel_dump_traceback_later()
                if limit is not None and (error := self._overrun(top, seconds=seconds, limit=limit)) is not None:
                    return self._fail(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            forget(threading.current_thread())

    def _limit(self, name: str) -> float | None:
        limit = self._limits.get(name)
        if limit is None and name == STEP and name in self._limits:
            return max(self._timeout, _TIMES * self._longest_step)
        return limit

    def _overrun(self, top: _Open, *, seconds: float, limit: float) -> SectionOverrun | None:
        """Asks or answers as in [Note: Overruns]. Returns the error of all ranks once it is known."""
        is_over, now, patience = seconds > limit, time.monotonic(), min(_ANSWER_SECONDS, max(2.0, limit))
        if self._store is None:
            return self._error({0: _stack(self._main)}, named=self._named(top, limit=limit)) if is_over else None
        if not is_over and (seconds < limit / 2 or now - self._asked < patience / 4):
            return None
        self._asked = now
        named = self._named(top, limit=limit)
        found = self._exchanged(
            partial(self._look, named if is_over else "", patience=patience), seconds=2 * patience + _STORE_SECONDS
        )
        if found is None and is_over:  # not even the store answers
            return self._error(
                {self._rank: _stack(self._main)}, named=f"{named}, and the store of rank 0 does not answer"
            )
        return SectionOverrun(found["message"], stacks=found["stacks"]) if found else None

    def _named(self, top: _Open, *, limit: float) -> str:
        adapts = top.name == STEP and self._limits.get(STEP) is None
        bound = f"{limit:.0f} s ({KEYS[top.name]} is not set)" if adapts else f"{KEYS[top.name]}={limit:g}"
        return f"{top.detail or top.name} took longer than {bound}"

    def _exchanged(self, exchange: Callable[[], dict[str, str]], *, seconds: float) -> dict[str, str] | None:
        """The result of an exchange with the store, or None if there is none in time: a request to a lost host has no time limit."""
        found: list[dict[str, str]] = []

        def run() -> None:
            with suppress(RuntimeError):  # torch's errors of a store that is gone
                found.append(exchange())

        thread = threading.Thread(target=run, name="ztk-sections-store", daemon=True)
        thread.start()
        thread.join(seconds)
        return found[0] if found else None

    def _look(self, named: str, *, patience: float) -> dict[str, str]:
        """Returns the error of all ranks, or an empty one. named: the overrun of this rank, or ""."""
        store = self._store
        assert store is not None, "several ranks"
        if not store.check(["request"]):
            if not named:
                return {}
            own = json.dumps({"rank": self._rank, "named": named})
            if store.compare_set("request", "", own).decode() == own:
                return self._collect(named, patience=patience)
        if not self._is_answered:
            store.set(f"answer/{self._rank}", json.dumps(_stack(self._main)))
            self._is_answered = True
        end = time.monotonic() + 2 * patience
        while not store.check(["error"]) and time.monotonic() < end:
            time.sleep(0.2)
        return json.loads(store.get("error")) if store.check(["error"]) else {}

    def _collect(self, named: str, *, patience: float) -> dict[str, str]:
        """Waits for the other ranks' answers, and stores the error."""
        store = self._store
        assert store is not None, "several ranks"
        answers: dict[int, Any] = {self._rank: _stack(self._main)}
        end = time.monotonic() + patience
        while len(answers) < self._world and time.monotonic() < end:
            for rank in range(self._world):
                if rank not in answers and store.check([f"answer/{rank}"]):
                    answers[rank] = json.loads(store.get(f"answer/{rank}"))
            time.sleep(0.2)
        error = self._error(answers, named=named)
        found = {"message": str(error), "stacks": error.stacks}
        store.set("error", json.dumps(found))
        return found

    def _error(self, answers: dict[int, Any], *, named: str) -> SectionOverrun:
        """The error that names the ranks: first those without an answer, then those that wait for no other rank."""
        silent = [rank for rank in range(self._world) if rank not in answers]
        places: dict[tuple[bool, str], list[int]] = {}
        for rank in sorted(answers):
            answer = answers[rank]
            places.setdefault((answer["waits"], answer["place"]), []).append(rank)
        said = [
            f"{place_of(rank)} does not answer: its process is stopped, its host is lost, or a call holds Python's lock"
            for rank in silent[:_NAMED]
        ]
        if len(silent) > _NAMED:
            said.append(f"and {len(silent) - _NAMED} more ranks do not answer")
        for (waits, place), ranks in sorted(places.items())[:_NAMED]:
            which = place_of(ranks[0]) if len(ranks) == 1 else ranks_text(ranks)
            verb = (
                ("waits for other ranks" if waits else "is")
                if len(ranks) == 1
                else ("wait for other ranks" if waits else "are")
            )
            said.append(f"{which} {verb} at {place}")
        stacks = [
            f"{place_of(ranks[0])}:\n{answers[ranks[0]]['stack']}" for _, ranks in sorted(places.items())[:_NAMED]
        ]
        return SectionOverrun(f"{named}: {'; '.join(said)}", stacks="\n".join(stacks))

    def _fail(self, error: SectionOverrun) -> None:
        with suppress(OSError, ValueError):  # a closed stream
            faulthandler.dump_traceback(file=2)
        _ends[-1](error)


def _stack(thread: int | None) -> dict[str, Any]:
    """The stack of a thread: its innermost frames, the place, and whether it waits for other ranks."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return {"waits": False, "place": "its end", "stack": ""}
    frames = traceback.extract_stack(frame)
    waits = any(each.filename.startswith(_COMM) for each in frames)
    shown = [each for each in frames if not waits or not each.filename.startswith(_COMM)]
    while len(shown) > 1 and _is_library(shown[-1].filename):
        shown.pop()
    last = shown[-1]
    return {
        "waits": waits,
        "place": f"{_short(last.filename)}:{last.lineno} in {last.name}",
        "stack": "".join(traceback.format_list(frames[-_FRAMES:])),
    }


def _is_library(name: str) -> bool:
    """Whether a file belongs to Python or an installed package, or is no file."""
    return name.startswith("<") or name.startswith(sys.base_prefix) or "site-packages" in name


def _short(name: str) -> str:
    path = Path(name)
    return os.fspath(path.relative_to(_ROOT.parent)) if path.is_relative_to(_ROOT.parent) else name


def _stop(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    join_busy(thread)
