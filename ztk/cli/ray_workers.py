"""The part of `launch=ray` that runs in Ray's processes: a task that runs Ray Train, and its workers, each with a rank as child process.

Ray Train runs a worker's function in a thread, which gets no signal, and the worker's process is Ray's. So the function starts the rank as on
one machine: the rank has a main thread for signals, and its end is not the end of the worker. The kernel kills a rank whose worker has died.
"""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import TrainingFailedError, UserCallback
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ztk.cli.elastic import set_aside
from ztk.core.launch import (
    Child,
    RankError,
    RankFailure,
    allocator_settings,
    first_cause,
    forget_failure,
    log_path,
    read_failure,
    start_process,
    worker_command,
)
from ztk.core.launch.errors import failure_of_exit
from ztk.core.policies.records import replace_file

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 10.0  # between reports of a row; Ray Train takes at most one in two seconds
_ROW_BYTES = 2**16  # a row is smaller
_LAST_WORDS_SECONDS = 2.0  # in which the first cause of a lost connection arrives


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRun:
    """A run whose `config.yaml` is written. resources: cores and GPUs of a rank. logs: rank 0, too, writes into its log, in place of the
    terminal. variables: environment of the ranks. continued: text of `config.yaml` for the starts after a failure.
    """

    folder: Path
    ranks: int
    resources: dict[str, float]
    max_failures: int
    logs: bool
    variables: dict[str, str]
    continued: str


class Desk:
    """An actor of the command. Workers of its runs get the command's signals here, and leave news of their run: the hosts of its ranks, and
    failures.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._news: dict[Path, list[tuple[int, str] | RankError]] = defaultdict(list)
        self._starts: Counter[tuple[Path, int]] = Counter()
        self._changed = asyncio.Condition()

    async def arrive(self, run: Path, *, rank: int, host: str) -> int:
        """Notes the host of a rank. Returns how often the rank has started before."""
        self._news[run].append((rank, host))
        self._starts[run, rank] += 1
        return self._starts[run, rank] - 1

    async def fail(self, run: Path, *, error: RankError) -> None:
        """Notes a failure, after which all ranks start again or the run ends."""
        self._news[run].append(error)

    async def news(self, run: Path, *, seen: int) -> list[tuple[int, str] | RankError]:
        """News of a run after the first `seen` ones."""
        return self._news[run][seen:]

    async def interrupt(self, number: int) -> None:
        """Sends a signal to the ranks of all runs."""
        async with self._changed:
            self._signals.append(number)
            self._changed.notify_all()

    async def signal(self) -> int:
        """Waits for the first signal."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._signals)
            return self._signals[0]


