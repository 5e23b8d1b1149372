"""Samples the next rollouts on threads, while the run updates on the previous one."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ztk.rl.rollout.buffer import Buffer, GatherObjects, Samples
from ztk.rl.rollout.environments import Episode


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Samples of a rollout, without rewards. episodes: one per sample, with an environment. begun: rewards that are under way."""

    samples: Samples
    episodes: Sequence[Episode] = ()
    begun: Any = None


class _Rollout:
    """One that is being sampled, or that is complete. late: event of `Ahead.start`."""

    def __init__(self, *, late: threading.Event | None = None) -> None:
        self.late = late
        self.thread: threading.Thread | None = None
        self.drawn: Drawn | None = None
        self.error: BaseException | None = None

    def start(self, draw: Callable[[], Drawn]) -> None:
        def run() -> None:
            try:
                self.drawn = draw()
            except BaseException as error:  # noqa: BLE001 - raised again by `check`
                self.error = error

        # No daemon: a thread that computes while the interpreter ends aborts the process.
        self.thread = threading.Thread(target=run, name="ztk-ahead")
        self.thread.start()


class Ahead:
    """Holds rollouts, oldest first, that are being sampled or are complete and not yet dropped. A context, at whose end sampling stops.

    A thread makes no collective calls and reads no weights of the engine, so its answers do not depend on concurrent work of the run.
    """

    def __init__(self) -> None:
        self._held = deque[_Rollout]()

    def __len__(self) -> int:
        return len(self._held)

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *exception: object) -> None:
        """Raises SystemExit in the threads, at their next Python instruction, and waits for their ends."""
        threads = [one.thread for one in self._held if one.thread is not None and one.thread.is_alive()]
        for thread in threads:
            assert thread.ident is not None, "it has started"
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        for thread in threads:
            thread.join()

    def start(self, draw: Callable[[], Drawn], *, late: threading.Event | None = None) -> None:
        """Starts the rollout after those that are held. late: event that is set when `first` waits for it."""
        self.check()
        self._held.append(_Rollout(late=late))
        self._held[-1].start(draw)

    def first(self) -> Drawn | None:
        """Waits for the oldest rollout and returns it, or None if nothing is held. Raises the exception of a thread."""
        if self._held and (thread := self._held[0].thread) is not None:
            if self._held[0].late is not None:
                self._held[0].late.set()
            thread.join()
        self.check()
        return self._held[0].drawn if self._held else None

    def drop(self) -> None:
        """Drops the oldest rollout, if there is one."""
        if self._held:
            self._held.popleft()

    def wait(self) -> list[Drawn]:
        """Waits for all rollouts. Raises the exception of a thread."""
        for one in self._held:
            if one.thread is not None:
                one.thread.join()
        self.check()
        return [one.drawn for one in self._held if one.drawn is not None]

    def check(self) -> None:
        """Raises the exception of a thread, if there is one yet."""
        for one in self._held:
            if one.error is not None:
                raise one.error

    def state_dict(self, *, gather: GatherObjects, updates: int) -> list[dict[str, Any]]:
        """Waits for the rollouts and returns them as JSON values, the same on all ranks.

        A collective call. updates: optimizer steps per rollout.
        """
        return [_state_of(drawn, gather=gather, updates=updates) for drawn in self.wait()]

    def load_state_dict(
        self,
        states: Sequence[Mapping[str, Any]],
        *,
        updates: int,
        per_update: int,
        rank: int,
        world_size: int,
    ) -> None:
        """Restores the rollouts of a checkpoint, on any number of ranks. Raises ValueError as `Buffer.load_state_dict` does."""
        self._held.clear()
        for state in states:
            held = Buffer(updates=updates)
            held.load_state_dict(state["samples"], per_update=per_update, rank=rank, world_size=world_size)
            assert held.samples is not None, "it is not used up"
            episodes = {one["number"]: Episode.from_json(one) for part in state["episodes"] for one in part}
            numbers = held.samples.numbers.tolist() if episodes else []
            one = _Rollout()
            one.drawn = Drawn(samples=held.samples, episodes=[episodes[number] for number in numbers])
            self._held.append(one)


def _state_of(drawn: Drawn, *, gather: GatherObjects, updates: int) -> dict[str, Any]:
    held = Buffer(updates=updates)
    held.fill(drawn.samples)
    return {
        "samples": held.state_dict(gather=gather),
        "episodes": gather([episode.to_json() for episode in drawn.episodes]),
    }
