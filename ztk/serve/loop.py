"""The engine's thread: any thread may submit requests, and outputs return to the event loop that submitted them."""

import asyncio
import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from ztk.core.runtime.comm import CommMismatch, PeerLost
from ztk.inference import Generator, Output, SamplingParams
from ztk.inference.parallel import BEAT_SECONDS
from ztk.serve.metrics import Metrics, Timed

_LOGGER = logging.getLogger(__name__)


class Busy(Exception):
    """Too many requests are waiting."""


class Restarted:
    """The answers to a job begin again, with new weights: its earlier outputs do not count."""


# The number of a request's job, and one of its outputs, their new beginning, or the engine's error.
Item = tuple[int, Output | Restarted | Exception]


class Outbox:
    """The engine's outputs for one HTTP request. Filled by the engine's thread, emptied on the event loop that created it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: collections.deque[Item] = collections.deque()
        self._ready, self.is_left = asyncio.Event(), False

    def put(self, items: Iterable[Item]) -> None:
        """Adds items, from any thread. Call `wake` afterwards."""
        self._items.extend(items)

    def wake(self) -> None:
        """Signals new items, on the event loop."""
        self._ready.set()

    def leave(self) -> None:
        """Marks the client as disconnected, on the event loop; `take` then returns nothing."""
        self.is_left = True
        self._ready.set()

    async def take(self) -> list[Item]:
        """Waits for items and returns all of them; none if the client has disconnected."""
        while not self._items and not self.is_left:  # a wake may come for items that were taken already
            await self._ready.wait()
            self._ready.clear()
        return [] if self.is_left else [self._items.popleft() for _ in range(len(self._items))]


@dataclass(kw_only=True, eq=False)
class Job:
    """One prompt of one HTTP request. number: index in the request's `outbox`. adapter: its name, or None for the base model. can_restart:
    none of its outputs has been sent.
    """

    prompt: list[int]
    sampling: SamplingParams
    outbox: Outbox
    number: int = 0
    adapter: str | None = None
    can_restart: bool = True
    request_id: int | None = None
    timed: Timed = field(default_factory=Timed)


class OnUpdate(StrEnum):
    """What new weights do with requests under way."""

    finish = "finish"  # they end with the old weights, and later requests wait for the new ones
    continue_ = "continue"  # their next tokens are drawn with the new weights
    restart = "restart"  # their answers begin again, except those whose tokens have been streamed, which continue


@dataclass(kw_only=True, slots=True)
class Update:
    """New weights. prepare: begins to read them while requests are answered; they are taken when its future is done. take: makes the engine
    compute with them. done: set afterwards.
    """

    take: Callable[[], None]
    on_update: OnUpdate
    prepare: Callable[[], Future[None]] | None = None
    prepared: Future[None] | None = None
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # a client that leaves cancels nothing

    @property
    def is_due(self) -> bool:
        """Whether the engine may take them."""
        return self.prepare is None or (self.prepared is not None and self.prepared.done())


def deliver(items: Sequence[tuple[Job, Output | Restarted | Exception]]) -> None:
    """Puts outputs into their outboxes, from another thread, and wakes each event loop once."""
    found: dict[asyncio.AbstractEventLoop, dict[Outbox, list[Item]]] = {}
    for job, item in items:
        found.setdefault(job.outbox.loop, {}).setdefault(job.outbox, []).append((job.number, item))
    for loop, boxes in found.items():
        for box, own in boxes.items():
            box.put(own)
        with suppress(RuntimeError):  # an event loop that has ended must not affect the others
            loop.call_soon_threadsafe(_wake, list(boxes))


def _wake(boxes: list[Outbox]) -> None:
    for box in boxes:
        box.wake()


class EngineLoop:
    """Owns a `Generator`, which only this thread uses.

    An error of one sequence is an output of its job. An error without a sequence ends all jobs, and the loop continues. After an error of
    a rank or a device the engine is unusable: the thread ends, and `error` is set.

    max_waiting: most prompts without an output; beyond, `submit` raises `Busy`.
    """

    def __init__(self, generator: Generator, *, max_waiting: int, name: str = "model") -> None:
        """name: the model's name in metrics."""
        self.generator, self._max_waiting = generator, max_waiting
        self.metrics = Metrics(
            name, running=lambda: self.running, waiting=lambda: self.waiting, usage=lambda: generator.cache_usage
        )
        self._queued: set[int] = set()  # requests that the engine has not taken yet
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._updates: collections.deque[Update] = collections.deque()
        self._held: list[Job] = []  # begin after an update
        self._jobs: dict[int, Job] = {}
        self._waiting: dict[Job, None] = {}  # jobs without an output, in order
        self._wake = threading.Condition()
        self._stopping = False
        self._first_asked: float | None = None
        self.first_token_seconds: float | None = (
            None  # times from the loaded model: of the engine's opening, and of the first request until its token
        )
        self.error: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="ztk-serve", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Number of requests that run or wait."""
        return len(self._jobs) + len(self._commands) + len(self._held)

    @property
    def waiting(self) -> int:
        """Number of prompts without an output."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
            Busy: too many are waiting.
            RuntimeError: the engine has stopped.
        """
        with self._wake:
            self._check_running()
            if len(self._waiting) >= self._max_waiting:
                self.metrics.count("refused")
                raise Busy
            self._first_asked = self._first_asked or time.perf_counter()
            self._waiting[job] = None
            self.metrics.ask(job.timed, prompt_tokens=len(job.prompt))
            self._commands.append(lambda: self._begin(job))
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Frees a job's resources within one step of the engine."""
        with self._wake:
            self._commands.append(lambda: self._end(job))
            self._wake.notify()

    def update(self, update: Update) -> None:
        """Queues new weights, which are taken between two steps.

        Raises:
            RuntimeError: the engine has stopped.
        """
        with self._wake:
            self._check_running()
            self._updates.append(update)
            self._wake.notify()

    def _check_running(self) -> None:
        if self.error is not None or self._stopping:
            raise RuntimeError(f"the engine has stopped: {self.error or 'the server shuts down'}")

    def stop(self, *, drain_seconds: float) -> None:
        """Rejects new jobs, waits for running ones, and ends the thread."""
        deadline = time.monotonic() + drain_seconds
        with self._wake:
            self._stopping = True
            self._wake.notify()
        while self.running and self.error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._wake:
            self._commands.append(self._raise_stop)
            self._wake.notify()
        self._thread.join()

    # Engine thread

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._turn()
                except _Stop:
                    break
                except Exception as error:  # noqa: BLE001  # those who wait get it, whatever it is
                    if self.generator.is_lost or isinstance(error, PeerLost | CommMismatch):
                        raise
                    _LOGGER.error("all requests end by an error of the engine", exc_info=error)
                    self._fail_all(error)
                    self.generator.reset()
        except Exception as error:  # noqa: BLE001
            with self._wake:  # `submit` rejects from now on; a job submitted during the step is only in `_waiting`
                self.error = error
        self._fail_all(self.error or RuntimeError("the server shuts down"))
        if self.error is not None:
            self.on_failure()

    def _turn(self) -> None:
        """Runs queued commands and one step."""
        with self._wake:
            waits = self._updates and not self._updates[0].is_due and self._updates[0].prepared is not None
            if not self._commands and (waits or not self._updates) and not self.generator.has_work:
                self._wake.wait(timeout=BEAT_SECONDS if self.generator.leads else None)
        while self._commands:  # one at a time, so that the others remain after an error
            self._commands.popleft()()
        self._prepare_updates()
        self._take_updates()
        if not self.generator.has_work:
            self.generator.beat()
            return
        started = time.perf_counter()
        outputs = self.generator.step()
        self._record_begun(at=started)
        self._hand_out(outputs)
        self.metrics.count("seconds", by=time.perf_counter() - started)

    def _prepare_updates(self) -> None:
        """Begins to read the oldest queued weights."""
        update = self._updates[0] if self._updates else None
        if update is None or update.prepare is None or update.prepared is not None:
            return
        try:
            update.prepared = update.prepare()
        except RuntimeError as error:
            self._updates.popleft().done.set_exception(error)
        else:
            update.prepared.add_done_callback(self._notify)

    def _notify(self, prepared: Future[None]) -> None:
        with self._wake:
            self._wake.notify()

    def _take_updates(self) -> None:
        """Takes weights that were read, unless requests must end before."""
        while self._updates and self._updates[0].is_due:
            update = self._updates[0]
            if update.on_update == OnUpdate.finish and self.generator.has_work:
                break
            try:
                update.take()
            except Exception as error:
                if self.generator.is_lost or isinstance(error, PeerLost | CommMismatch):
                    raise
                self._updates.popleft().done.set_exception(error)
            else:
                self._updates.popleft().done.set_result(None)
                if update.on_update == OnUpdate.restart:
                    self._restart()
        if not self._holds:
            held, self._held = self._held, []
            for job in held:
                self._begin(job)

    @property
    def _holds(self) -> bool:
        """Whether new requests wait for weights that have been read."""
        return bool(self._updates) and self._updates[0].is_due

    def _restart(self) -> None:
        """Begins answers again."""
        jobs = [job for job in self._jobs.values() if job.can_restart]
        deliver([(job, Restarted()) for job in jobs])
        for job in jobs:
            assert job.request_id is not None, "it has begun"
            del self._jobs[job.request_id]
            self.generator.cancel(job.request_id)
            self._queued.discard(job.request_id)
            self._waiting[job] = None
            self._begin(job)

    def _fail_all(self, error: Exception) -> None:
        """Ends every running or waiting job and every update with `error`."""
        while self._updates:
            self._updates.popleft().done.set_exception(error)
        self._held.clear()
        with self._wake:
            jobs = list(dict.fromkeys((*self._jobs.values(), *self._waiting)))
            self._jobs.clear()
            self._waiting.clear()
            # Commands that begin or end those jobs are obsolete. The command that ends this thread is not.
            self._commands = collections.deque(one for one in self._commands if one == self._raise_stop)
        self.metrics.count("failed", by=len(jobs))
        self._queued.clear()
        deliver([(job, error) for job in jobs])

    def _begin(self, job: Job) -> None:
        if job not in self._waiting:
            return  # it has ended already
        if self._holds:
            self._held.append(job)
            return
        try:
            job.request_id = self.generator.submit(job.prompt, sampling=job.sampling, adapter=job.adapter).id
        except Exception as error:  # noqa: BLE001
            self._waiting.pop(job, None)
            deliver([(job, error)])
            return
        self._jobs[job.request_id] = job
        self._queued.add(job.request_id)

    def _end(self, job: Job) -> None:
        self._waiting.pop(job, None)
        if job.request_id is not None and self._jobs.pop(job.request_id, None) is not None:
            self.generator.cancel(job.request_id)
            self._queued.discard(job.request_id)
            self.metrics.count("cancelled")

    def _hand_out(self, outputs: list[Output]) -> None:
        """Delivers one step's outputs, several of which may belong to one job, and drops the jobs that have ended."""
        if self.first_token_seconds is None and any(output.token is not None for output in outputs):
            self._record_first_token()
        delivered: list[tuple[Job, Output]] = []
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            self._waiting.pop(job, None)
            self.metrics.draw(job.timed, output=output)
            delivered.append((job, output))
        deliver(delivered)
        for number in {output.request_id for output in outputs}:
            if not self.generator.is_open(number) and (job := self._jobs.pop(number, None)) is not None:
                self.metrics.end(job.timed)

    def _record_begun(self, *, at: float) -> None:
        """Records which requests the engine took in the step that began at `at`."""
        for number in [one for one in self._queued if self.generator.is_begun(one)]:
            self._queued.discard(number)
            if (job := self._jobs.get(number)) is not None:
                self.metrics.begin(job.timed, at=at)

    def _record_first_token(self) -> None:
        assert self._first_asked is not None, "a request was submitted"
        opening, answering = self.generator.opening_seconds, time.perf_counter() - self._first_asked
        self.first_token_seconds = opening + answering
        self.metrics.show_opening(self.first_token_seconds)
        _LOGGER.info(
            "first token %.2f s after the model was loaded: %.2f s until the engine was open, %.2f s from the first request on",
            self.first_token_seconds,
            opening,
            answering,
        )

    def _raise_stop(self) -> None:
        raise _Stop


class _Stop(Exception):
    pass
