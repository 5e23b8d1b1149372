"""The command line of a sweep: extracts `sweep.*`, and inserts the recorded words for `sweep.resume`."""

from dataclasses import dataclass
from pathlib import Path

from ztk import config as configuration
from ztk.config import ConfigError, SweepConfig
from ztk.core.launch import quoted
from ztk.report.sweep import SWEEP, SweepRecord, read_sweep

_MULTIRUN = ("-m", "--multirun")
_NAMED = ("sweep=", "hydra.mode=")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepLine:
    """flags, words: for Hydra. own_flags, own_words: recorded in `sweep.json`; the line without its folder.

    options: values of `sweep.*`, or None if the line is not a sweep.
    """

    flags: list[str]
    words: list[str]
    own_flags: tuple[str, ...] = ()
    own_words: tuple[str, ...] = ()
    options: SweepConfig | None = None


def read_line(words: list[str], *, flags: list[str], trusts: bool = False) -> SweepLine:
    """Parses a line. words, flags: already checked; see `parse_arguments`. trusts: whether recorded words may name code.

    Raises:
        ConfigError: `sweep.*` without a sweep, `launch.debug` in one, `sweep.resume` of a folder without `sweep.json`, or together with
            `hydra.sweep.dir`.
    """
    taken = configuration.take_sweep_keys(words)
    options, words = taken.options, taken.words
    folder = options.resume
    if folder is not None:
        flags, words = _resumed(flags, words, folder=folder, trusts=trusts)
    sweeps = any(flag in _MULTIRUN for flag in flags) or any(word.startswith(_NAMED) for word in words)
    if taken.given and not sweeps:
        raise ConfigError([f"{' '.join(taken.given)}: is for a sweep, and this is one run: add -m"])
    if sweeps and (
        debug := [word for word in words if word.startswith("launch.debug=") and word != "launch.debug=null"]
    ):
        raise ConfigError([f"{debug[0]}: is for one run at a terminal, and this is a sweep: leave one of them out"])
    if taken.given and (other := [word for word in words if word.startswith("hydra/sweeper=")]):
        raise ConfigError([f"{' '.join(taken.given)}: has no effect with {other[0]}; leave one of them out"])
    line = SweepLine(flags=flags, words=words)
    if not sweeps:
        return line
    own = tuple(word for word in words if not word.startswith("hydra.sweep.dir="))
    placed = words if folder is None else [*own, f"hydra.sweep.dir={quoted(Path(folder).absolute())}"]
    return SweepLine(flags=flags, words=placed, own_flags=tuple(flags), own_words=own, options=options)


def _resumed(flags: list[str], words: list[str], *, folder: str, trusts: bool) -> tuple[list[str], list[str]]:
    """Returns the line's flags and words, or the recorded words if the line has none."""
    record = read_sweep(folder)
    if record is None:
        raise ConfigError([f"sweep.resume={folder}: has no {SWEEP}; name the folder of a sweep, or leave it out"])
    if any(word.startswith("hydra.sweep.dir=") for word in words):
        raise ConfigError([f"hydra.sweep.dir has no effect with sweep.resume={folder}: leave it out"])
    if not words:
        if not trusts:
            _check_record(record, flags=flags, folder=folder)
        flags, words = [*record.flags, *(flag for flag in flags if flag not in record.flags)], list(record.words)
    named = any(word.startswith(_NAMED) for word in words)
    return (flags if named or any(flag in _MULTIRUN for flag in flags) else [*flags, "-m"]), words


def _check_record(record: SweepRecord, *, flags: list[str], folder: str) -> None:
    """Raises ConfigError if recorded words name code, or a recorded flag that is not on this line may."""
    path = Path(folder, SWEEP)
    plain = [*_MULTIRUN, *flags]
    for place in configuration.extra_folders([*record.flags]):
        if not configuration.folder_names_code(place):
            plain += ["--config-dir", "-cd", place, f"--config-dir={place}"]
    if new := [flag for flag in record.flags if flag not in plain]:
        raise ConfigError(
            [
                f"{path}: has the flags {' '.join(new)}, which name code, and reading a record runs none. If you trust this code, write these "
                "flags on the command line again, or add trust=true"
            ]
        )
    words = [word for word in record.words if word != "hydra.mode=MULTIRUN"]
    configuration.check_named_code(words, record=path, folders=configuration.extra_folders(flags))
