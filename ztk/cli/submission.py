"""`launch=slurm`: a checked run becomes a job, which runs the same command line without `launch=slurm`."""

import json
import sys
from collections.abc import Callable, Sequence
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
    config: Config, *, words: Sequence[str], flags: Sequence[str], say: Callable[..., None], show: Callable[[str], None]
) -> None:
    """Writes the job of a run into its folder and submits it, or prints it with `launch.dry_run`.

    words: the run's command line. flags: its `--config-dir`. show: prints the job.

    Raises:
        ConfigError: an earlier job of this folder waits or runs, or Slurm has refused this one.
    """
    job, folder = job_of(config, words=words, flags=flags), Path(config.output_dir)
    if config.launch.dry_run:
        show(job.script())
        return
    try:
        number = _submit_once(job, folder=folder)
    except SlurmError as error:
        raise ConfigError([str(error)]) from None
    write_json(folder / JOB, values={"job": number})
    log = job.log.replace("%j", number)
    say(f"submitted job {number} of {config.launch.ranks} ranks: {folder / SCRIPT}, log: {log}")


def _submit_once(job: SlurmJob, *, folder: Path) -> str:
    """Returns the number of the submitted job.

    Raises:
        SlurmError: an earlier job of this folder waits or runs, or Slurm has refused this one.
    """
    if (number := _number_of(folder)) and (state := queue_state(number)):
        raise SlurmError(
            f"{folder}: job {number} of this run is {state}; wait for its end, end it by scancel {number}, or name another folder"
        )
    replace_file(folder / SCRIPT, text=job.script() + "\n")
    return submit(folder / SCRIPT)


def job_of(config: Config, *, words: Sequence[str], flags: Sequence[str]) -> SlurmJob:
    """The job of a run: `srun` of the same command line with `launch=local`, in the same folder."""
    launch, folder = config.launch, Path(config.output_dir)
    interpreter = launch.python or ("python" if launch.container else sys.executable)
    options = {
        "--job-name": f"ztk-{folder.name}",
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


def _number_of(folder: Path) -> str | None:
    """The last job of the folder."""
    try:
        return json.loads((folder / JOB).read_text(encoding="utf-8"))["job"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
