"""`checkpoint.resume=RUN` continues with the options of RUN: the command line only needs to name changes."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ztk.config.arguments import extra_folders, split_flags
from ztk.config.errors import ConfigError
from ztk.config.keys import named_by, read, run_keys
from ztk.config.named_code import check_named_code, take_trust
from ztk.config.record import load
from ztk.core.launch import quoted
from ztk.core.policies.records import run_record
from ztk.core.policies.runs import AUTO, OVERWRITE

_RESUME = "checkpoint.resume="
# Keys that the new command decides itself. The global batch of the run's configuration determines the accumulation steps.
_LEFT = ("checkpoint.allow_changes", "checkpoint.resume", "launch.debug", "train.accumulation_steps", "sweep")
# Setting the second key on the command line discards the run's value of the first.
_FOLLOWS = {"data.vocab_size": "data.tokenizer"}
_OF_RANKS = ("launch.ranks", "launch.elastic", "launch.min_ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """words: the run's words followed by the command line's, without `trust`. taken: the run's words. trusts: the value of `trust`.
    run: the run's folder.
    """

    words: list[str]
    taken: tuple[str, ...] = ()
    trusts: bool = False
    run: Path | None = None

    def hints(self, fault: ConfigError, *, folders: Sequence[str]) -> ConfigError:
        """Returns a fault of the words, with the `--config-dir` that the run had and the command line lacks. folders: the command line's."""
        try:
            environment = json.loads(Path(self.run or "", "env.json").read_text(encoding="utf-8"))
            had = extra_folders(split_flags(shlex.split(environment["command"]))[0])
        except (OSError, ValueError, KeyError, TypeError):
            return fault
        missing = [folder for folder in had if folder not in folders]
        if not self.taken or not missing:
            return fault
        return ConfigError([*fault.faults, f"{self.run} was started with --config-dir {' '.join(missing)}: repeat it"])


def take_run_words(words: Sequence[str], *, has_ranks: bool = False, folders: Sequence[str] = ()) -> Resumed:
    """Adds the options with which the run of `checkpoint.resume=RUN` was started.

    Words of the command line replace the run's; an option of a group (`offload=none`) also replaces the run's keys of that group. `auto`
    continues the folder's own run with a repeated command line, so nothing is added.

    has_ranks: whether another launcher has started the ranks. folders: hold the user's option files.

    Raises ConfigError if a word of the run names code, unless the command line sets its key, too, or has `trust=true`.
    """
    words, trusts = take_trust(words)
    record = _record(words)
    if record is None or not (path := record.with_name("overrides.json")).is_file():
        return Resumed(words=words, trusts=trusts)
    recorded = recorded_words(path)
    given = {named_by(word) for word in words}
    config = load(record)
    left = (*_LEFT, *(_OF_RANKS if has_ranks else ()))
    taken = []
    for sign_and_key, value in recorded.items():
        key = named_by(sign_and_key)
        is_replaced = key in given or key.partition(".")[0] in given or _FOLLOWS.get(key) in given
        if is_replaced or key in left or key.startswith("sweep."):
            continue
        declared = run_keys().get(key)
        is_path = declared is not None and declared.paths is not None
        absolute = read(config, key=key) if is_path else None  # paths may be relative to where the run was started
        text = value if absolute is None else _written(absolute)
        taken.append(f"{sign_and_key}={text}" if value or not sign_and_key.startswith("~") else sign_and_key)
    if not trusts:
        check_named_code(taken, record=path, given=words, folders=folders)
    return Resumed(words=[*taken, *words], taken=tuple(taken), trusts=trusts, run=record.parent)


def recorded_words(path: Path) -> dict[str, str]:
    """Returns key -> value of `overrides.json`. Empty if it cannot be read."""
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    values = recorded.items() if isinstance(recorded, dict) else ()
    return {key: value for key, value in values if isinstance(value, str)}


def _record(words: Sequence[str]) -> Path | None:
    """Returns `config.yaml` of the run that the words name, or None."""
    values = [word.removeprefix(_RESUME) for word in words if word.startswith(_RESUME)]
    if not values or values[-1] in ("", "null", AUTO, OVERWRITE):
        return None
    value = values[-1]
    if value[0] in "'\"" and value[-1] == value[0]:
        value = value[1:-1].replace(f"\\{value[0]}", value[0])
    return run_record(value)


def _written(value: Any) -> str:
    """Formats a path, or a list or mapping with paths, in Hydra's grammar."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return quoted(value)
