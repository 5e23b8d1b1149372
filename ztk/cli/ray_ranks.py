"""`launch=ray`: the ranks of a run as child processes of Ray actors, one actor per rank.

A rank has its own process, as on one machine: signals reach its main thread, and its end is not the end of Ray's worker. The actor starts it
in its placement, passes signals on, and returns its exit code. The kernel kills a rank whose actor has died.

[Note: Points of a sweep on Ray]
All points of a sweep ask for their placement at once. Ray starts those that fit, and an autoscaler adds machines for the others. Each run has
a thread, which waits for its placement and its ranks. The main thread receives signals, and `RayCluster.interrupt` passes them to all runs.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ztk.config import CONFIG_DIRS, Config
from ztk.core.launch import (
    Child,
    RankError,
    RankFailure,
    allocator_settings,
    first_cause,
    forget_failure,
    log_path,
    python_path,
    read_failure,
    start_process,
    worker_command,
)
from ztk.core.launch.errors import failure_of_exit
from ztk.core.policies.ending import ENDING
from ztk.core.policies.launch import start_seconds

_POLL_SECONDS = 0.2
_PLACE_SECONDS = 2.0  # between looks for a signal while Ray has no room
_MOST_RUNS = 10_000  # threads, one for each run of a sweep that has not ended
_LAST_WORDS_SECONDS = 2.0  # for the peers of a failed rank to write their errors
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_PASSED_ON = (CONFIG_DIRS, "ZTK_COMMAND")  # variables of this process that ranks read

Result = TypeVar("Result")


class RankActor:
    """Runs in a worker of Ray. Its methods overlap: `run` waits for the rank."""

    def __init__(self) -> None:
        self._pid = 0

    def place(self) -> tuple[str, str, int]:
        """The host name and address of this worker, and a port that is free there."""
        import ray

        with socket.create_server(("", 0)) as probe:
            return socket.gethostname(), ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, command: Sequence[str], *, environment: dict[str, str], rank: int, log: str | None) -> int:
        """Starts the rank and returns its exit code, -n after signal n. log: file of its output; None for the driver's terminal."""
        child = Child(rank=rank, command=command, environment=os.environ | environment)
        if log is None:
            process = start_process(child, log=None)
        else:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            with open(log, "w", encoding="utf-8") as file:
                process = start_process(child, log=file)
        self._pid = process.pid
        return process.wait()

    def send(self, number: int) -> None:
        """Sends a signal to the rank and its children."""
        if self._pid:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(self._pid, number)


class RayCluster:
    """The connection of a command to Ray, and the runs that the command has there. See [Note: Points of a sweep on Ray].

    Ray is the cluster of RAY_ADDRESS, the one that runs on this machine, or a new one on this machine, which ends with the command.
    """

    def __init__(self) -> None:
        import ray

        self.placed = 0  # runs that have their machines
        self._is_own = not ray.is_initialized()
        self._signals: list[int] = []
        self._runs: list[Future] = []
        self._threads = ThreadPoolExecutor(max_workers=_MOST_RUNS, thread_name_prefix="ztk-ray")
        if self._is_own:
            handlers = {kind: signal.getsignal(kind) for kind in ENDING}
            ray.init(log_to_driver=True, configure_logging=False)
            for kind, handler in handlers.items():  # Ray's own for SIGTERM ends the command before the ranks have saved
                signal.signal(kind, handler)

    def begin(self, run: Callable[[], Result]) -> "Future[Result]":
        """Calls `run` in a thread. It uses `run_on_ray` with this cluster."""
        self._runs.append(self._threads.submit(run))
        return self._runs[-1]

    def wait(self) -> None:
        """Returns when all runs have ended. Raises the first error that a run has not handled."""
        wait(self._runs)
        for run in self._runs:
            run.result()

    def interrupt(self, number: int) -> None:
        """Sends a signal to the ranks of all runs, and returns when they have saved their step and ended. A second Ctrl-C, which raises here,
        ends them at once.
        """
        self._signals.append(number)
        try:
            wait(self._runs)
        except (KeyboardInterrupt, SystemExit):
            self._signals.append(number)
            wait(self._runs)

    def close(self) -> None:
        """Ends all runs and the connection."""
        import ray

        if not all(run.done() for run in self._runs):  # after an error of this program
            self.interrupt(signal.SIGTERM)
        self._threads.shutdown()
        if self._is_own:
            ray.shutdown()

    def raise_received(self, *, after: int = 0) -> None:
        """Raises KeyboardInterrupt or SystemExit if more than `after` signals have come."""
        if len(self._signals) > after:
            _raise(self._signals[0])


