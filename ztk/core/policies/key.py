"""Declares a key of the command line once, as a field of its section. Help, ranges, refusals and hashes are derived from it."""

import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, dataclass_transform

from ztk.core.policies.machine import Machine
from ztk.core.policies.ranges import shown

if TYPE_CHECKING:
    from ztk.core.policies.config import Config

_Section = TypeVar("_Section")


class Accepted(Protocol):
    """The values that a key accepts, such as a `Range`. brief: their description."""

    @property
    def brief(self) -> str: ...

    def fault(self, value: Any) -> str:
        """Why `value` is refused, starting with "must be"; "" if it is accepted."""


class Places(Protocol):
    """How a key names files or folders, such as `Paths`."""

    def absolute(self, value: Any) -> Any:
        """The value with absolute paths."""

    def faults(self, value: Any, *, key: str) -> Iterator[str]:
        """One line per file or folder that does not exist. key: the name, for the message."""
        ...


class Changes(Enum):
    """The part of a run that depends on a key."""

    nothing = "nothing"  # where files are, logging, launching: the key is not part of the run's hash
    experiment = "experiment"  # another experiment, whose losses are the same within rounding
    numbers = "numbers"  # losses


@dataclass(frozen=True, slots=True)
class When:
    """The runs in which a key acts. words: the choices of the command line that make such a run.

    section: the one whose keys alone decide, and section_test: the same test of that section, or of a policy with its fields.
    """

    words: str
    test: Callable[["Config", Machine], bool]
    section: str = ""
    section_test: Callable[[Any], bool] | None = None

    def excludes(self, values: Any, *, section: str) -> bool:
        """Whether `values`, of `section`, alone make a run in which the key does not act."""
        return self.section == section and self.section_test is not None and not self.section_test(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A declared key. name: dotted, such as "zero.stage". hint: its type. default: MISSING if an option of its group must set it."""

    name: str = ""
    hint: Any = None
    default: Any = None
    meaning: str
    range: Accepted | None
    acts: When | None
    optional: bool
    contradicts: Callable[["Config"], Iterator[str]] | None
    idle: Any
    changes: Changes = Changes.numbers
    paths: Places | None


def key(
    meaning: str,
    *,
    default: Any = None,
    range: Accepted | None = None,
    acts: When | None = None,
    optional: bool = False,
    contradicts: Callable[["Config"], Iterator[str]] | None = None,
    idle: Any = None,
    changes: Changes | None = None,
    paths: Places | None = None,
    chosen: bool = False,
    line: Any = None,
) -> Any:
    """Declares a key as the field of a policy or of a section (`section`). The class attributes `acts`, `optional` and `changes` of the
    class are the defaults of its keys.

    meaning: the line in `--help GROUP` and in the documentation.
    default: MISSING if an option of the group must set the key.
    range: the accepted values, where the type accepts more.
    acts: the runs in which the key acts. In other runs the key is None, and a value from the user is refused.
    optional: the key may be None where it acts.
    contradicts: yields one line per choice of the run that contradicts the value.
    idle: a value that is accepted where the key does not act.
    changes: the part of a run that depends on the key.
    paths: how the key names files or folders.
    chosen: an option of the group must set the key; the default is the policy's alone.
    line: the type on the command line, if it differs from the policy's.
    """
    declared = Key(
        meaning=meaning,
        range=range,
        acts=acts,
        optional=optional,
        contradicts=contradicts,
        idle=idle,
        paths=paths,
    )
    return field(default=default, metadata={"key": declared, "changes": changes, "chosen": chosen, "line": line})


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(declared: type[_Section]) -> type[_Section]:
    """Class decorator of a section of the command line: its fields are the keys of the policies that it inherits and its own.

    The section is mutable and checks nothing. A key that does not act in every run, or that is optional, can be None: it has no effect, or
    its value is left open. An optional key is None unless it is set, and the policy's default takes its place (`policy_of`).
    """
    hints = typing.get_type_hints(declared)
    own = {
        name: vars(declared).get(name)
        for name in vars(declared).get("__annotations__", {})
        if hints[name] is not ClassVar
    }
    inherited = {
        name: entry
        for base in declared.__mro__[:0:-1]
        for name, entry in vars(base).get("__dataclass_fields__", {}).items()
        if "key" in entry.metadata
    }
    entries: list[Any] = []
    for name, entry in (own | inherited).items():
        if entry is None:  # a section within this one
            entries.append((name, hints[name]))
        else:
            entries.append((name, *_on_line(entry, section=declared, hint=hints[name])))
    attributes = ("acts", "optional", "changes", "__doc__", "__module__", "__qualname__")
    kept = {name: getattr(declared, name) for name in attributes if hasattr(declared, name)}
    mixins = tuple(base for base in declared.__mro__[1:-1] if not is_dataclass(base))
    made: Any = make_dataclass(declared.__name__, entries, bases=mixins, namespace=kept, kw_only=True)
    return made


def _on_line(entry: Field, *, section: type, hint: Any) -> tuple[Any, Field]:
    """Type and field of a policy's key in a section."""
    declared: Key = entry.metadata["key"]
    acts, optional = (getattr(declared, name) or getattr(section, name, None) for name in ("acts", "optional"))
    hint = entry.metadata["line"] or hint
    default = MISSING if entry.metadata["chosen"] else None if optional else entry.default
    is_open = (acts or optional) and hint is not Any  # Any accepts None
    return (hint | None if is_open else hint), field(default=default, metadata=entry.metadata)


def policy_of(policy: type[_Section], *, given: Any, others: Mapping[str, Any] | None = None) -> _Section:
    """Returns the policy with the values of a section. A None in the section is the policy's default. Enumerations become their words, and
    lists tuples. others: values of fields by name, which replace the section's."""
    names = {entry.name for entry in fields(given)}
    values = {name: getattr(given, name) for name in declared_keys(policy) if name in names}
    return policy(
        **{name: _of_policy(value) for name, value in values.items() if value is not None} | dict(others or {})
    )


def _of_policy(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else tuple(value) if isinstance(value, list) else value


@functools.cache
def declared_keys(section: type, *, prefix: str = "") -> dict[str, Key]:
    """The keys of a section and of those within it, by their dotted names."""
    found: dict[str, Key] = {}
    hints = typing.get_type_hints(section)
    for entry in fields(section):
        if "key" in entry.metadata:
            name, hint = prefix + entry.name, hints[entry.name]
            found[name] = _complete(entry, section=section, name=name, hint=hint)
        elif is_dataclass(hints[entry.name]):
            found |= declared_keys(hints[entry.name], prefix=f"{prefix}{entry.name}.")
    return found


def _complete(entry: Field, *, section: type, name: str, hint: Any) -> Key:
    """The declared key with its name and type, and the defaults of its section."""
    declared: Key = entry.metadata["key"]
    return replace(
        declared,
        name=name,
        hint=hint,
        default=entry.default,
        acts=declared.acts or getattr(section, "acts", None),
        optional=declared.optional or getattr(section, "optional", False),
        changes=entry.metadata["changes"] or changes_of(section),
    )


def changes_of(section: type) -> Changes:
    """`changes` of a section, which also applies to keys of a user's object in it."""
    return getattr(section, "changes", Changes.numbers)


def key_faults(
    values: Any,
    *,
    section: str,
    keys: type | None = None,
    place: str = "",
    of: Any = None,
    others: Mapping[str, Accepted] | None = None,
) -> Iterator[str]:
    """One line per attribute of `values` that its key refuses: a number outside of the range, or another value than the default where the key
    does not act.

    values: a policy, which may lack keys. None is "not given", and where a key does not act, so are 0 and False. keys: the class that
    declares the keys of `section`, by default the class of `values`. place: names `values` in the message, by default with the section. of: the
    policy whose fields decide whether a key acts, by default `values`. others: ranges of attributes that no key sets.
    """
    of, place = values if of is None else of, place or section
    usual = {field.name: field.default for field in fields(values)}
    checks = {name: (declared.range, declared.acts) for name, declared in declared_keys(keys or type(values)).items()}
    checks |= {name: (accepted, None) for name, accepted in (others or {}).items()}
    for name, (accepted, acts) in checks.items():
        value = getattr(values, name, None)
        if value is None:
            continue
        if accepted and (reason := accepted.fault(value)):
            yield f"{place}.{name}={shown(written(value))}: {reason}"
        elif acts and value not in (0, usual[name]) and acts.excludes(of, section=section):
            yield without_effect(f"{place}.{name}", value=value, acts=acts)


def without_effect(name: str, *, value: Any, acts: When) -> str:
    """The fault of a value given to a key that does not act in the run."""
    return f"{name}={written(value)} has no effect here, only with {acts.words}: leave it out"


def written(value: Any) -> str:
    """Formats a value as on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return str(value)


def within(section: str, *, words: str, test: Callable[[Any], bool]) -> When:
    """Runs that `test` of one section selects."""
    return When(words, lambda config, machine: test(getattr(config, section)), section, test)


def chosen(group: str, *names: str) -> When:
    """Runs with one of these options of a group, whose section has a key `name`."""
    *others, last = names
    words = f"{group}={', '.join(others)} or {last}" if others else f"{group}={last}"
    return within(group, words=words, test=lambda section: section.name in names)


def tasks(*names: str) -> When:
    """Runs of one of these tasks."""
    *others, last = (f"task={name}" for name in names)
    words = f"{', '.join(others)} or {last}" if others else last
    return When(words, lambda config, machine: config.task.name in names)
