"""Seconds per phase of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from ztk.core.runtime.ranges import named


class PhaseClock:
    """Adds up wall seconds per phase: forward, backward, bubble (a pipeline waits), communication, optimizer, io.

    Phases nest; time in an inner phase does not count for the outer one, so the phases of a step add up to its duration.
    On an accelerator the host runs ahead of the device, so a phase is the time the host spent in it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []  # per open phase: seconds that belong to the phases inside it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            with named(f"phase {name}"):
                yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] += elapsed - self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed
