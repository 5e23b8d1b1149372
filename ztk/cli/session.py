"""`run.py` around Hydra: reads the command line, runs each job that Hydra composes, and reports the results."""

import contextlib
import copy
import datetime
import functools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ztk
from ztk import config as configuration
from ztk.cli.elastic import bound_cores, run_until_done
from ztk.cli.folders import FolderRefused, clear, settle_folder
from ztk.cli.help import requested_help
from ztk.cli.interrupted import sweep_line, way_on
from ztk.cli.jobs import Job, Outcome, exit_code, jobs_of, print_jobs
from ztk.cli.out_of_memory import print_plan
from ztk.cli.planned_jobs import JobPlan
from ztk.cli.ray_ranks import RayCluster, run_on_ray
from ztk.cli.recorded import check_job
from ztk.cli.submission import job_of, queued_job, submit_points, submit_run
from ztk.cli.sweep_line import SweepLine, read_line
from ztk.cli.sweeper import SweepRequest, register
from ztk.config import Config, ConfigError, Machine
from ztk.core.launch import (
    ExternalRank,
    RankError,
    RankFailure,
    earlier_cause,
    failure_from,
    failure_of,
    failure_text,
    first_cause,
    forget_failure,
    is_restart,
    read_failure,
    remember_folder,
    restarted,
)
from ztk.core.launch.output import is_lost, lasting_output
from ztk.core.launch.signals import raise_noted
from ztk.core.launch.slurm import SlurmJob
from ztk.core.policies.ending import ENDING
from ztk.core.policies.launch import Starter, start_seconds
from ztk.core.policies.records import newest_checkpoint
from ztk.core.policies.runs import AUTO
from ztk.report.folder import OPTIONS, PACKED, write_failed_summary, write_json
from ztk.report.owner import FolderBusy, RunOwner, token_of
from ztk.report.status import INTERRUPTED, RecordError, Status
from ztk.report.sweep import SweepRecord, as_written
from ztk.report.text_progress import shown_progress
from ztk.worker import import_task, prefer_own_modules

if TYPE_CHECKING:
    from ztk.core.runtime.rendezvous import Meeting

# Errors whose message contains the fix. For all others, the traceback is printed too.
_SELF_EXPLAINING = {"", "ValueError", "DiskError", "SaveFailed", "FileNotFoundError", "PermissionError"}
_COMPLETION = {"-sc", "--shell-completion"}
_REFUSAL_SECONDS = 60.0  # for the other ranks of a launcher to read rank 0's refusal
_SEEN_SECONDS = 10.0
_DRY_RUN = {"--dry-run": "launch.dry_run=true"}  # as sbatch's users type it
_ONE_BY_ONE = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # Hydra's own launcher
_FOLDER = os.path.join("outputs", "DATE", "TIME")  # placeholder for a run that is shown but not started
_EXCLUSIVE = {"-m", "--multirun", "-r", "--run", "-c", "--cfg", "-i", "--info", *_COMPLETION}


def run(session: "Session | None" = None) -> int:
    """Runs the command line in `sys.argv` and returns its exit code. session: holds the results afterwards. Defaults to a new one."""
    session = session or Session()

    @hydra.main(version_base="1.3", config_path=configuration.conf_dir(), config_name="config")
    def compose_and_run(choices: DictConfig) -> float:
        return session.run_job(choices)

    return session.main(compose_and_run)


