"""Identity of an experiment: the hash that names a job's folder, and the keys that must not change when a run continues."""

import hashlib
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from ztk.config.errors import ConfigError
from ztk.config.keys import flatten
from ztk.config.record import load
from ztk.config.text import have_same_tokenizer
from ztk.core.policies.config import Config
from ztk.core.policies.experiment import changes_numbers, is_counted
from ztk.core.policies.key import written
from ztk.core.policies.records import newest_checkpoint, record_of, record_of_checkpoint, run_folder, step_number
from ztk.core.policies.runs import AUTO
from ztk.core.policies.schedule import wsd_steps

HASH_LETTERS = 12


def job_hash(config: Config, *, counted: frozenset[str] = frozenset()) -> str:
    """Returns twelve letters from the resolved configuration without output, logger, launch and resume keys.

    Keys that are None do not count, so that new keys of later versions do not change old hashes. `checkpoint.resume` counts if it names a
    folder, because the run starts from it.

    counted: keys that count although they normally do not, such as `launch.threads` in a sweep over it.
    """
    values = {key: value for key, value in _values(config) if is_counted(key, value=value, counted=counted)}
    return hash_of(values)


def differences(recorded: Config, *, now: Config) -> dict[str, tuple[str, str]]:
    """Returns key -> (recorded, current) value, formatted, for every key that `job_hash` counts and that differs."""
    before, after = (
        {key: written(value) for key, value in _values(config) if is_counted(key, value=value)}
        for config in (recorded, now)
    )
    return {
        key: (before.get(key, "null"), after.get(key, "null"))
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key)
    }


def hash_of(value: Any) -> str:
    """Returns twelve letters from a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]


def check_resumed(config: Config, *, given: str | None = None) -> None:
    """Compares the configuration with the recorded one of the checkpoint in `checkpoint.resume`, if there is one.

    given: the checkpoint, in place of `checkpoint.resume`.

    `train.steps` and keys that do not affect the numbers may differ.

    Raises:
        ConfigError: a key that affects numbers differs, and `checkpoint.allow_changes` is not set.
    """
    given = given or config.checkpoint.resume
    if given is None:
        return
    run = Path(config.output_dir) if given == AUTO else run_folder(given)
    record = None if run is None else _record_of_resumed(given, run=run)
    if run is None or record is None or config.checkpoint.allow_changes:
        return
    old, new = load(record), config
    if old.task.name != new.task.name:
        raise ConfigError(
            [
                f"task={new.task.name}: the checkpoint's run has task={old.task.name} ({record}), and checkpoint.resume continues it. Leave "
                f"task={new.task.name} out, or start from the run's weights with warm_start.path in place of checkpoint.resume"
            ]
        )
    before, after = dict(_values(old)), dict(_values(new))
    if _warmup_follows_steps(old) and _warmup_follows_steps(new):
        before["scheduler.warmup_steps"] = after.get("scheduler.warmup_steps")  # none with an own schedule
    if _decay_follows_steps(old) and _decay_follows_steps(new):
        before["scheduler.decay_steps"] = after["scheduler.decay_steps"]
    if have_same_tokenizer(run / "tokenizer", other=Path(new.data.tokenizer or "")):
        before |= {key: after[key] for key in ("data.tokenizer", "data.vocab_size")}
    faults = [
        f"{key}={written(after.get(key))}: the checkpoint's run has {key}={written(before.get(key))} ({record}). "
        + (f"Use {key}={written(before[key])}, " if key in before else "Leave it out, or use ")
        + "another run folder, or checkpoint.allow_changes=true"
        for key in sorted(before.keys() | after.keys())
        if changes_numbers(key) and _own(before.get(key)) != _own(after.get(key))
    ]
    if faults:
        raise ConfigError(faults)


def _record_of_resumed(given: str, *, run: Path) -> Path | None:
    """Returns the configuration of the checkpoint that is continued. It may differ from the configuration of the run's last start."""
    step = Path(given) if step_number(Path(given).name) else newest_checkpoint(run)
    return record_of(run) if step is None else record_of_checkpoint(step)


def _values(config: Config) -> Iterator[tuple[str, Any]]:
    for key, value in flatten(config):
        yield key, value.value if isinstance(value, Enum) else value


def _own(value: Any) -> Any:
    """Treats a disabled switch like an absent one."""
    return None if value is False else value


def _warmup_follows_steps(config: Config) -> bool:
    """Returns whether `scheduler.warmup_steps` has its default, which depends on `train.steps`."""
    return config.scheduler.warmup_steps == config.train.steps // 20


def _decay_follows_steps(config: Config) -> bool:
    """Returns whether `scheduler.decay_steps` has its default, which depends on `train.steps`."""
    return config.scheduler.decay_steps == wsd_steps(None, end=config.scheduler.total_steps or config.train.steps)
