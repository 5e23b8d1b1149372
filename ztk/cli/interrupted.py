"""Messages after Ctrl-C or SIGTERM: the saved checkpoint and the command that continues the run."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ztk.config import Config, code_words, extra_folders, recorded_words
from ztk.core.launch import quoted, read_failure
from ztk.core.policies.records import newest_checkpoint, step_number
from ztk.report.status import read_summary
from ztk.report.sweep import read_sweep


def saving_notice(config: Config) -> str:
    """Returns the message for the moment of the signal, or an empty string if the run saves nothing."""
    if config.checkpoint.grace_seconds is None:
        return ""
    return (
        f"interrupted: the step that runs ends and is saved, within checkpoint.grace_seconds={config.checkpoint.grace_seconds:g}; a second "
        "Ctrl-C ends the run at once"
    )


def way_on(config: Config, *, flags: Sequence[str] = (), starter: str | None = None) -> list[str]:
    """Returns lines about an interrupted run: its newest checkpoint and the command that continues it in its folder.

    flags: flags of the command line, such as `--config-dir`. starter: the launcher that started the ranks. Defaults to `run.py` itself.
    """
    folder = Path(config.output_dir)
    if config.checkpoint.grace_seconds is None:  # only for runs that train and save
        unsaved = config.checkpoint.last is False and not config.checkpoint.every
        return ["interrupted; nothing is saved with checkpoint=none"] if unsaved else ["interrupted"]
    failures = [read_failure(folder, rank=rank) for rank in range(config.launch.ranks)]
    causes = [f"interrupted, and then {failure}" for failure in failures if failure and not failure.secondary]
    newest, made = newest_step(folder), read_summary(folder).get("steps", 0)
    if newest is None:
        lost = f": {_lost(made)}" if made else " before the first step ended"
        line = [f"interrupted{lost}; no checkpoint is in {folder}"]
    else:
        lost = f"; {_lost(made - newest, place=' after it')}" if made > newest else ""
        line = [f"interrupted; the checkpoint of step {newest} is in {folder}{lost}. This continues the run:"]
        line += [f"  {resume_line(folder, flags=flags, starter=starter)}"]
    return causes[:1] + line


def _lost(steps: int, *, place: str = "") -> str:
    return f"1 step{place} is lost" if steps == 1 else f"{steps} steps{place} are lost"


def newest_step(folder: Path) -> int | None:
    """Returns the step of the run's latest checkpoint."""
    newest = newest_checkpoint(folder)
    return None if newest is None else (step_number(newest.name) or (0, 0))[0]


def resume_line(folder: Path, *, flags: Sequence[str] = (), starter: str | None = None) -> str:
    """Returns the shell command that continues the run of `folder` in the same folder, from the current directory.

    It repeats the words that name code, which a resume does not take from the record.
    """
    path = _shown(folder)
    recorded = [f"{key}={value}" for key, value in recorded_words(folder / "overrides.json").items()]
    code = code_words(recorded, folders=extra_folders([*flags]))
    words = [*flags, *code, f"checkpoint.resume={_value(path)}", f"hydra.run.dir={_value(path)}"]
    started = f"{starter} ... " if starter else ""
    return f"{started}{_program(started=bool(starter))} {shlex.join(words)}"


def sweep_line(folder: Path, *, flags: Sequence[str] = ()) -> str:
    """Returns the command that continues the sweep of `folder`."""
    words, record = [f"sweep.resume={_value(_shown(folder))}"], read_sweep(folder)
    if record is not None and code_words(record.words, folders=extra_folders([*flags])):
        words.append("trust=true")  # the user has just named this code
    return f"{_program()} {shlex.join([*flags, *words])}"


def _program(*, started: bool = False) -> str:
    """Returns the program name that started this process."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return "python -m ztk"
    if program.suffix == ".py":
        return shlex.quote(sys.argv[0]) if started else f"python {shlex.quote(sys.argv[0])}"
    return program.name


def _shown(folder: Path) -> Path:
    """Returns the path relative to the current directory if it is below it."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) and folder != here else folder


def _value(path: Path) -> str:
    """Formats a value for Hydra's grammar, quoted only if it has special characters."""
    text = str(path)
    return text if all(letter.isalnum() or letter in "/._-" for letter in text) else quoted(text)
