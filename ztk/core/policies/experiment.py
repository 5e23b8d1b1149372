"""Which keys of a run's configuration are part of the experiment, and which of them change its numbers."""

import typing
from typing import Any

from ztk.core.policies.config import Config
from ztk.core.policies.key import Changes, changes_of, declared_keys
from ztk.core.policies.runs import AUTO


def is_counted(key: str, *, value: Any, counted: frozenset[str] = frozenset()) -> bool:
    """Whether a key with this value is part of the experiment. A folder in `checkpoint.resume` is, because the run starts from it. None is not.
    counted: further keys that are part of this experiment."""
    if value is None:
        return False
    if key in counted or (key == "checkpoint.resume" and value != AUTO):
        return True
    return _changes(key) is not Changes.nothing


def changes_numbers(key: str) -> bool:
    """Whether losses depend on the key by more than rounding."""
    return _changes(key) is Changes.numbers


def _changes(key: str) -> Changes:
    """A key of a user's object has the `changes` of its section."""
    if key == "output_dir":
        return Changes.nothing
    if key.partition(".")[0] == "callbacks":
        return Changes.experiment  # a run may go on with other callbacks, as with other code of theirs
    declared = declared_keys(Config).get(key)
    return (
        declared.changes if declared else changes_of(typing.get_type_hints(Config).get(key.partition(".")[0], Config))
    )
