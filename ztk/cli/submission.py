"""`launch=slurm`: a checked run becomes a job, which runs the same command line without `launch=slurm`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ztk import config as configuration
from ztk.config import Config, ConfigError
from ztk.core.launch import quoted
from ztk.core.launch.slurm import SlurmError, SlurmJob, queue_state, submit
from ztk.core.policies.key import declared_keys
from ztk.core.policies.launch import SLURM, LaunchConfig, ranks_per_node
from ztk.core.policies.records import replace_file
from ztk.report.folder import JOB, write_json

SCRIPT = "job.sbatch"
_OF_THIS_LINE = ("launch", "launch.ranks", "launch.starter")


def submit_run(
    job: SlurmJob, *, folder: Path, ranks: int, say: Callable[..., None], show: Callable[[str], None] | None
) -> None:
    """Submits the job of a run. show: prints it instead.

    Raises:
        ConfigError: Slurm has refused it.
    """
    if show is not None:
        show(job.script())
        return
    number = _submit(job, script=folder / SCRIPT)
    write_json(folder / JOB, values={"job": number})
    log = job.log.replace("%j", number)
    say(f"submitted job {number} of {ranks} ranks: {folder / SCRIPT}, log: {log}")


def submit_points(
    points: Mapping[int, SlurmJob],
    *,
    folders: Mapping[int, Path],
    parallel: int | None,
    say: Callable[..., None],
    show: Callable[[str], None] | None,
) -> None:
    """Submits jobs of a sweep as an array, or as several if they ask for different resources.

    points, folders: by the number of the job in the sweep's record. parallel: how many run at once. show: prints the arrays instead.

    Raises:
        ConfigError: Slurm has refused an array.
    """
    place = next(iter(folders.values())).parent
    arrays: list[tuple[SlurmJob, dict[int, Sequence[str]]]] = []
    for index, job in points.items():
        shared = replace(
            job, command={}, name=f"ztk-{place.name}", log=str(place / "slurm-%A_%a.log"), parallel=parallel
        )
        known = next((commands for other, commands in arrays if other == shared), None)
        if known is None:
            arrays.append((shared, known := {}))
        known[index] = job.command
    for count, (shared, commands) in enumerate(arrays):
        job = replace(shared, command=commands)
        if show is not None:
            show(job.script())
            continue
        script = (place / SCRIPT).with_stem(f"job{count or ''}")
        number = _submit(job, script=script)
        for index in commands:
            write_json(folders[index] / JOB, values={"job": f"{number}_{index}"})
        say(
            f"submitted job {number}, an array of {len(commands)} runs: {script}, logs: {job.log.replace('%A', number)}"
        )


def _submit(job: SlurmJob, *, script: Path) -> str:
    replace_file(script, text=job.script() + "\n")
    try:
        return submit(script)
    except SlurmError as error:
        raise ConfigError([str(error)]) from None


def queued_job(folder: Path) -> tuple[str, str] | None:
    """The number and the state of the folder's last job, if it waits or runs."""
    try:
        number = json.loads((folder / JOB).read_text(encoding="utf-8"))["job"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    state = queue_state(number)
    return (number, state) if state else None


def job_of(config: Config, *, words: Sequence[str], flags: Sequence[str]) -> SlurmJob:
    """The job of a run: `srun` of the same command line with `launch=local`, in the same folder."""
    launch, folder = config.launch, Path(config.output_dir)
    interpreter = launch.python or ("python" if launch.container else sys.executable)
    options = {
        "--nodes": launch.nodes,
        "--ntasks-per-node": ranks_per_node(launch),
        "--gpus-per-node": launch.gpus_per_node,
        "--time": launch.time,
        "--partition": launch.partition,
        "--account": launch.account,
    }
    named = [f"{name}={value}" for name, value in options.items() if value is not None]
    return SlurmJob(
        command=[interpreter, *_program(), *flags, *_words(config, given=words), f"hydra.run.dir={quoted(folder)}"],
        name=f"ztk-{folder.name}",
        options=[*named, *(launch.sbatch or [])],
        cpus_per_task=launch.cpus_per_rank,
        setup=launch.setup or [],
        container=launch.container or "",
        log=str(folder / "slurm-%j.log"),
        signal_seconds=launch.signal_seconds or 1,
        requeues=launch.requeues or 0,
    )


def _words(config: Config, *, given: Sequence[str]) -> list[str]:
    """The words of a rank. Keys of the job that an experiment sets are emptied, because they have no effect with launch=local."""
    of_job = [f"launch.{name}" for name, key in declared_keys(LaunchConfig).items() if key.acts is SLURM]
    named = [configuration.named_by(word) for word in given]
    kept = [word for word, name in zip(given, named, strict=True) if name not in (*_OF_THIS_LINE, *of_job)]
    emptied = [f"{name}=null" for name in of_job if name in config.given and name not in named]
    return [*kept, "launch=local", f"launch.ranks={config.launch.ranks}", *emptied]


def _program() -> list[str]:
    """The words of this program after the interpreter."""
    path = Path(sys.argv[0])
    return [str(path.absolute())] if path.suffix == ".py" and path.name != "__main__.py" else ["-m", "ztk"]
