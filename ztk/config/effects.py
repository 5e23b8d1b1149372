"""Checks that follow from the declarations of keys: ranges, contradictions, and keys without effect in a run.

A key without effect is an error if the user set it, and becomes None if it is a default or comes from an option file, so that the
recorded configuration lists only effective keys. A key with an effect needs a value, unless it is optional.
"""

from collections.abc import Iterator

from ztk.config.keys import read, run_keys, write
from ztk.config.own import is_own_key
from ztk.core.policies.config import Config
from ztk.core.policies.key import without_effect, written
from ztk.core.policies.machine import Machine
from ztk.core.policies.ranges import shown


def declared_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per value out of its range, per given key without effect, per contradiction, per path without a file,
    and per group of keys that lack a value."""
    missing: dict[str, list[str]] = {}
    for name, key in run_keys().items():
        if is_own_key(config, key=name):
            continue
        value = read(config, key=name)
        if value is not None and key.range is not None and (reason := key.range.fault(value)):
            yield f"{name}={shown(written(value))}: {reason}"
        if key.acts is None or key.acts.test(config, machine):
            if value is not None and key.contradicts is not None:
                yield from key.contradicts(config)
            if value is not None and key.paths is not None:
                yield from key.paths.faults(value, key=name)
            if value is None and key.acts is not None and not key.optional:
                missing.setdefault(key.acts.words, []).append(name)
        elif name in config.given and value is not None and value != key.idle:
            yield without_effect(name, value=value, acts=key.acts)
    for words, names in missing.items():
        yield f"{', '.join(names)} must have a value: choose {words}"


def null_inactive_keys(config: Config, *, machine: Machine) -> None:
    """Sets keys without effect to None."""
    for name, key in run_keys().items():
        if key.acts is not None and not key.acts.test(config, machine):
            write(config, key=name, value=None)


def null_unused_defaults(config: Config, *, machine: Machine) -> None:
    """Sets ineffective keys to None that have their default, so that no rule checks an unused default. Values that the user or an option
    set, as weights=int8 does, stay and are checked.
    """
    for name, key in run_keys().items():
        is_default = name not in config.given and key.default is not None and read(config, key=name) == key.default
        if is_default and key.acts and not key.acts.test(config, machine):
            write(config, key=name, value=None)
