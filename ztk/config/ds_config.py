"""`ds_config=FILE` on the command line: converts a DeepSpeed configuration to overrides with the same meaning.

Other overrides take precedence. Keys of the file that run.py does not have are accepted with a note. Keys that `deepspeed.initialize`
rejects are rejected here too.
"""

from ztk.config.errors import ConfigError
from ztk.config.keys import Words, named_by
from ztk.config.topology import RANKS_WITHOUT_GPU
from ztk.core.policies.machine import Machine

KEY = "ds_config"


def expand_ds_config(overrides: list[str], *, machine: Machine) -> Words:
    """Replaces `ds_config` by overrides. The notes are keys of the file without effect in such a run.

    Raises ConfigError with every rejected key, and for more than one file.
    """
    given = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == KEY]
    if not given:
        return Words(words=overrides)
    if len(given) > 1 or "," in given[0]:
        raise ConfigError([f"{KEY}={','.join(given)}: one file for one run; start run.py once for every file"])
    from ztk.deepspeed.config import (
        DeepSpeedConfigError,
        parse_config,
    )  # imports torch, which other runs do not need here
    from ztk.deepspeed.config.convert import to_overrides

    others = [word for word in overrides if word.partition("=")[0] != KEY]
    try:
        settings = parse_config(given[0], world_size=_ranks(others, machine=machine))
    except DeepSpeedConfigError as error:
        raise ConfigError([f"{KEY}={given[0]}: {fault}" for fault in error.faults]) from None
    made = to_overrides(settings, keeps_global_batch=True)
    chosen = {named_by(word) for word in others}
    kept = [word for word in made.words if not _is_given(word, chosen=chosen)]
    return Words(words=[*kept, *others], notes=tuple(made.notes))


def _is_given(word: str, *, chosen: set[str]) -> bool:
    """Returns whether the line sets the key, or chooses the option of its group."""
    key = word.partition("=")[0]
    return key in chosen or key.partition(".")[0] in chosen


def _ranks(overrides: list[str], *, machine: Machine) -> int:
    """Returns the number of ranks from the line, or the default. The global batch does not depend on it."""
    # pyrefly: ignore[no-matching-overload]  # partition gives three parts
    values = dict(word.partition("=")[::2] for word in overrides)
    named = values.get("launch.ranks", "")
    gpus = 0 if values.get("launch.device") == "cpu" else machine.gpus
    return (
        int(named)
        if named.isdecimal() and named.isascii() and int(named)
        else machine.started_ranks or gpus or RANKS_WITHOUT_GPU
    )
