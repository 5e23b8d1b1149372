"""Renamed keys of the command line. The old name is accepted for one release, with a note."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ztk.config.errors import ConfigError
from ztk.config.keys import Words, named_by, run_keys


@functools.cache
def renamed() -> dict[str, str]:
    """Returns old name -> new name."""
    return {key.was: name for name, key in run_keys().items() if key.was is not None}


def rename_keys(overrides: Sequence[str]) -> Words:
    """Renames old keys. Raises ConfigError with every key that is given under both names."""
    words, notes, faults = [], [], []
    keys = {named_by(word) for word in overrides}
    for word in overrides:
        old = named_by(word)
        new = renamed().get(old)
        if new is None:
            words.append(word)
        elif new in keys:
            faults.append(f"{old}: is the old name of {new}, which is given too; keep {new}")
        else:
            words.append(word.replace(old, new, 1))
            notes.append(f"{old} is called {new} now; the old name goes with the next release")
    if faults:
        raise ConfigError(faults)
    return Words(words=words, notes=tuple(notes))


def rename_recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested values of a `config.yaml` under current names; it may come from an earlier release."""
    found = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in values.items()}
    for old, new in renamed().items():
        section, _, name = old.partition(".")
        if isinstance(found.get(section), dict) and name in found[section]:
            found[section][new.partition(".")[2]] = found[section].pop(name)
    return found


def hint_of(text: str) -> str:
    """Returns `; it is called ... now` if `text`, an error about an option file, quotes an old name, else an empty string."""
    for old, new in renamed().items():
        if f"'{old.partition('.')[2]}'" in text:
            return f"; it is called {new} now"
    return ""
