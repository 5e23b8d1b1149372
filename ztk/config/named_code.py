"""Words of a record that name code: a record is data, and somebody else may have written it.

A continued run or sweep takes the words of its record. Of these, a word that names code acts only if the command line repeats it, or has
`trust=true`. So do Hydra's own settings, some of which name classes, and resolvers (`${oc.env:TOKEN}`).
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ztk.config.arguments import read_option
from ztk.config.errors import ConfigError
from ztk.config.keys import named_by, run_keys
from ztk.config.own import FREE, OBJECTS, SCHEMA, TARGET
from ztk.core.policies.paths import ObjectNames

KEY = "trust"
_MODULE = "task.module"
_RESOLVER = re.compile(r"\$\{[^}]*:")
_NOTHING = ("null", "", "[]")
_READING = ("checkpoint.resume=", "sweep.resume=")


def take_trust(words: Sequence[str]) -> tuple[list[str], bool]:
    """Returns the words without `trust`, and its value. Raises ConfigError for another value, and for a line that continues nothing."""
    given = [word for word in words if named_by(word) == KEY]
    faults = [f"{word}: must be true or false" for word in given if word not in (f"{KEY}=true", f"{KEY}=false")]
    if given and not any(word.startswith(_READING) for word in words):
        faults.append(
            f"{given[0]} has no effect without checkpoint.resume=RUN or sweep.resume=FOLDER, whose records it lets name code; leave it out"
        )
    if faults:
        raise ConfigError(faults)
    return [word for word in words if named_by(word) != KEY], f"{KEY}=true" in given


def check_named_code(
    recorded: Sequence[str], *, record: Path, given: Sequence[str] = (), folders: Sequence[str] = ()
) -> None:
    """Raises ConfigError for words of a record that name code, unless the command line has them, too.

    record: the file, for the message. given: words of the command line. folders: hold the user's option files.
    """
    repeated = {f"{named_by(word)}={value}" for word in given for value in _values(word)}
    found = [word for word in code_words(recorded, folders=folders) if word.lstrip("+~") not in repeated]
    if found:
        raise ConfigError(
            [
                f"{record}: names code, and reading a record runs none: {' '.join(found)}. If you trust this code, write these words on the "
                f"command line again, or add {KEY}=true"
            ]
        )


def code_words(recorded: Sequence[str], *, folders: Sequence[str] = ()) -> list[str]:
    """Returns the words of a record that may name code.

    If an option file of the user's takes a name of code from other keys (`_target_: ${user.kind}`), every key of the user's is such a word.

    folders: hold the user's option files.
    """
    is_open = any(_is_open(file) for folder in folders for file in Path(folder).glob("*/*.yaml"))
    return [word for word in dict.fromkeys(recorded) if names_code(word) or (is_open and _is_of_user(word))]


def folder_names_code(folder: str) -> bool:
    """Returns whether an option file below a recorded folder may name code, or cannot be read."""
    return any(_file_names_code(file) for file in Path(folder).rglob("*.yaml"))


def _file_names_code(file: Path) -> bool:
    try:
        text, pairs = file.read_text(encoding="utf-8"), list(_leaves(read_option(file)[1]))
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError):
        return True
    last = {name.rpartition(".")[2] for name in _code_keys()}  # a file's package may be any section
    return any(
        "hydra" in f"{text}{key}{value}" or names_code(f"{key}={value}") or key.rpartition(".")[2] in last
        for key, value in pairs
    )


def names_code(word: str) -> bool:
    """Returns whether a word of the command line may name code, or sets Hydra itself."""
    key, _, value = word.lstrip("+~").partition("=")
    name, _, package = key.partition("@")
    if re.match(r"hydra\b", name) or package not in ("", f"user.{name}"):
        return True
    if any(mark in word for mark in (TARGET, SCHEMA)) or _RESOLVER.search(value):
        return True
    return name in _code_keys() and value not in _NOTHING


@functools.cache
def _code_keys() -> frozenset[str]:
    """Returns the keys of ztk that name modules, functions and classes."""
    return frozenset([_MODULE, *(name for name, key in run_keys().items() if isinstance(key.paths, ObjectNames))])


def _is_of_user(word: str) -> bool:
    section, dot, _ = named_by(word).partition(".")
    return bool(dot) and section in (*FREE, *OBJECTS, "user")


def _values(word: str) -> Iterator[str]:
    """Yields the value of a word, and the values of its sweep."""
    value = word.partition("=")[2]
    yield value
    yield from value.split(",")


def _is_open(file: Path) -> bool:
    """Returns whether an option file has a name of code with an interpolation."""
    return any("${" in str(value) for key, value in _leaves(read_option(file)[1]) if names_code(f"{key}=NAME"))


def _leaves(values: Any, *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    pairs = values.items() if isinstance(values, Mapping) else [("", value) for value in values]
    for key, value in pairs:
        name = f"{prefix}.{key}".strip(".")
        if isinstance(value, Mapping | list):
            yield from _leaves(value, prefix=name)
        else:
            yield name, value
