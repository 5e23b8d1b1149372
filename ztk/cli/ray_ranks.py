"""`launch=ray`: runs of a command on a Ray cluster, each by Ray Train. `ztk.cli.ray_workers` has the part in Ray's processes.

[Note: Points of a sweep on Ray]
Each run is a task of Ray on the command's machine, which runs Ray Train, and has a thread here, which waits for it. Ray Train has processes of
its own for each run, so only a few runs wait for room at once: Ray starts those that fit, and an autoscaler sees the others. The main thread
receives signals, and `RayCluster.interrupt` passes them to all runs.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ztk import config as configuration
from ztk.cli.interrupted import saving_notice
from ztk.config import CONFIG_DIRS, Config
from ztk.core.launch import RankError, RankFailure, python_path
from ztk.core.policies.ending import ENDING
from ztk.core.policies.launch import start_seconds
from ztk.core.policies.runs import AUTO
from ztk.report.folder import SUMMARY, write_json
from ztk.report.status import read_summary

_POLL_SECONDS = 0.5
_MOST_RUNS = 10_000  # threads, one for each run of a sweep that has not ended
_MOST_WAITING = 4  # runs that wait for room
_GRACE_SECONDS = 5.0  # for the end of ranks that save nothing
_PASSED_ON = (CONFIG_DIRS, "ZTK_COMMAND")  # variables of this process that ranks read
_OF_STORAGE = ".validate_storage_marker"  # of Ray Train, in the run folder

Result = TypeVar("Result")


class RayCluster:
    """The connection of a command to Ray, and the runs that the command has there. See [Note: Points of a sweep on Ray].

    Ray is the cluster of RAY_ADDRESS, the one that runs on this machine, or a new one on this machine, which ends with the command.
    """

    def __init__(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ztk.cli import ray_workers

        self.waiting: set[str] = set()  # folders of runs that have no machines yet
        self.placed: set[str] = set()  # folders of runs that have them
        self.signals: list[int] = []
        self._is_own = not ray.is_initialized()
        self._runs: list[Future] = []
        self._threads = ThreadPoolExecutor(max_workers=_MOST_RUNS, thread_name_prefix="ztk-ray")
        if self._is_own:
            handlers = {kind: signal.getsignal(kind) for kind in ENDING}
            ray.init(log_to_driver=True, configure_logging=False)
            for kind, handler in handlers.items():  # Ray's own for SIGTERM ends the command before the ranks have saved
                signal.signal(kind, handler)
        variables = {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}
        own = {"PYTHONPATH": python_path(), "RAY_CHDIR_TO_TRIAL_DIR": "0"}
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": {"env_vars": variables | own}}
        self.desk: Any = ray.remote(ray_workers.Desk).options(max_concurrency=2**20, **options).remote()
        self._fit = ray.remote(ray_workers.fit).options(max_retries=0, **options)

    def begin(self, folder: str, run: Callable[[], Result]) -> "Future[Result]":
        """Calls `run` in a thread. It uses `run_on_ray` with this cluster."""

        def start() -> Result:
            try:
                return run()
            finally:
                self.waiting.discard(folder)
                self.placed.discard(folder)

        self.waiting.add(folder)
        self._runs.append(self._threads.submit(start))
        return self._runs[-1]

    def fit(self, run: Any) -> Any:
        """Starts `ray_workers.fit` and returns its reference."""
        return self._fit.remote(run, self.desk)

    def note(self, folder: str, *, is_placed: bool) -> None:
        """Notes whether a run has its machines."""
        if is_placed:
            self.placed.add(folder)
            self.waiting.discard(folder)
        else:
            self.placed.discard(folder)

    def wait_for_turn(self, parallel: int | None) -> None:
        """Returns when few runs wait for room, and fewer than `parallel` have not ended."""
        while len(self.waiting) >= _MOST_WAITING or sum(not run.done() for run in self._runs) >= (parallel or math.inf):
            time.sleep(_POLL_SECONDS)

    def wait(self) -> None:
        """Returns when all runs have ended. Raises the first error that a run has not handled."""
        wait(self._runs)
        for run in self._runs:
            run.result()

    def interrupt(self, number: int) -> None:
        """Sends a signal to the ranks of all runs, and returns when they have saved their step and ended. A second Ctrl-C, which raises here,
        ends them at once.
        """
        self._interrupt(number)
        try:
            wait(self._runs)
        except (KeyboardInterrupt, SystemExit):
            self._interrupt(number)
            wait(self._runs)

    def _interrupt(self, number: int) -> None:
        self.desk.interrupt.remote(number)
        self.signals.append(number)

    def close(self) -> None:
        """Ends all runs and the connection."""
        import ray

        if not all(run.done() for run in self._runs):  # after an error of this program
            self.interrupt(signal.SIGTERM)
        self._threads.shutdown()
        if self._is_own:
            ray.shutdown()


def run_on_ray(config: Config, *, cluster: RayCluster, say: Callable[..., None], is_point: bool) -> None:
    """Runs the ranks of a run as children of Ray Train's workers. They start again after each of up to `launch.max_failures` failures, from
    the latest checkpoint. The summary lists the failures as `failures`.

    is_point: it is one of several runs: its lines name its folder, and rank 0 writes into its log.

    Raises:
        RankError: a rank failed once more. It has the first cause.
        TimeoutError: Ray has not started the workers within `launch.start_seconds`, although no other run of the command has any.
        KeyboardInterrupt, SystemExit: after a signal, when the ranks have saved their step and ended.
    """
    import ray

    from ztk.cli.ray_workers import RayRun

    folder, launch = Path(config.output_dir), config.launch
    name = f"{folder}: " if is_point else ""
    passed = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
    run = RayRun(
        folder=folder.absolute(),
        ranks=launch.ranks or 1,
        resources={"CPU": launch.cpus_per_rank or 1} | ({"GPU": 1} if launch.device == "cuda" else {}),
        max_failures=launch.max_failures or 0,
        logs=is_point,
        variables=passed | {"OMP_NUM_THREADS": str(launch.threads), "PYTHONPATH": python_path()},
        continued=configuration.to_explained_yaml(_continued(config)),
    )
    configuration.save(config, path=folder / "config.yaml")
    fit = cluster.fit(run)
    try:
        failures = _watch(fit, run=run, config=config, cluster=cluster, say=lambda line: say(f"{name}{line}"))
        if cluster.signals:
            raise KeyboardInterrupt if cluster.signals[0] == signal.SIGINT else SystemExit(128 + cluster.signals[0])
        if reason := ray.get(fit):
            raise failures[-1] if len(failures) > run.max_failures else RankError(_failed(reason), log="Ray's own logs")
    except ray.exceptions.RayError as error:
        raise RankError(_failed(str(error)), log="Ray's own logs") from None
    finally:
        ray.cancel(fit, force=True)  # no effect after its end
        (folder / _OF_STORAGE).unlink(missing_ok=True)
    if failures:
        write_json(folder / SUMMARY, values=read_summary(folder) | {"failures": list(map(str, failures))})


def _continued(config: Config) -> Config:
    """The run from its own latest checkpoint, if it saves any."""
    given, folder = config.checkpoint.resume, Path(config.output_dir)
    if not config.checkpoint.saves or (given is not None and not Path(given).is_relative_to(folder)):
        return config  # a run from another one's checkpoint prefers its own
    return replace(config, checkpoint=replace(config.checkpoint, resume=AUTO))


def _watch(fit: Any, *, run: Any, config: Config, cluster: RayCluster, say: Callable[[str], None]) -> list[RankError]:
    """Prints news of a run. Returns the failures when it has ended, or has not within the grace after a signal.

    Raises:
        TimeoutError: see `run_on_ray`.
    """
    import ray

    folder, seconds = config.output_dir, start_seconds(config.launch)
    seen, hosts, failures = 0, {}, []
    begun, end, has_ended = time.monotonic(), math.inf, False
    while not has_ended and time.monotonic() < end and len(cluster.signals) < 2:
        has_ended = bool(ray.wait([fit], timeout=_POLL_SECONDS)[0])
        for news in ray.get(cluster.desk.news.remote(run.folder, seen=seen)):
            seen += 1
            if isinstance(news, RankError):
                failures.append(news)
                hosts = {}
                if len(failures) <= run.max_failures:
                    say(
                        f"{news}: all ranks start again, failure {len(failures)} of launch.max_failures={run.max_failures}"
                    )
                continue
            rank, host = news
            hosts = {rank: host} if rank in hosts else hosts | {rank: host}
            if len(hosts) == run.ranks:
                say(f"{run.ranks} ranks run on {', '.join(dict.fromkeys(hosts[rank] for rank in range(run.ranks)))}")
        cluster.note(folder, is_placed=bool(hosts))
        if cluster.signals and end == math.inf:
            end = time.monotonic() + (config.checkpoint.grace_seconds or _GRACE_SECONDS) * bool(hosts)
            if hosts and (notice := saving_notice(config)):
                say(notice)
        if cluster.placed:
            begun = time.monotonic()
        elif time.monotonic() - begun > seconds and not has_ended:
            raise TimeoutError(
                f"launch=ray: Ray has not started {run.ranks} workers with {run.resources} each within launch.start_seconds={seconds:g}"
            )
    return failures


def _failed(reason: str) -> RankFailure:
    """A failure of Ray itself, of which no rank is the cause."""
    message = f"did not run: {' '.join(reason.split())}"
    return RankFailure(rank=0, kind="", message=message, trace="", time=time.time(), secondary=False)
