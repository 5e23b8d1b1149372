"""Seconds of a call that all ranks make at the same time."""

import time
from collections.abc import Callable, Iterator

import torch

from ztk.core.runtime import Process

ROUNDS = 5
ROUND_SECONDS = 0.2
LEAST = 1e-9  # seconds: less is no measurement


def seconds_of_call(
    process: Process, *, run: Callable[[], object], rounds: int | None = None, round_seconds: float | None = None
) -> float:
    """Of one call: the fastest round of several calls, which all ranks begin together. How many calls a round has, rank 0 decides.

    The fastest, because whatever else runs on a machine makes rounds slower and never faster.

    rounds: None: ROUNDS. round_seconds: None: ROUND_SECONDS.
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
