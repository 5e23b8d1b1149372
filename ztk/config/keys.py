"""Dotted names: all keys of the schema with their types, and access to a value by its name. Derived values have a reason."""

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from ztk.config.own import USER, nodes_of, written_user
from ztk.core.policies.config import Config
from ztk.core.policies.key import Key, declared_keys
from ztk.core.policies.sweep import SweepConfig

SWEEP = "sweep"  # the section with keys of a command line instead of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """words: overrides of a command line after some were replaced. notes: one line for the user per replacement."""

    words: list[str]
    notes: tuple[str, ...] = ()


@functools.cache
def run_keys() -> dict[str, Key]:
    """Returns every key of a run, by its dotted name."""
    return declared_keys(Config)


@functools.cache
def line_keys() -> dict[str, Key]:
    """Returns all keys that the command line of a run or a sweep may set."""
    return run_keys() | declared_keys(SweepConfig, prefix=f"{SWEEP}.")


def no_values() -> dict[str, Any]:
    """Returns None for every key that may be None, nested as a configuration. A key missing from a record had no effect."""
    found: dict[str, Any] = {}
    for name, key in run_keys().items():
        if key.hint is Any or type(None) in typing.get_args(key.hint):
            *sections, last = name.split(".")
            owner = found
            for section in sections:
                owner = owner.setdefault(section, {})
            owner[last] = None
    return found


def section_of(key: str) -> type:
    """Returns the dataclass that declares `key`."""
    if key.startswith(f"{SWEEP}."):
        return SweepConfig
    section: Any = Config
    for name in key.split(".")[:-1]:
        section = typing.get_type_hints(section)[name]
    return section


def flatten(values: Any, *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields key and value of everything below a dataclass or nested mappings.

    For a `Config`, user objects contribute the keys of their nodes.
    """
    if isinstance(values, Config):
        nodes = nodes_of(values) | {USER: written_user(values.user)}
        sections = {field.name: getattr(values, field.name) for field in fields(values) if field.name != "own"}
        pairs = list((sections | nodes).items())
    elif is_dataclass(values):
        pairs = [(field.name, getattr(values, field.name)) for field in fields(values)]
    else:
        pairs = list(values.items())
    for name, value in pairs:
        if is_dataclass(value) or (isinstance(value, Mapping) and prefix + name not in run_keys()):
            yield from flatten(value, prefix=f"{prefix}{name}.")
        else:
            yield prefix + name, value


def read(config: Config, *, key: str) -> Any:
    """Returns the value of a key like "zero.stage"."""
    return attrgetter(key)(config)


def write(config: Config, *, key: str, value: Any) -> None:
    """Sets a key like "zero.stage"."""
    section, _, name = key.rpartition(".")
    setattr(read(config, key=section) if section else config, name, value)


def derive(config: Config, *, key: str, value: Any, reason: str) -> None:
    """Sets a key unless the user set it, and stores the reason, a single line."""
    if key not in config.given:
        write(config, key=key, value=value)
        config.reasons[key] = reason


def fill(config: Config, *, key: str, value: Any, reason: str) -> None:
    """Sets a key that has no value, and stores the reason, a single line."""
    if read(config, key=key) is None:
        write(config, key=key, value=value)
        config.reasons[key] = reason


def named_by(word: str) -> str:
    """Returns the key or group that a word of the command line sets: "zero.stage" of "++zero.stage=3"."""
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def expected(hint: Any) -> str:
    """Describes the values that a key of this type accepts."""
    if isinstance(hint, types.UnionType):
        inner = [expected(kind) for kind in typing.get_args(hint) if kind is not type(None)]
        return " or ".join([*inner, "null"])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"  # excludes aliases
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word or path"}
    if typing.get_origin(hint) is dict:
        return "a table in an option file"  # Hydra cannot merge a table of the command line into null
    return words.get(hint, "a list of numbers" if typing.get_origin(hint) is list else "a value")


def holds_number(hint: Any) -> bool:
    """Returns whether a key of this type takes a number or a list of numbers."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(kind in (int, float) or typing.get_origin(kind) is list for kind in kinds)


def holds_table(hint: Any) -> bool:
    """Returns whether a key of this type takes a mapping."""
    return any(typing.get_origin(kind) is dict for kind in typing.get_args(hint))


def holds_text(hint: Any) -> bool:
    """Returns whether a key of this type takes a text or a list of texts, and no number."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return not {int, float, bool} & {*kinds} and any(kind is str or kind == list[str] for kind in kinds)


def holds_int(hint: Any) -> bool:
    """Returns whether a key of this type takes a whole number."""
    return hint is int or (isinstance(hint, types.UnionType) and int in typing.get_args(hint))