def fit(run: RayRun, desk: Any) -> str:
    """Runs Ray Train to the end of a run. Returns the reason of a failure, or ""."""
    trainer = DataParallelTrainer(
        _run_rank,
        train_loop_config={"run": run, "desk": desk},
        scaling_config=ScalingConfig(
            num_workers=run.ranks, use_gpu="GPU" in run.resources, resources_per_worker=run.resources
        ),
        run_config=RunConfig(
            name=run.folder.name,
            storage_path=str(run.folder.parent),
            failure_config=FailureConfig(max_failures=run.max_failures),
            callbacks=[_Failures(run, desk)],
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return str(error)
    return ""


class _Failures(UserCallback):
    """Leaves the first cause of a failure at the desk. It runs in Ray Train's controller, before all ranks start again."""

    def __init__(self, run: RayRun, desk: Any) -> None:
        self._run, self._desk = run, desk

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        folder = self._run.folder
        written = (read_failure(folder, rank=rank) for rank in range(self._run.ranks) if rank not in worker_exceptions)
        raised = (
            error.failure if isinstance(error, RankError) else _lost(error, rank=rank)
            for rank, error in worker_exceptions.items()
        )
        failures = [*filter(None, written), *raised]
        cause = first_cause(failures)
        killed = tuple(failure.rank for failure in failures if failure.killed)
        error = RankError(cause, log=str(log_path(folder, rank=cause.rank)), killed=killed)
        ray.get(self._desk.fail.remote(folder, error=error))


def _lost(error: Exception, *, rank: int) -> RankFailure:
    """Describes a rank whose worker of Ray, or the machine of it, has ended."""
    error = getattr(error, "health_check_failure", error)
    reason = next((line for line in map(str.strip, str(error).splitlines()[1:]) if line), str(error))
    return RankFailure(
        rank=rank,
        kind="",
        message=f"was lost with its worker of Ray: {type(error).__name__}: {reason}",
        trace="",
        time=time.time(),
        secondary=False,
        code=128 + signal.SIGKILL,
    )


def _run_rank(settings: dict[str, Any]) -> None:
    """The function of a worker of Ray Train. Returns if its rank has ended well or after a signal.

    Raises:
        RankError: the rank failed.
    """
    run, desk = settings["run"], settings["desk"]
    rank = ray.train.get_context().get_world_rank()
    start = ray.get(desk.arrive.remote(run.folder, rank=rank, host=socket.gethostname()))
    if rank == 0:
        _prepare(run, start=start)
    place = broadcast_from_rank_zero(_free_place() if rank == 0 else None)
    ended = threading.Event()
    reports = threading.Thread(target=_report, args=(run.folder, rank, ended), daemon=True)
    reports.start()
    code, is_interrupted = _run_child(run, rank=rank, place=place, desk=desk)
    if code and not is_interrupted:
        failure = read_failure(run.folder, rank=rank) or failure_of_exit(code, rank=rank, noticed=time.time())
        if failure.secondary:
            time.sleep(_LAST_WORDS_SECONDS)
        raise RankError(failure, log=str(log_path(run.folder, rank=rank)), killed=(rank,) if failure.killed else ())
    ended.set()
    reports.join()


def _prepare(run: RayRun, *, start: int) -> None:
    """Removes the errors of earlier starts. After a restart, keeps their logs and lets the run continue from its latest checkpoint."""
    if start:
        with suppress(FileNotFoundError):  # no rank of the start has written
            set_aside(run.folder / "ranks", name=f"ranks-of-start-{start}")
        replace_file(run.folder / "config.yaml", text=run.continued)
    for rank in range(run.ranks):
        forget_failure(run.folder, rank=rank)


def _free_place() -> tuple[str, int]:
    """The address of this worker, and a port that is free there."""
    with socket.create_server(("", 0)) as probe:
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _run_child(run: RayRun, *, rank: int, place: tuple[str, int], desk: Any) -> tuple[int, bool]:
    """Runs the rank. Returns its exit code, -n after signal n, and whether the command had got a signal."""
    context = ray.train.get_context()
    local = 0 if "GPU" in run.resources else context.get_local_rank()  # Ray shows a worker its own GPU alone
    environment = os.environ | run.variables | allocator_settings()
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(run.ranks),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": place[0],
        "MASTER_PORT": str(place[1]),
    }
    child = Child(rank=rank, command=worker_command(run.folder / "config.yaml"), environment=environment)
    if rank == 0 and not run.logs:
        process = start_process(child, log=None)
    else:
        path = log_path(run.folder, rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as log:
            process = start_process(child, log=log)
    signalled = desk.signal.remote()
    while process.poll() is None:
        if ray.wait([signalled], timeout=_POLL_SECONDS)[0]:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, ray.get(signalled))
            break
    return process.wait(), bool(ray.wait([signalled], timeout=0)[0])


def _report(folder: Path, rank: int, ended: threading.Event) -> None:
    """Passes rows of `metrics.jsonl` to `ray.train.report`, which all workers call together. Rank 0 decides when."""
    rows = _newest_rows(folder / "metrics.jsonl", ended) if rank == 0 else repeat({})
    for row in rows:
        if not broadcast_from_rank_zero(True):
            return
        ray.train.report(row)
    broadcast_from_rank_zero(False)


def _newest_rows(path: Path, ended: threading.Event) -> Iterator[dict[str, Any]]:
    """Yields the last row every few seconds, if it is new, until the rank has ended."""
    shown, is_last = b"", False
    while not is_last:
        is_last = ended.wait(_REPORT_SECONDS)
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(-min(_ROW_BYTES, path.stat().st_size), os.SEEK_END)
            row = next((line for line in reversed(file.readlines()) if line.endswith(b"\n")), b"")
            if row not in (shown, b""):
                shown = row
                yield json.loads(row)
