"""Samples the next rollout on a thread, while the run updates on the previous one."""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ztk.rl.rollout.buffer import Buffer, GatherObjects, Samples
from ztk.rl.rollout.environments import Episode


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Samples of a rollout, without rewards. episodes: one per sample, with an environment. step: the policy's step of the weights."""

    samples: Samples
    episodes: Sequence[Episode] = ()
    step: int = 0


class Ahead:
    """Holds one rollout that is being sampled, or that is complete and not yet replaced. A context, at whose end sampling stops.

    The thread makes no collective calls and reads a copy of the weights, so its answers do not depend on concurrent work of the run.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._drawn: Drawn | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *exception: object) -> None:
        """Raises SystemExit in the thread, at its next Python instruction, and waits for its end."""
        if self._thread is not None and self._thread.is_alive():
            assert self._thread.ident is not None, "it has started"
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit))
            self._thread.join()

    def start(self, draw: Callable[[], Drawn] | None) -> None:
        """Starts the next rollout in place of the held one. None leaves the place empty."""
        self.wait()
        self._drawn = None
        if draw is None:
            return

        def run() -> None:
            try:
                self._drawn = draw()
            except BaseException as error:  # noqa: BLE001 - raised again by `check`
                self._error = error

        # No daemon: a thread that computes while the interpreter ends aborts the process.
        self._thread = threading.Thread(target=run, name="ztk-ahead")
        self._thread.start()

    def wait(self) -> Drawn | None:
        """Waits for the held rollout and returns it, or None. Raises the exception of its thread."""
        if self._thread is not None:
            self._thread.join()
        self.check()
        return self._drawn

    def check(self) -> None:
        """Raises the exception of the thread, if there is one yet."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._error is not None:
            raise self._error

    def state_dict(self, *, gather: GatherObjects, updates: int) -> dict[str, Any] | None:
        """Waits for the held rollout and returns it as a JSON value, the same on all ranks, or None.

        A collective call. updates: optimizer steps per rollout.
        """
        drawn = self.wait()
        if drawn is None:
            return None
        held = Buffer(updates=updates)
        held.fill(drawn.samples)
        return {
            "samples": held.state_dict(gather=gather),
            "episodes": gather([episode.to_json() for episode in drawn.episodes]),
            "step": drawn.step,
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | None, *, updates: int, per_update: int, rank: int, world_size: int
    ) -> None:
        """Restores the rollout of a checkpoint, on any number of ranks. Raises ValueError as `Buffer.load_state_dict` does."""
        self._drawn = None
        if state is None:
            return
        held = Buffer(updates=updates)
        held.load_state_dict(state["samples"], per_update=per_update, rank=rank, world_size=world_size)
        assert held.samples is not None, "it is not used up"
        episodes = {one["number"]: Episode.from_json(one) for part in state["episodes"] for one in part}
        numbers = held.samples.numbers.tolist() if episodes else []
        drawn = {"samples": held.samples, "episodes": [episodes[number] for number in numbers]}
        self._drawn = Drawn(**drawn, step=state.get("step", 0))  # older checkpoints have none
