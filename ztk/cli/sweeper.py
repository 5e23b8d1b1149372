"""A Hydra sweeper with named jobs. It decides which jobs a grid has, which of them start, and in which folders."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from ztk import config as configuration
from ztk.cli.planned_jobs import JobPlan, plan_jobs
from ztk.cli.recorded import continue_sweep, name_job
from ztk.config import Config, ConfigError, Machine, RepeatWith, SweepConfig
from ztk.report.commit import read_commit
from ztk.report.folder import write_failed_summary, write_json
from ztk.report.status import Status, read_status
from ztk.report.sweep import SWEEP, SweepBusy, SweepJob, SweepRecord, lock_sweep, read_sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRequest:
    """The command line's request for a sweep.

    options: its `sweep.*`. command: the command line. flags, words: its parts, for a later `sweep.resume`.
    trusts: whether recorded words may name code.
    shows: called before the first job with the folder, the record and the plans by hash.
    records: whether the sweep is written into its folder.
    end_batch: called after each call of the launcher. It submits jobs, or waits for those that run at once.
    say: prints lines.
    """

    options: SweepConfig
    command: str
    flags: tuple[str, ...]
    words: tuple[str, ...]
    trusts: bool
    machine: Machine
    shows: Callable[[Path, SweepRecord, Mapping[str, JobPlan]], None]
    records: bool
    end_batch: Callable[[], None]
    say: Callable[..., None]


def register(request: SweepRequest) -> None:
    """Makes Hydra use `JobSweeper` for this command line. Hydra constructs plugins by name, so the class stores the request."""
    JobSweeper.request = request
    Plugins.instance().class_name_to_class[configuration.SWEEPER] = JobSweeper


class JobSweeper(Sweeper):
    """Names every job's folder by its resolved configuration, writes `sweep.json` and starts unfinished jobs."""

    request: SweepRequest

    def __init__(self, *, max_batch_size: int | None, params: Mapping[str, Any] | None = None) -> None:
        """Takes the arguments of Hydra's own sweeper. max_batch_size: number of jobs per launcher call. params: the grid of an option
        file.
        """
        self._max_batch_size, self._params = max_batch_size, params or {}
        self._configs: dict[str, str] = {}  # hash -> config.yaml
        self._composed: dict[tuple[str, ...], Config | None] = {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `sweep`."""
        context: dict[str, Any] = {"hydra_context": hydra_context, "task_function": task_function, "config": config}
        self._config, self._loader = config, hydra_context.config_loader
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(**context)

    def sweep(self, arguments: list[str]) -> list[Any]:
        """Runs the sweep. With `sweep.list=true`, only lists it.

        Raises:
            ConfigError: another command runs this sweep, or the folder has one and `sweep.resume` is not given.
        """
        parser = OverridesParser.create(config_loader=self._loader)
        named = [f"{key}={value}" for key, value in self._params.items()]
        overrides = parser.parse_overrides([*named, *arguments])
        folder, options = Path(self._config.hydra.sweep.dir), self.request.options
        record = self._record(overrides, folder=folder)
        if options.list:
            self.request.shows(folder, record, self._plans(record, folder=folder))
            return []
        try:
            with lock_sweep(folder):
                return self._run(record, folder=folder)
        except SweepBusy as error:
            raise ConfigError([str(error)]) from None

    def _record(self, overrides: Sequence[Override], *, folder: Path) -> SweepRecord:
        """Returns the sweep that the command line describes. Recorded jobs of a continued sweep come first."""
        request, options = self.request, self.request.options
        old = read_sweep(folder)
        if old is not None and options.resume is None and not options.list:
            raise ConfigError(
                [
                    f"hydra.sweep.dir={folder}: has a sweep; go on with it by sweep.resume={folder}, or use another folder"
                ]
            )
        if old is not None and options.resume is not None and configuration.only_resume(options):
            options = replace(options, repeats=old.repeats)
        if old is not None and options.repeat_with is None:
            options = replace(options, repeat_with=RepeatWith(old.repeat_with))
        grid = {
            override.key_or_group: [str(value) for value in override.sweep_string_iterator()]
            for override in overrides
            if override.is_discrete_sweep()
        }
        swept = frozenset(grid) | frozenset(() if old is None else old.grid)
        record = SweepRecord(
            command=request.command,
            flags=request.flags,
            words=request.words,
            grid=grid,
            repeats=options.repeats,
            repeat_with=options.varied(request.words).value,
            commit=read_commit(),
            jobs=self._jobs(_combinations(overrides), options=options, swept=swept, folder=folder),
        )
        return record if old is None else self._continue(old, asked=record, folder=folder)

    def _continue(self, old: SweepRecord, *, asked: SweepRecord, folder: Path) -> SweepRecord:
        if not self.request.trusts:
            recorded = [word for job in old.jobs for word in (*job.overrides, *job.options)]
            configuration.check_named_code(recorded, record=folder / SWEEP, given=self.request.words)
        continued = continue_sweep(
            old, asked=asked, folder=folder, compose=lambda words: self._compose(words, folder=folder)
        )
        if continued.faults and not self.request.options.list:
            raise ConfigError(continued.faults)
        self.request.say(*continued.faults)
        return continued.record

    def _jobs(
        self, combinations: Sequence[Sequence[str]], *, options: SweepConfig, swept: frozenset[str], folder: Path
    ) -> tuple[SweepJob, ...]:
        """Returns every combination once, followed by the repeats. Of jobs with equal resolved configurations, only the first is kept."""
        found: dict[str, SweepJob] = {}
        varied = options.varied(self.request.words)
        for repeat in range(options.repeats):
            for combination in combinations:
                added = (f"train.seed={repeat}",) if varied is RepeatWith.seeds else ()
                name = self._hash([*combination, *added], swept=swept, folder=folder)
                job = name_job(name, overrides=tuple(combination), options=added, repeat=repeat)
                first = found.setdefault(job.folder, job)
                if first is not job and repeat == 0:
                    self.request.say(f"{' '.join(job.words)}: the same run as {' '.join(first.words)}")
        return tuple(found.values())

    def _hash(self, words: list[str], *, swept: frozenset[str], folder: Path) -> str:
        """Returns the hash of the resolved configuration, or of the words if they are refused; the job itself then reports the error."""
        config = self._compose(words, folder=folder)
        if config is None:
            return configuration.hash_of(words)
        name = configuration.job_hash(config, counted=swept)
        if name not in self._configs:
            self._configs[name] = configuration.to_yaml(config)
        return name

    def _compose(self, words: list[str], *, folder: Path) -> Config | None:
        """Composes a job once per command, because repeats with the same seed share a configuration.

        Returns None if the words are refused.
        """
        if tuple(words) not in self._composed:
            self._composed[tuple(words)] = self._compose_again(words, folder=folder)
        return self._composed[tuple(words)]

    def _compose_again(self, words: list[str], *, folder: Path) -> Config | None:
        try:
            choices = self._loader.load_sweep_config(self._config, words)
            with open_dict(choices):
                hydra = choices.pop("hydra")
                choices.output_dir = str(folder.absolute())
            return configuration.to_config(
                choices,
                overrides=list(hydra.overrides.task),
                options=hydra.runtime.choices,
                machine=self.request.machine,
            )
        except (ConfigError, HydraException):
            return None

    def _plans(self, record: SweepRecord, *, folder: Path) -> dict[str, JobPlan]:
        """Plans this command line's unfinished jobs. Returns the plans by hash."""
        states = record.statuses(folder)
        waiting = [job.hash for job in record.jobs if states[job.folder] is not Status.done]
        configs = {name: self._configs[name] for name in waiting if name in self._configs}
        try:
            return plan_jobs(configs, hardware=self.request.options.hardware)
        except ValueError as error:
            raise ConfigError([str(error)]) from None

    def _skip(self, jobs: Iterable[SweepJob], *, folder: Path, plans: Mapping[str, JobPlan]) -> set[str]:
        """Records the jobs that do not fit and returns their folders."""
        found = set()
        for job in jobs:
            plan = plans.get(job.hash)
            if plan is None or not plan.does_not_fit:
                continue
            found.add(job.folder)
            place = folder / job.folder
            write_failed_summary(place, error=plan.misfit, status=Status.does_not_fit)
            words = (override.partition("=") for override in job.words)
            write_json(place / "overrides.json", values={key: value for key, _, value in words})
            write_json(place / "plan.json", values=plan.values)
        return found

    def _run(self, record: SweepRecord, *, folder: Path) -> list[Any]:
        skips = self.request.options.skip_misfits
        plans = self._plans(record, folder=folder) if skips else {}
        self.request.shows(folder, record, plans)
        states = record.statuses(folder)
        starts = {
            job: count
            for job in record.jobs
            if (count := self._starts(states[job.folder], folder=folder / job.folder)) > 0
        }
        if self.request.records and (starts or not (folder / "multirun.yaml").exists()):
            record.write(folder)
            OmegaConf.save(self._config, folder / "multirun.yaml")
        skipped = self._skip(starts, folder=folder, plans=plans)
        starts = {job: count for job, count in starts.items() if job.folder not in skipped}
        if commit := _other_commit(record):
            self.request.say(f"the sweep began at commit {record.commit}, this is {commit}")
        results = []
        while starts:
            results += self._launch(list(starts), folder=folder)
            starts = {job: count - 1 for job, count in starts.items() if count > 1 and _has_failed(folder, job=job)}
        return results

    def _starts(self, state: Status, *, folder: Path) -> int:
        """Returns how often this command may start a job."""
        retries, resumes = self.request.options.retries, self.request.options.resume is not None
        if state is Status.running:
            self.request.say(f"{folder}: already running, skipped")
            return 0
        if state is Status.done:
            return 0
        if state is Status.failed:
            return int(resumes) if retries is None else retries
        return 1 + (retries or 0)

    def _launch(self, jobs: list[SweepJob], *, folder: Path) -> list[Any]:
        results = []
        lines = [
            [*job.overrides, *job.options, *_place(folder / job.folder), f"hydra.sweep.subdir={job.folder}"]
            for job in jobs
        ]
        size = self._max_batch_size or len(lines)
        for chunk in (lines[start : start + size] for start in range(0, len(lines), size)):
            returned = self._launcher.launch(chunk, initial_job_idx=len(results))
            for job in returned:
                _ = job.return_value  # raises the job's exception
            results += returned
            self.request.end_batch()
        return results


def _combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """Returns one list of overrides per job. The last key varies fastest."""
    # Imported here, because Hydra executes the modules of its plugins again when it first lists them.
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    return BasicSweeper.split_arguments(list(overrides), None)[0]


def _place(folder: Path) -> Iterator[str]:
    """Yields the override that resumes a job with checkpoints."""
    if any((folder / "checkpoints").glob("*")):
        yield "checkpoint.resume=auto"


def _other_commit(record: SweepRecord) -> str | None:
    now = read_commit()
    return now if now != record.commit else None


def _has_failed(folder: Path, *, job: SweepJob) -> bool:
    return read_status(folder / job.folder) in (Status.failed, Status.dead)
