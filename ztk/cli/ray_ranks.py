"""`launch=ray`: the ranks of a run as child processes of Ray actors, one actor per rank.

A rank has its own process, as on one machine: signals reach its main thread, and its end is not the end of Ray's worker. The actor starts it
in its placement, passes signals on, and returns its exit code. The kernel kills a rank whose actor has died.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
from ztk.core.policies.launch import start_seconds

_POLL_SECONDS = 0.2
_LAST_WORDS_SECONDS = 2.0  # for the peers of a failed rank to write their errors
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_PASSED_ON = (CONFIG_DIRS, "ZTK_COMMAND")  # variables of this process that ranks read


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


def run_on_ray(config: Config, *, on_signal: Callable[[], None]) -> None:
    """Runs the ranks of a run whose `config.yaml` is written, and returns when all have ended well.

    Ray is the cluster of RAY_ADDRESS, the one that runs on this machine, or a new one on this machine. on_signal: called when a signal
    arrives, which all ranks get.

    Raises:
        RankError: a rank failed. It has the first cause.
        TimeoutError: Ray has not the resources within `launch.start_seconds`.
        KeyboardInterrupt, SystemExit: after a signal, when the ranks have saved their step and ended.
    """
    import ray

    folder, launch = Path(config.output_dir), config.launch
    ranks = launch.ranks or 1
    for rank in range(ranks):
        forget_failure(folder, rank=rank)
    with _actors(config) as started:
        found = zip(ray.get([actor.place.remote() for actor in started]), started, strict=True)
        places, actors = zip(
            *sorted(found, key=lambda pair: pair[0][0]), strict=True
        )  # ranks of a host follow each other
        running = {}
        for rank, actor in enumerate(actors):
            environment = _environment(rank, places=places, config=config)
            log = None if rank == 0 else str(log_path(folder, rank=rank))
            command = worker_command(folder / "config.yaml")
            running[actor.run.remote(command, environment=environment, rank=rank, log=log)] = rank
        try:
            failures = _wait(running, folder=folder, seconds=None)
        except (KeyboardInterrupt, SystemExit) as error:
            on_signal()
            number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else int(error.code or 143) - 128
            _send(actors, number)
            _wait(running, folder=folder, seconds=config.checkpoint.grace_seconds or _GRACE_SECONDS, all_end=True)
            raise
        if failures:
            failures += _wait(running, folder=folder, seconds=_LAST_WORDS_SECONDS, all_end=True)
            _send(actors, signal.SIGTERM)
            _wait(running, folder=folder, seconds=_GRACE_SECONDS, all_end=True)
            _send(actors, signal.SIGKILL)
            cause = first_cause(failures)
            killed = tuple(failure.rank for failure in failures if failure.killed)
            raise RankError(cause, log=str(log_path(folder, rank=cause.rank)), killed=killed)


@contextmanager
def _actors(config: Config) -> Iterator[list[Any]]:
    """One actor per rank, each with its resources, on as few machines as possible."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    launch = config.launch
    is_own = not ray.is_initialized()
    if is_own:
        ray.init(log_to_driver=True, configure_logging=False)
    each = {"CPU": launch.cpus_per_rank or 1} | ({"GPU": 1} if launch.device == "cuda" else {})
    group = placement_group([each] * (launch.ranks or 1), strategy="PACK")
    try:
        if not group.wait(timeout_seconds=start_seconds(launch)):
            raise TimeoutError(
                f"launch=ray: Ray has not {launch.ranks} times {each} free within launch.start_seconds={start_seconds(launch):g}"
            )
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
        remove_placement_group(group)  # ends its actors
        if is_own:
            ray.shutdown()


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


def _wait(running: dict[Any, int], *, folder: Path, seconds: float | None, all_end: bool = False) -> list[RankFailure]:
    """Waits until all ranks have ended, one has failed (unless `all_end`), or `seconds` have passed. Returns the failures."""
    import ray

    end, failures = None if seconds is None else time.monotonic() + seconds, []
    while running and (all_end or not failures) and (end is None or time.monotonic() < end):
        ended, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
        for reference in ended:
            rank = running.pop(reference)
            try:
                code = ray.get(reference)
            except ray.exceptions.RayError:  # the worker or its machine is gone
                code = -signal.SIGKILL
            if code:
                written = read_failure(folder, rank=rank)
                failures.append(written or failure_of_exit(code, rank=rank, noticed=time.time()))
    return failures


def _send(actors: Sequence[Any], number: int) -> None:
    for actor in actors:
        actor.send.remote(number)
