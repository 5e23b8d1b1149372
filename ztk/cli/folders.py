"""What a command does with the run that its folder has already: it continues, starts again, or is refused.

Nothing is written before. A run is compared with the configuration in the checkpoint that it would continue.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ztk import config as configuration
from ztk.config import Config, ConfigError
from ztk.core.policies.records import (
    newest_checkpoint,
    record_of,
    record_of_checkpoint,
    step_folders,
    step_number,
)
from ztk.core.policies.runs import AUTO, trains
from ztk.report.folder import METRICS, SUMMARY
from ztk.report.status import RecordError, Status, read_status, read_summary

_MOST_KEYS = 6  # differing keys in a message
_ANSWERS = ("completions.jsonl", "eval.json")
_RECORDS = (METRICS, SUMMARY, "samples.jsonl", "metrics.csv", "samples.csv", "examples.jsonl", "config.yaml", *_ANSWERS)
_TAIL_BYTES = 1 << 16  # longer than any row
_FREE = ("plan", "serve")  # tasks whose record costs nothing to make again


class FolderRefused(ConfigError):
    """The folder belongs to another run. Nothing was written into it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The run to start. lines: shown to the user. is_done: the folder's run has made all its steps, and nothing is left to do."""

    config: Config
    lines: tuple[str, ...] = ()
    is_done: bool = False


def settle_folder(config: Config, *, is_restart: bool, continued: Callable[[], Config]) -> Settled:
    """Compares a run with the one in its folder, whose lock the caller holds.

    is_restart: the same command started before, as after a restart by torchrun or Slurm and in a sweep. continued: composes the run again
    with `checkpoint.resume=auto`.

    Raises:
        FolderRefused: the folder has another run, or one that this run would replace.
        ConfigError: see `check_resumed`.
    """
    folder, given = Path(config.output_dir), config.checkpoint.resume
    steps = _steps_of(folder)
    if steps is None:  # nothing that could be lost
        if given != AUTO:
            configuration.check_resumed(config)
        return Settled(config=config)
    newest = newest_checkpoint(folder)
    if not trains(config):
        if config.overwrites:
            clear(folder)
        elif faults := _differing(config, folder=folder, newest=newest):
            raise FolderRefused([_other_run(folder, steps=steps, faults=faults)])
        return Settled(config=config)
    if config.overwrites:
        if not (is_restart and newest is not None and not _differing(config, folder=folder, newest=newest)):
            clear(folder)
            return Settled(config=config, lines=(f"{folder}: the run of {steps} steps in it was removed",))
        given, config = AUTO, continued()
    elif given is None or not (given == AUTO or Path(given).is_relative_to(folder)):
        if not is_restart and (faults := _differing(config, folder=folder, newest=newest)):
            raise FolderRefused([_other_run(folder, steps=steps, faults=faults)])
        if not is_restart and newest is None and not _is_done(config, newest=newest, steps=steps):
            raise FolderRefused(
                [
                    f"{folder}: has the record of {steps} steps and no checkpoint to continue from; use checkpoint.resume=overwrite to "
                    "start again at step 1, which removes these rows, or name another folder with hydra.run.dir=FOLDER"
                ]
            )
        if given is None and (newest is not None or (is_restart and config.checkpoint.saves)):
            given, config = AUTO, continued()
    configuration.check_resumed(config, given=AUTO if given is None else given)
    if _is_done(config, newest=newest, steps=steps):
        more = "raise train.steps to go on, or use checkpoint.resume=overwrite to start again"
        line = f"{folder}: done after {config.train.steps} steps, nothing is left to do; {more}"
        return Settled(config=config, lines=(line,), is_done=True)
    return Settled(config=config, lines=tuple(_lines(folder, given=given, newest=newest, steps=steps)))


def clear(folder: Path) -> None:
    """Removes the record and the checkpoints of a run. Other files stay."""
    for child in folder.iterdir():
        if child.is_dir() and step_folders(child):
            shutil.rmtree(child)
    for name in _RECORDS:
        (folder / name).unlink(missing_ok=True)


def _steps_of(folder: Path) -> int | None:
    """Returns the steps that the folder's run has made, or None for a folder without a run that made any."""
    newest, record = newest_checkpoint(folder), record_of(folder)
    if newest is not None:
        return max(_recorded_steps(folder), (step_number(newest.name) or (0, 0))[0])
    if record is None:
        return None
    steps = _recorded_steps(folder)
    if steps or any((folder / name).exists() for name in _ANSWERS):
        return steps
    if read_summary(folder).get("status") == Status.done and _task_of(record) not in _FREE:
        return steps
    return None


def _recorded_steps(folder: Path) -> int:
    """Returns the step of the last complete row, or of the summary if it has a later one."""
    last = 0
    if (path := folder / METRICS).is_file():
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            for line in file.read().split(b"\n"):
                try:
                    last = int(json.loads(line)["step"])
                except (ValueError, TypeError, KeyError):
                    continue  # cut
    return max(last, int(read_summary(folder).get("steps") or 0))


def _task_of(record: Path) -> str | None:
    try:
        return configuration.load(record).task.name
    except Exception:  # noqa: BLE001 - a record of another version
        return None


def _differing(config: Config, *, folder: Path, newest: Path | None) -> list[str]:
    """Returns the keys in which the experiment differs from that of the folder's checkpoint, or of its record if there is none."""
    record = record_of(folder) if newest is None else record_of_checkpoint(newest)
    if record is None:
        return ["its checkpoints have no configuration"]
    try:
        recorded = configuration.load(record)
    except Exception as error:  # noqa: BLE001 - a record of another version
        return [f"{record} cannot be read ({type(error).__name__})"]
    if (given := recorded.checkpoint.resume) and Path(given).is_relative_to(folder):
        recorded.checkpoint.resume = None  # continued in its folder before
    found = configuration.differences(recorded, now=config)
    return [f"{key}={now} here, {before} there" for key, (before, now) in found.items()]


def _other_run(folder: Path, *, steps: int, faults: list[str]) -> str:
    listed = ", ".join(faults[:_MOST_KEYS]) + (f", and {len(faults) - _MOST_KEYS} more" if faults[_MOST_KEYS:] else "")
    made = f" of {steps} steps" if steps else ""
    return (
        f"{folder}: has another run{made} ({listed}); name another folder with hydra.run.dir=FOLDER, continue that run with "
        "checkpoint.resume=auto, or replace it with checkpoint.resume=overwrite"
    )


def _is_done(config: Config, *, newest: Path | None, steps: int) -> bool:
    """Returns whether the folder's run has ended at `train.steps`, and has its last checkpoint or none."""
    try:
        if read_status(Path(config.output_dir)) is not Status.done:
            return False
    except RecordError:
        return False
    reached = steps if newest is None else (step_number(newest.name) or (0, 0))[0]
    return min(steps, reached) >= config.train.steps


def _lines(folder: Path, *, given: str | None, newest: Path | None, steps: int) -> list[str]:
    if newest is None:
        return [f"{folder}: has no checkpoint, so the run starts again, and its rows of {steps} steps are replaced"]
    step = step_number(Path(given or AUTO).name)
    if step is None or step >= (step_number(newest.name) or step):
        return []  # the ranks print the checkpoint
    return [f"{folder}: the run goes back to step {step[0]}; the {steps - step[0]} steps after it are made again"]
