"""Real gloo processes, kept warm between tests.

`RankPool(2).run(function, key=value)` calls `function(process, key=value)` on every rank and returns the results in rank order. The
function must be importable. Starting a rank costs seconds (torch), a call costs milliseconds. After a failure the pool is
thrown away, because its ranks may wait for each other.
"""

import multiprocessing
import os
import tempfile
import traceback
from multiprocessing.connection import Connection, wait

import torch

TIMEOUT_SECONDS = 120.0


# Modules that ranks and commands (tests/commands.py) import.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "ztk.parallel.apply", "ztk.cli", "ztk.experiments.pretrain"]
PRELOADED += ["ztk.report.plot", "ztk.experiments.grpo", "ztk.experiments.serve", "transformers", "tests.commands"]
PRELOADED += ["tests.frozen"]


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Its processes are forks of one interpreter that has imported the modules of most ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailed(Exception):
    """The first failing rank's exception, with its traceback."""


class RankPool:
    """`world_size` processes on this machine, connected like the ranks of a run. seconds: limit of a call."""

    def __init__(self, world_size: int, *, seconds: float = TIMEOUT_SECONDS) -> None:
        self.world_size, self._seconds = world_size, seconds
        self._folder: tempfile.TemporaryDirectory | None = None  # where they find each other
        self._processes: list = []
        self._pipes: list[Connection] = []

    def run(self, function, **kwargs) -> list:
        """Results of `function(process, **kwargs)` in rank order; raises RankFailed."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, kwargs))
        results: list = [None] * self.world_size
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        failures = []
        while waiting:
            ready = wait(list(waiting), timeout=10 if failures else self._seconds)
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, results[rank] = pipe.recv()
                except EOFError:
                    ok, results[rank] = False, (True, f"rank {rank} died")
                if not ok:
                    failures.append(results[rank])
        if failures or waiting:
            self.close()
            failures.sort(key=lambda failure: failure[0])  # first causes before lost peers
            raise RankFailed(failures[0][1] if failures else f"ranks {sorted(waiting.values())} hang")
        return results

    def _start(self) -> None:
        context = forkserver()
        self._folder = tempfile.TemporaryDirectory(prefix="ztk-ranks-")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for work ends
        is_measured = "COVERAGE_PROCESS_CONFIG" in os.environ  # by coverage.py, which needs a rank's data file
        for process in self._processes:
            process.join(TIMEOUT_SECONDS if is_measured else 0)
            process.kill()
        for process in self._processes:
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._processes, self._pipes = None, [], []


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), ZTK_STORE=store)
    torch.set_num_threads(1)
    from ztk.core.runtime import PeerLost, Process

    process = Process.start(device="cpu", timeout_seconds=TIMEOUT_SECONDS)
    while True:
        try:
            function, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(process, **kwargs)))
        except BaseException as error:
            pipe.send((False, (isinstance(error, PeerLost), traceback.format_exc())))
