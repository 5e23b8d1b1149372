"""Times a call that all ranks make at the same time."""

import time
from collections.abc import Callable, Iterator

import torch

from ztk.core.runtime import Process

ROUNDS = 5
ROUND_SECONDS = 0.2
LEAST = 1e-9  # seconds; the clock cannot resolve less


def seconds_of_call(
    process: Process, *, run: Callable[[], object], rounds: int | None = None, round_seconds: float | None = None
) -> float:
    """Returns the seconds of one call: the minimum over rounds of several calls. All ranks start each round together.

    The minimum is used because other processes on the machine only ever make a round slower. Rank 0 chooses the calls per round.

    rounds, round_seconds: default to `ROUNDS` and `ROUND_SECONDS`.
    """
    run()
    (first,) = _timed(process, run=run, calls=1, rounds=1)
    wanted = max(1, int((ROUND_SECONDS if round_seconds is None else round_seconds) / max(first, 1e-6)))
    calls = process.comm.gather_numbers([wanted], label="calls")[0][0]
    return min(_timed(process, run=run, calls=min(int(calls), 10_000), rounds=rounds or ROUNDS))


def _timed(process: Process, *, run: Callable[[], object], calls: int, rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        process.comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if process.device.type == "cuda":
            torch.cuda.synchronize(process.device)
        yield (time.perf_counter() - start) / calls
