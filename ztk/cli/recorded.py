"""Compares recorded jobs of a sweep with the configurations that their words give now.

An option file, a default or the machine may have changed since the sweep began.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ztk import config as configuration
from ztk.config import Config, ConfigError
from ztk.report.commit import read_commit
from ztk.report.sweep import SweepJob, SweepRecord, read_sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """A recorded sweep, extended by the new jobs. faults: descriptions of changes; the sweep can continue if it is empty."""

    record: SweepRecord
    faults: list[str]


def name_job(name: str, *, overrides: tuple[str, ...], options: tuple[str, ...] = (), repeat: int = 0) -> SweepJob:
    """Returns the job for a configuration hash. Repeats with options have their own hash; others are numbered."""
    folder = f"{name}-{repeat}" if repeat and not options else name
    return SweepJob(folder=folder, hash=name, overrides=overrides, repeat=repeat, options=options)


def hash_of_refused(job: SweepJob) -> str:
    """Returns the name of a job whose configuration was refused."""
    return configuration.hash_of(words_of(job))


def words_of(job: SweepJob) -> list[str]:
    """Returns all words from which a job is composed."""
    return [*job.overrides, *job.options]


def continue_sweep(
    old: SweepRecord, *, asked: SweepRecord, folder: Path, compose: Callable[[list[str]], Config | None]
) -> Continued:
    """Compares every recorded job with the configuration that its words give now.

    - A job that is refused now, or was refused before, stays in the record and in its folder; its start will report the reason.
    - A job whose words have another meaning now takes the words of `asked` that give its old configuration. Without such words, the
      change is a fault.

    compose: returns None if the words are refused.
    """
    asked_by_folder = {job.folder: job for job in asked.jobs}
    jobs: dict[str, SweepJob] = {}
    changed: list[tuple[SweepJob, Config]] = []
    for job in old.jobs:
        config, kept = compose(words_of(job)), job
        was_refused = job.hash == hash_of_refused(job)
        if config is not None and not was_refused and not _is_of(job, config=config, grid=old.grid):
            if job.folder in asked_by_folder:
                kept = asked_by_folder[job.folder]
            else:
                changed.append((job, config))
        jobs.setdefault(kept.folder, kept)
    known = {(job.overrides, job.options, job.repeat) for job in old.jobs}
    added = [
        job for job in asked.jobs if job.folder not in jobs and (job.overrides, job.options, job.repeat) not in known
    ]
    record = _with_jobs(old, jobs=(*jobs.values(), *added), asked=asked)
    return Continued(record=record, faults=_faults(changed, old=old, folder=folder))


def check_job(config: Config, *, folder: Path) -> None:
    """Checks a job against the record of its sweep, which may be hours old when the job starts.

    Raises:
        ConfigError: its words now give another configuration.
    """
    record = read_sweep(folder.parent)
    job = next((job for job in record.jobs if job.folder == folder.name), None) if record is not None else None
    if job is None or record is None or job.hash == hash_of_refused(job):
        return
    if not _is_of(job, config=config, grid=record.grid):
        raise ConfigError(
            [
                f"{' '.join(words_of(job))}: has another configuration than when the sweep began: an option file, a default or the machine has "
                f"changed. Restore it and go on by sweep.resume={folder.parent}, or start a sweep in another folder"
            ]
        )


def _is_of(job: SweepJob, *, config: Config, grid: Iterable[str]) -> bool:
    """Returns whether the job's name matches this configuration. A name includes only the grid keys from the time when the job was
    added.
    """
    keys = list(grid)
    return any(
        configuration.job_hash(config, counted=frozenset(keys[:count])) == job.hash
        for count in range(len(keys), -1, -1)
    )


def _with_jobs(old: SweepRecord, *, jobs: tuple[SweepJob, ...], asked: SweepRecord) -> SweepRecord:
    later = old.later_commits
    if asked.commit not in (old.commit, *later):
        later = (*later, str(asked.commit))
    grid = {key: list(dict.fromkeys([*old.grid.get(key, []), *values])) for key, values in asked.grid.items()}
    changed = {"grid": {**old.grid, **grid}, "words": asked.words, "flags": asked.flags} if jobs != old.jobs else {}
    return replace(old, jobs=jobs, repeats=asked.repeats, later_commits=later, **changed)


def _faults(changed: Sequence[tuple[SweepJob, Config]], *, old: SweepRecord, folder: Path) -> list[str]:
    """Returns one line per set of changed keys with the affected jobs, and then the possible fixes."""
    jobs: dict[str, list[str]] = {}
    for job, config in changed:
        words = _differing(job, config=config, folder=folder)
        jobs.setdefault(words, []).append(f"{job.folder} ({' '.join(words_of(job))})")
    if not jobs:
        return []
    commit = read_commit()
    began = "" if commit == old.commit else f", which began at commit {old.commit}, and this is {commit}"
    fix = f"restore the option file or the default that has changed since the sweep began{began}; or give the recorded values on the line, "
    return [
        *(f"{', '.join(names)}: {words}" for words, names in jobs.items()),
        f"{fix}or start a sweep in another folder",
    ]


def _differing(job: SweepJob, *, config: Config, folder: Path) -> str:
    """Returns a description of the difference for the user."""
    path = folder / job.folder / "config.yaml"
    if not path.is_file():
        return "has another configuration than when the sweep began; it left none, because it has not started"
    found = configuration.differences(configuration.load(path), now=config)
    if not found:
        return "its folder has a run of another configuration than the one that names it"
    return ", ".join(f"{key}={now} now, and recorded {key}={before}" for key, (before, now) in found.items())