class Session:
    """One command line: a single job or a sweep. is_refused: whether the line was rejected before any job."""

    def __init__(self) -> None:
        self.is_refused = False
        self._command = shlex.join(sys.argv)
        self._jobs: list[Job] = []
        self._sweeping = False
        self._listing = False
        self._shows = False  # whether the printed text is the only result of the jobs
        self._flags: list[str] = []  # flags that a command continuing this run must repeat
        self._sweep: tuple[Path, SweepRecord, Mapping[str, JobPlan]] | None = None
        self._environment_fault = ""
        self._external: ExternalRank | None = None
        try:
            self._external = ExternalRank.of_environment()
        except ValueError as error:
            self._environment_fault = str(error)
        self._ray: RayCluster | None = None
        self._parallel: int | None = None
        self._points: dict[Path, SlurmJob] = {}  # of a sweep, not yet submitted
        self._ranks_started = False
        self._has_met = False

    def main(self, compose_and_run: Callable[[], None]) -> int:
        """Runs the command line in `sys.argv` and returns the exit code.

        compose_and_run: the function under `hydra.main`, which calls `run_job` for every job.
        """
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors propagate to this method instead of Hydra's printer
        os.environ["ZTK_COMMAND"] = self._command  # for env.json of the ranks
        if self._external is not None:
            for kind in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(kind, signal.SIG_DFL)  # a rank may wait in a collective, where no handler runs
        with lasting_output() as output:
            try:
                code = self._main(compose_and_run)
            except SystemExit as error:
                if error.code:
                    raise
                code = Outcome.done  # of Hydra's help
            shows = self._shows or (self._sweep is None and not self._jobs)
            return Outcome.failed if code == Outcome.done and shows and is_lost(output) else code

    def _main(self, compose_and_run: Callable[[], None]) -> int:
        try:
            return self._obey(compose_and_run)
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and not _is_signal(error.code):
                raise  # raised by Hydra
            if self._ray is not None:
                self._ray.interrupt(
                    signal.SIGINT if isinstance(error, KeyboardInterrupt) else int(error.code or 143) - 128
                )
            self._print_jobs()
            if self._sweep is not None and not self._listing:
                self._say(f"interrupted; this continues the sweep:\n  {sweep_line(self._sweep[0], flags=self._flags)}")
            elif not self._ranks_started:  # once ranks run, `_start_ranks` prints the line that continues the run
                self._say("interrupted before a run started: nothing has changed, start the command again")
            if isinstance(error, SystemExit):
                raise
            return Outcome.interrupted
        finally:
            self._wait_for_points(closes=True)

    def _obey(self, compose_and_run: Callable[[], None]) -> int:
        """Shows the help, or runs the jobs. Returns the exit code. An error after a signal is the signal's."""
        try:
            help_text = requested_help(sys.argv[1:])
            shown = help_text or self._prepare_arguments()
            if shown is not None:
                self._print(shown)
                return Outcome.done
            compose_and_run()
        except Exception as error:
            raise_noted()
            if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
                return self._refuse(configuration.refusal(error))
            if isinstance(error, ConfigError | RecordError):
                return self._refuse(error)
            if isinstance(error, OSError) and not self._jobs:
                return self._refuse(ConfigError([f"the run folder cannot be made ({error}): use hydra.run.dir=FOLDER"]))
            raise
        jobs = self._print_jobs()
        return Outcome.done if self._listing else exit_code(jobs)

    def run_job(self, choices: DictConfig) -> float:
        """Checks and runs one composed job. Returns its final loss, or NaN if there is none.

        In a sweep, the failure or refusal of a job is recorded in its folder, and the sweep continues.
        """
        composed = HydraConfig.get()
        self._sweeping = composed.mode is RunMode.MULTIRUN
        # Not `tuple(composed.overrides.task)`, because OmegaConf would resolve `${...}` in a word against Hydra's own settings.
        folder = Path(composed.runtime.output_dir)
        overrides = tuple(OmegaConf.to_container(composed.overrides.task, resolve=False))
        options = {group: option for group, option in composed.runtime.choices.items() if not group.startswith("hydra")}
        choices.output_dir = str(folder)
        status = Status.failed
        try:
            self._check_alone()

            def compose(**checkpoint: str) -> Config:
                changed = copy.deepcopy(choices)  # the composition changes it
                changed.checkpoint.update(checkpoint)
                return configuration.to_config(
                    changed, overrides=overrides, options=composed.runtime.choices, machine=self._machine()
                )

            config = compose()
            if self._sweeping:
                check_job(config, folder=folder)
            self._check_starter(config)
            if config.launch.starter is Starter.slurm:
                status = self._submit(config, overrides=overrides)
            elif self._external is not None and self._external.rank != 0:
                status = self._be_rank(config)
            else:
                with contextlib.ExitStack() as held:
                    status = self._run_or_skip(
                        config,
                        held=held,
                        owner=held.enter_context(self._owned(folder)),
                        continued=lambda: compose(resume=AUTO),
                        overrides=overrides,
                        options=options,
                    )
        except (KeyboardInterrupt, SystemExit):
            status = Status.interrupted
            raise
        except ConfigError as error:
            status = Status.interrupted
            raise_noted()
            self._say(str(error))
            status = Status.refused
            if self._sweeping and not isinstance(error, FolderRefused):
                self._record(folder, overrides=overrides, options=options)
                write_failed_summary(folder, error=str(error), status=Status.refused)
            elif self._external is None or self._external.rank == 0:
                _remove_if_empty(folder)
        finally:
            self._jobs.append(Job(folder=folder, overrides=overrides, status=status))
        loss = self._jobs[-1].summary().get("final_loss")
        return math.nan if loss is None else loss

    def _check_alone(self) -> None:
        """Raises ConfigError in a task of a launcher that runs jobs of a sweep, if it started several tasks for one job."""
        if self._external is not None:
            return
        try:
            found = ExternalRank.of_environment()
        except ValueError as error:
            raise ConfigError([str(error)]) from None
        if found is not None:
            raise ConfigError(
                [
                    f"{found.starter} started {found.world_size} tasks for this job, and each would run it alone; use one task per job "
                    "(hydra.launcher.tasks_per_node=1 hydra.launcher.nodes=1), whose ranks the job starts itself"
                ]
            )

    def _check_starter(self, config: Config) -> None:
        """Raises ConfigError in a rank of a launcher whose configuration starts ranks itself, and for a launcher that does not fit a sweep."""
        if config.launch.starter is not Starter.local and self._external is not None:
            started = f"{self._external.starter} has started this one"
            raise ConfigError([f"launch={config.launch.starter} starts ranks, and {started}: leave it out"])
        if self._parallel is not None and config.launch.starter is Starter.local:
            raise ConfigError(
                [
                    f"sweep.parallel={self._parallel}: only with sweep.launcher=slurm and sweep.launcher=ray; leave it out, or see "
                    "hydra/launcher in docs/sweeps.md"
                ]
            )
        if self._sweeping and config.launch.starter is Starter.slurm and not _is_one_by_one():
            raise ConfigError(["launch=slurm submits the jobs of a sweep as an array: leave hydra/launcher out"])

    def _prepare(self, config: Config) -> None:
        """Rejects bad text, reward functions and environments that fail, and cores that ranks cannot have, before ranks start."""
        bound_cores(config.launch, places=range(config.launch.ranks))
        try:
            with shown_progress(say=self._say) as show:
                configuration.prepare_text(config, show=show)
            configuration.prepare_rewards(config)
            configuration.prepare_environment(config)
        except ValueError as error:
            raise ConfigError(str(error).splitlines()) from None

    @contextlib.contextmanager
    def _owned(self, folder: Path) -> Iterator[RunOwner]:
        """Context that owns the run folder. A refusal inside also ends the other ranks of a launcher.

        Raises:
            FolderRefused: another process writes into the folder, or it cannot be written.
        """
        owner = RunOwner(folder, say=self._say)
        try:
            try:
                owner.__enter__()
            except FolderBusy as error:
                raise FolderRefused([str(error)]) from None
            except OSError as error:
                raise FolderRefused(
                    [f"{folder}: cannot be written ({error.strerror}); name another folder with hydra.run.dir=FOLDER"]
                ) from None
            yield owner
        except ConfigError as error:
            if self._external is not None and not self._has_met:
                with contextlib.suppress(TimeoutError):  # the other ranks were refused, too
                    self._meet(refused=str(error))
            raise
        finally:
            owner.end()

    def _run_or_skip(
        self,
        config: Config,
        *,
        held: contextlib.ExitStack,
        owner: RunOwner,
        continued: Callable[[], Config],
        overrides: tuple[str, ...],
        options: dict[str, str],
    ) -> Status:
        settled = settle_folder(config, is_restart=self._sweeping or is_restart(), continued=continued)
        config, folder = settled.config, Path(settled.config.output_dir)
        self._say(*settled.lines)
        if settled.is_done and self._external is None:
            return Status.done
        if self._external is None:
            self._prepare(config)
        self._say(*config.notes)
        if not settled.is_done:
            self._record(folder, overrides=overrides, options=options)
            self._remember(config)
            owner.begin()
        if self._external is not None:
            return self._be_rank(config, owner=owner, is_done=settled.is_done)
        if config.launch.starter is Starter.ray:
            return self._start_on_ray(config, held=held)
        return self._start_ranks(config, run=lambda: run_until_done(config, say=self._say))

    def _start_on_ray(self, config: Config, *, held: contextlib.ExitStack) -> Status:
        """Starts the ranks on Ray. A point of a sweep returns at once, and `_wait_for_points` waits for its end.

        held: resources of the run, which end with it.

        Raises:
            ConfigError: Ray cannot be reached.
        """
        is_point = self._sweeping and _is_one_by_one()
        if self._ray is None:
            try:
                self._ray = RayCluster()
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    [f"launch=ray: Ray cannot be reached ({error}); check RAY_ADDRESS, and the cluster by `ray status`"]
                ) from None
        self._ray.wait_for_turn(self._parallel)
        run = functools.partial(run_on_ray, config, cluster=self._ray, say=self._say, is_point=is_point)
        kept = held.pop_all()

        def start() -> Status:
            with kept:
                return self._start_ranks(config, run=run)

        started = self._ray.begin(config.output_dir, start)
        if is_point:
            return Status.running
        self._ray.wait()
        return started.result()

    def _wait_for_points(self, *, closes: bool = False) -> None:
        """Returns when the jobs on Ray have ended. closes: ends the connection, and jobs that an error has left."""
        if self._ray is None:
            return
        if closes:
            self._ray.close()
            self._ray = None
        else:
            self._ray.wait()

    def _submit(self, config: Config, *, overrides: tuple[str, ...]) -> Status:
        """Submits the run as a job of Slurm, after the checks that its ranks repeat. A job of a sweep becomes part of an array later, in
        `_end_batch`.

        Raises:
            ConfigError: an earlier job of this folder waits or runs.
        """
        folder, shows = Path(config.output_dir), bool(config.launch.dry_run)
        job = job_of(config, words=overrides, flags=self._flags)
        with contextlib.ExitStack() as held:
            if not shows:
                held.enter_context(self._owned(folder))
                if (queued := queued_job(folder)) is not None:
                    return self._refuse_second(folder, queued=queued)
                if not config.overwrites:  # the job replaces the run when it starts
                    settled = settle_folder(config, is_restart=self._sweeping, continued=lambda: config)
                    if settled.is_done:
                        self._say(*settled.lines)
                        return Status.done
                self._say(*config.notes)
            if self._sweeping:
                self._points[folder] = job
            else:
                show = self._print if shows else None
                submit_run(job, folder=folder, ranks=config.launch.ranks, say=self._say, show=show)
        if shows:
            self._shows = True
            _remove_if_empty(folder)
        return Status.submitted

    def _refuse_second(self, folder: Path, *, queued: tuple[str, str]) -> Status:
        number, state = queued
        if self._sweeping:
            self._say(f"{folder}: job {number} is {state}, skipped")
            return Status.submitted
        raise ConfigError(
            [
                f"{folder}: job {number} of this run is {state}; wait for its end, end it by scancel {number}, or name another folder"
            ]
        )

    def _end_batch(self) -> None:
        """Submits the collected jobs of a sweep as an array of Slurm, or waits for those on Ray."""
        points, self._points = self._points, {}
        if points:
            assert self._sweep is not None, "a sweep has collected them"
            place, record, _ = self._sweep
            folders = {index: (place / job.folder).absolute() for index, job in enumerate(record.jobs)}
            jobs = {index: points[folder] for index, folder in folders.items() if folder in points}
            show = self._print if self._shows else None
            submit_points(jobs, folders=folders, parallel=self._parallel, say=self._say, show=show)
            if self._shows:  # the record is not written
                _remove_if_empty(place)
                self._sweep = None
        self._wait_for_points()

    def _prepare_arguments(self) -> str | None:
        """Sets `sys.argv` for Hydra. Returns the text to print for --cfg job and --cfg all, or None to start a run."""
        if self._environment_fault:
            raise ConfigError([self._environment_fault])
        arguments = restarted([_DRY_RUN.get(word, word) for word in sys.argv[1:]], command=self._command)
        if self._external:
            try:
                arguments = self._external.arguments(arguments)
            except ValueError as error:
                raise ConfigError([str(error)]) from None
        flags, overrides = configuration.split_flags(arguments)
        flags = configuration.join_folders(flags)
        extra = configuration.extra_folders(flags)
        folders = [configuration.conf_dir(), *extra]
        self._flags = [word for folder in extra for word in ("--config-dir", folder)]
        _find_modules(extra)
        os.environ[configuration.CONFIG_DIRS] = os.pathsep.join(
            map(os.path.abspath, extra)
        )  # for plans that compose again
        if len(exclusive := [flag for flag in flags if flag.partition("=")[0] in _EXCLUSIVE]) > 1:
            jobs = "; sweep.list=true shows the jobs of a sweep" if {"-m", "--multirun"} & set(exclusive) else ""
            raise ConfigError([f"{' and '.join(exclusive)} exclude each other: choose one{jobs}"])
        sweep = "-m" in flags or "--multirun" in flags
        if _COMPLETION & set(flags):
            sys.argv[1:] = [*flags, *overrides]  # Hydra's own install=SHELL, query=SHELL and uninstall=SHELL
            return None
        configuration.check_doubled(overrides, flags=flags)
        expanded = configuration.expand_ds_config(overrides, machine=self._machine())
        self._say(*(f"ds_config: {note}" for note in expanded.notes))
        sweep = sweep or any(word.startswith("sweep.resume=") for word in expanded.words)
        has_ranks = self._external is not None
        resumed = configuration.take_run_words(expanded.words, has_ranks=has_ranks, folders=extra)
        if resumed.taken:
            self._say(f"options of the run that continues: {shlex.join(resumed.taken)}")
        try:
            words = configuration.parse_arguments(resumed.words, folders=folders, sweep=sweep)
        except ConfigError as error:
            raise resumed.hints(error, folders=extra) from None
        if (asked := _shown(flags)) is not None:
            folder = configuration.folder_of_run(words) or _FOLDER
            config = configuration.compose(*overrides, output_dir=folder, machine=self._machine(), folders=extra)
            return configuration.to_explained_yaml(config, acting_alone=asked == "job").rstrip()
        line = read_line(words, flags=flags, trusts=resumed.trusts)
        sys.argv[1:] = configuration.flags_of_hydra(line.flags) + line.words
        if line.options is not None:
            self._prepare_sweep(line, trusts=resumed.trusts)
        return None

    def _prepare_sweep(self, line: SweepLine, *, trusts: bool) -> None:
        assert line.options is not None
        self._listing = self._shows = line.options.list
        self._parallel = line.options.parallel
        request = SweepRequest(
            options=line.options,
            command=self._command,
            flags=line.own_flags,
            words=line.own_words,
            trusts=trusts,
            machine=self._machine(),
            shows=self._note_sweep,
            records="launch.dry_run=true" not in line.words,
            end_batch=self._end_batch,
            say=self._say,
        )
        register(request)

    def _note_sweep(self, folder: Path, record: SweepRecord, plans: Mapping[str, JobPlan]) -> None:
        self._sweep, self._sweeping = (folder, record, plans), True

    def _machine(self) -> Machine:
        if self._external is None:
            return Machine.here()
        return Machine.here(started_ranks=self._external.world_size, started_here=self._external.local_world_size)

    def _record(self, folder: Path, *, overrides: tuple[str, ...], options: dict[str, str]) -> None:
        if self._external is None or self._external.rank == 0:
            if self._sweeping and (folder / "overrides.json").exists():
                return  # a continued job keeps its original files
            values = {key: value for key, _, value in (as_written(override).partition("=") for override in overrides)}
            write_json(folder / "overrides.json", values=values)
            write_json(folder / OPTIONS, values=options)

    def _start_ranks(self, config: Config, *, run: Callable[[], None]) -> Status:
        """Calls `run` and records its errors."""
        folder = Path(config.output_dir)
        try:
            self._ranks_started = True
            run()
        except RankError as error:
            if error.failure.interrupted:
                self._write_failed(config, error=INTERRUPTED, status=Status.interrupted)
                self._say(str(error), *way_on(config, flags=self._flags))
                return Status.interrupted
            self._write_failed(config, error=str(error))
            if error.failure.kind not in _SELF_EXPLAINING or _is_of_user(error.failure.trace):
                print(error.failure.trace, end="", file=sys.stderr)
            self._say(f"the run failed: {error}", f"log: {error.log}")
            print_plan(folder, rank=error.failure.rank)
            return Status.failed
        except OSError as error:  # a file of the run folder, or a process that cannot start
            self._write_failed(config, error=str(error))
            self._say(f"the run failed: {error}")
            return Status.failed
        except (KeyboardInterrupt, SystemExit):
            self._write_failed(config, error=INTERRUPTED, status=Status.interrupted)
            if not self._sweeping:
                self._say(*way_on(config, flags=self._flags))
            raise
        finally:
            _remove_if_empty(folder / "nvme")  # offload files are unlinked when they are opened, so the folder is empty
            shutil.rmtree(folder / PACKED, ignore_errors=True)
        return Status.done

    def _meet(
        self, config: Config | None = None, *, refused: str = "", is_done: bool = False, token: str = ""
    ) -> "Meeting":
        """Sends rank 0's arguments to all ranks, as JSON. A collective call. Raises TimeoutError."""
        from ztk.core.runtime.rendezvous import meet

        assert self._external is not None, "the machine's launcher started this process"
        self._has_met = True
        text = None if config is None else configuration.to_yaml(config)
        seconds = _REFUSAL_SECONDS if config is None else start_seconds(config.launch)
        return meet(
            "config",
            rank=self._external.rank,
            world=self._external.world_size,
            timeout=datetime.timedelta(seconds=seconds),
            text=json.dumps(
                {
                    "config": text,
                    "refused": refused,
                    "is_done": is_done,
                    "token": token,
                    "continues": config is not None and newest_checkpoint(config.output_dir) is not None,
                    "overwrites": config is not None and config.overwrites,
                }
            ),
        )

    def _be_rank(self, config: Config, *, owner: RunOwner | None = None, is_done: bool = False) -> Status:
        """Runs this process as a rank of another launcher. A failed rank writes the summary with the first known cause.

        owner: owns the run folder on rank 0; None on the other ranks.

        Raises:
            ConfigError: rank 0 refused the run, or the nodes do not see one run folder, or see one, against `checkpoint.local`.
        """
        from ztk.core.runtime.rendezvous import first_fault, set_places
        from ztk.worker import interrupt_code, leave, run_task

        os.environ["OMP_NUM_THREADS"] = str(config.launch.threads)  # must be set before torch is imported
        assert self._external is not None, "the machine's launcher started this process"
        if owner is not None and not is_done:
            configuration.save(config, path=Path(config.output_dir, "config.yaml"))
        try:
            meeting = self._meet(config, is_done=is_done, token=owner.token if owner is not None else "")
        except TimeoutError as error:
            is_of_run = self._external.rank == 0  # the others have not learnt the run's folder
            self._end_rank(config, failure_of(error, rank=self._external.rank), owner=owner, records=is_of_run)
        agreed = json.loads(meeting.text)
        if agreed["refused"]:
            raise ConfigError([agreed["refused"]])
        if agreed["is_done"]:
            return Status.done
        set_places(meeting.hosts, rank=self._external.rank)
        config = configuration.from_yaml(agreed["config"])
        if config.checkpoint.saves:
            own = (
                "" if owner is not None else _fault_of_folder(config, meeting, agreed=agreed, rank=self._external.rank)
            )
            if fault := first_fault(meeting, rank=self._external.rank, own=own):
                raise ConfigError([fault])
        forget_failure(config.output_dir, rank=self._external.rank)  # left by the previous start
        try:
            failure = run_task(
                config,
                rank=self._external.rank,
                end=lambda overrun: self._end_rank(config, overrun, owner=owner, meeting=meeting),
            )
        except KeyboardInterrupt as error:
            if owner is not None:
                self._write_failed(config, error=INTERRUPTED, status=Status.interrupted)
                self._say(*way_on(config, flags=self._flags, starter=self._external.starter))
                owner.end()
            leave(interrupt_code(error))
        if failure is None:
            return Status.done
        self._end_rank(config, failure, owner=owner, meeting=meeting)

    def _end_rank(
        self,
        config: Config,
        failure: RankFailure,
        *,
        owner: RunOwner | None,
        records: bool = True,
        meeting: "Meeting | None" = None,
    ) -> NoReturn:
        """Ends a failed rank of another launcher. If it `records`, the summary gets the first cause of all ranks."""
        from ztk.worker import leave

        assert self._external is not None, "the machine's launcher started this process"
        if records:
            self._record_cause(config, failure, meeting=meeting)
        self._external.tell_starter(failure)
        print(f"ztk: {failure}", file=sys.stderr)
        if owner is not None:
            owner.end()
        leave(Outcome.failed)

    def _record_cause(self, config: Config, failure: RankFailure, *, meeting: "Meeting | None") -> None:
        """Writes the first cause that is known. The ranks compare theirs by one key of the store, and the rank of the cause writes.

        If the store is gone, this rank reads the error files of all ranks.
        """
        from ztk.core.runtime.rendezvous import best_text

        assert self._external is not None, "the machine's launcher started this process"
        own, written = failure_text(failure), ""
        while meeting is not None:
            cause = best_text(meeting, own=own, choose=earlier_cause)
            if cause is None:
                break
            if cause == written or (cause != own and not written and self._external.rank != 0):
                return  # another rank is the cause and writes
            self._write_failed(config, error=str(failure_from(cause)))
            written = cause  # an earlier cause may have been stored meanwhile, and its rank may have written first
        found = [read_failure(config.output_dir, rank=rank) for rank in range(self._external.world_size)]
        first = first_cause([each for each in found if each is not None] or [failure])
        self._write_failed(config, error=str(first))

    def _remember(self, config: Config) -> None:
        if not self._sweeping:
            remember_folder(config.output_dir, command=self._command)
        elif self._sweep is not None:
            remember_folder(str(self._sweep[0].absolute()), command=self._command)

    def _write_failed(self, config: Config, *, error: str, status: Status = Status.failed) -> None:
        """Calls `write_failed_summary`. Its own error, as on a full disk, is printed and hides nothing."""
        try:
            write_failed_summary(config.output_dir, error=error, status=status)
        except OSError as own:
            self._say(f"the summary of {config.output_dir} was not written: {own.strerror}")

    def _refuse(self, error: ConfigError | RecordError) -> int:
        self.is_refused = True
        self._say(str(error))
        return Outcome.refused

    def _say(self, *lines: str) -> None:
        if self._external is None or self._external.rank == 0:
            print("".join(f"ztk: {line}\n" for line in lines), end="", file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        if self._external is None or self._external.rank == 0:
            print(text)

    def _print_jobs(self) -> list[Job]:
        """Prints the table of a sweep. Returns its jobs with the states from their folders, including jobs that other processes ran."""
        jobs = self._jobs
        if self._sweep is not None:
            folder, record, plans = self._sweep
            jobs = jobs_of(record, folder=folder, plans=plans)
        if self._sweeping and jobs:
            from rich.console import Console

            print_jobs(jobs, console=Console() if sys.stdout.isatty() else Console(width=160))
        return jobs


def _fault_of_folder(config: Config, meeting: "Meeting", *, agreed: Mapping[str, Any], rank: int) -> str:
    """Returns why this rank cannot keep checkpoints in its run folder, or "". Removes the run in a node's own folder if rank 0 has removed its
    own.
    """
    folder = config.output_dir
    if not config.checkpoint.local:
        return "" if _sees(folder, token=agreed["token"]) else _unseen(config, rank=rank)
    place, first = f"rank {rank} on {meeting.hosts[rank]}", f"rank 0 on {meeting.hosts[0]}"
    if token_of(folder) == agreed["token"]:
        is_shared = meeting.hosts[rank] != meeting.hosts[0]
        return f"{folder}: {place} sees the run folder of {first}; leave checkpoint.local=true out" if is_shared else ""
    if agreed["continues"] or newest_checkpoint(folder) is None:
        return ""
    if not agreed["overwrites"]:
        return (
            f"{folder}: {place} has checkpoints of a run, and {first} has none; bring back the folder there, or use "
            "checkpoint.resume=overwrite to start again at step 1"
        )
    if os.environ["LOCAL_RANK"] == "0":  # of this node
        clear(Path(folder))
    return ""


def _sees(folder: str, *, token: str) -> bool:
    """Returns whether this machine finds rank 0's lock in the run folder. A network file system may show it late."""
    end = time.monotonic() + _SEEN_SECONDS
    while token_of(folder) != token:
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _unseen(config: Config, *, rank: int) -> str:
    return (
        f"{config.output_dir}: rank {rank} on {platform.node()} does not see the run folder of rank 0, and checkpoints need one folder that "
        "all nodes share; name one with hydra.run.dir=FOLDER, keep a folder per node with checkpoint.local=true, or use checkpoint=none"
    )


def _shown(flags: list[str]) -> str | None:
    """Returns the value of `--cfg` if it is `job` or `all`. None with `--package`: Hydra itself prints parts of a configuration."""
    joined = " ".join(flags).replace("=", " ").split()
    if {"--package", "-p"} & set(joined):
        return None
    return next(
        (value for flag, value in pairwise(joined) if flag in ("--cfg", "-c") and value in ("job", "all")), None
    )


def _is_of_user(trace: str) -> bool:
    """Returns whether the user's code raised an error, directly or in a library that it called."""
    ours = tuple(
        str(Path(file).parent) + os.sep for file in (ztk.__file__, str(import_task("ztk.experiments").__file__))
    )
    libraries = ("site-packages", os.path.dirname(os.__file__))
    files = re.findall(r'^  File "([^<"]+)", line', trace, re.MULTILINE)
    known = [file for file in files if file.startswith(ours) or not any(part in file for part in libraries)]
    return bool(known) and not known[-1].startswith(ours)


def _is_one_by_one() -> bool:
    """Returns whether Hydra's own launcher runs the jobs of a sweep, in this process."""
    return HydraConfig.get().launcher._target_ == _ONE_BY_ONE


def _is_signal(code: object) -> bool:
    """Returns whether a signal other than SIGINT ended the command with this exit code."""
    return code in [128 + kind for kind in (*ENDING, signal.SIGHUP) if kind != signal.SIGINT]


def _find_modules(folders: list[str]) -> None:
    """Makes the user's modules importable, here and in the ranks: next to the folders of `--config-dir` and in the current folder."""
    own = [os.path.dirname(os.path.abspath(folder)) for folder in folders]
    sys.path[:0] = own
    sys.path.append(os.getcwd())
    prefer_own_modules()
    known = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, *known, os.getcwd()])


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