def _raise(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def run_on_ray(
    config: Config, *, cluster: RayCluster, on_placed: Callable[[str], None], on_signal: Callable[[], None], logs: bool
) -> None:
    """Runs the ranks of a run whose `config.yaml` is written, and returns when all have ended well.

    on_placed: called with the hosts of the ranks when they start. on_signal: called when a signal arrives, which all ranks get.
    logs: rank 0, too, writes into its log, in place of the terminal.

    Raises:
        RankError: a rank failed. It has the first cause.
        TimeoutError: Ray has not the resources within `launch.start_seconds`, although no other run of the command uses any.
        KeyboardInterrupt, SystemExit: after a signal, when the ranks have saved their step and ended.
    """
    folder, launch = Path(config.output_dir), config.launch
    ranks = launch.ranks or 1
    for rank in range(ranks):
        forget_failure(folder, rank=rank)
    with _actors(config, cluster=cluster) as started:
        running: dict[Any, int] = {}
        found = _places(started)
        places, actors = zip(
            *sorted(found, key=lambda pair: pair[0][0]), strict=True
        )  # ranks of a host follow each other
        on_placed(", ".join(dict.fromkeys(host for host, _, _ in places)))
        for rank, actor in enumerate(actors):
            environment = _environment(rank, places=places, config=config)
            log = None if rank == 0 and not logs else str(log_path(folder, rank=rank))
            command = worker_command(folder / "config.yaml")
            running[actor.run.remote(command, environment=environment, rank=rank, log=log)] = rank
        try:
            failures = _wait(running, folder=folder, check=cluster.raise_received)
        except (KeyboardInterrupt, SystemExit) as error:
            on_signal()
            _send(actors, signal.SIGINT if isinstance(error, KeyboardInterrupt) else int(error.code or 143) - 128)
            seconds = config.checkpoint.grace_seconds or _GRACE_SECONDS
            _wait(running, folder=folder, seconds=seconds, check=lambda: cluster.raise_received(after=1))
            raise
        if failures:
            failures += _wait(running, folder=folder, seconds=_LAST_WORDS_SECONDS)
            _send(actors, signal.SIGTERM)
            _wait(running, folder=folder, seconds=_GRACE_SECONDS)
            _send(actors, signal.SIGKILL)
            cause = first_cause(failures)
            killed = tuple(failure.rank for failure in failures if failure.killed)
            raise RankError(cause, log=str(log_path(folder, rank=cause.rank)), killed=killed)


@contextmanager
def _actors(config: Config, *, cluster: RayCluster) -> Iterator[list[Any]]:
    """One actor per rank, each with its resources, on as few machines as possible."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    launch = config.launch
    each = {"CPU": launch.cpus_per_rank or 1} | ({"GPU": 1} if launch.device == "cuda" else {})
    group = placement_group([each] * (launch.ranks or 1), strategy="PACK")
    try:
        begun = time.monotonic()
        while not group.wait(timeout_seconds=_PLACE_SECONDS):
            cluster.raise_received()
            if cluster.placed:
                begun = time.monotonic()
            elif time.monotonic() - begun > start_seconds(launch):
                raise TimeoutError(
                    f"launch=ray: Ray has not {launch.ranks} times {each} free within launch.start_seconds={start_seconds(launch):g}"
                )
        cluster.placed += 1
        try:
            options = {
                "num_cpus": each["CPU"],
                "num_gpus": each.get("GPU", 0),
                "max_concurrency": 4,
                "runtime_env": {"env_vars": {"PYTHONPATH": python_path()}},
            }
            actor = ray.remote(RankActor)
            yield [
                actor.options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
                    **options,
                ).remote()
                for number in range(launch.ranks or 1)
            ]
        finally:
            cluster.placed -= 1
    finally:
        remove_placement_group(group)  # ends its actors


def _places(actors: Sequence[Any]) -> list[tuple[tuple[str, str, int], Any]]:
    """Each actor after its place.

    Raises:
        RankError: a worker of Ray has ended while it started.
    """
    import ray

    found = []
    for rank, actor in enumerate(actors):
        try:
            found.append((ray.get(actor.place.remote()), actor))
        except ray.exceptions.RayError as error:
            raise RankError(_lost(error, rank=rank), log="Ray's own logs", killed=(rank,)) from None
    return found


def _lost(error: Exception, *, rank: int) -> RankFailure:
    """Describes a rank whose worker of Ray, or the machine of it, has ended."""
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


def _environment(rank: int, *, places: Sequence[tuple[str, str, int]], config: Config) -> dict[str, str]:
    """Variables of a rank. Ray shows a rank its own GPU alone, which has the number 0 there."""
    hosts = [host for host, _, _ in places]
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if config.launch.device == "cuda" else str(local.index(rank)),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "MASTER_ADDR": places[0][1],
        "MASTER_PORT": str(places[0][2]),
        "OMP_NUM_THREADS": str(config.launch.threads),
        "PYTHONPATH": python_path(),
    }
    return passed | allocator_settings() | own


def _wait(
    running: dict[Any, int], *, folder: Path, seconds: float | None = None, check: Callable[[], None] = lambda: None
) -> list[RankFailure]:
    """Waits until all ranks have ended or `seconds` have passed; without `seconds`, until one has failed. Returns the failures.

    check: called at every look.
    """
    import ray

    end, failures = None if seconds is None else time.monotonic() + seconds, []
    while running and (time.monotonic() < end if end is not None else not failures):
        ended, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
        check()
        for reference in ended:
            rank = running.pop(reference)
            try:
                code, lost = ray.get(reference), None
            except ray.exceptions.RayError as error:
                code, lost = 128 + signal.SIGKILL, error
            if code:
                written = read_failure(folder, rank=rank)
                own = failure_of_exit(code, rank=rank, noticed=time.time()) if lost is None else _lost(lost, rank=rank)
                failures.append(written or own)
    return failures


def _send(actors: Sequence[Any], number: int) -> None:
    for actor in actors:
        actor.send.remote(number)
