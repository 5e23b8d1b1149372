"""The keys of a configuration: each has a type, and takes effect, is accepted with a note, or is rejected."""

import difflib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ztk.core.policies.ranges import INT64_MAX, Range
from ztk.core.policies.suggest import did_you_mean

_LARGEST = int(sys.float_info.max)
Convert = Callable[[object], object]  # raises ValueError("must be ...")
_NULL = "stands for the default, as if it were left out"


class Effect(Enum):
    """The effect of a key."""

    takes = "takes"  # the run follows it
    hint = "hint"  # accepted with a note, without effect in ztk
    fixed = "fixed"  # only its usual values are accepted, because ztk supports no others


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of one section. usual: default values that are accepted without a note."""

    effect: Effect
    convert: Convert
    usual: tuple[object, ...] = ()
    why: str = ""
    auto: bool = (
        False  # "auto" means the default, as in DeepSpeed; for other keys only the Hugging Face Trainer fills it in
    )
    null: str | None = _NULL  # the note for null, which means the default; without one, the conversion handles null


@dataclass(kw_only=True)
class Findings:
    """Faults and notes about a configuration."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises DeepSpeedConfigError with every fault."""
        if self.faults:
            raise DeepSpeedConfigError(list(dict.fromkeys(self.faults)))


def takes(convert: Convert, *, auto: bool = False, null: str | None = _NULL) -> Key:
    """Returns a key with effect. auto, null: see `Key`."""
    return Key(effect=Effect.takes, convert=convert, auto=auto, null=null)


def hint(convert: Convert, why: str, *, usual: tuple[object, ...] = (), auto: bool = False) -> Key:
    """Returns a key that is accepted with the note `why`, or silently with its usual values."""
    return Key(effect=Effect.hint, convert=convert, usual=usual, why=why, auto=auto)


def fixed(*usual: object, why: str) -> Key:
    """Returns a key that accepts only its usual values. why: reason for the rejection."""
    return Key(effect=Effect.fixed, convert=anything, usual=usual, why=why)


def keys_of(settings: type) -> dict[str, Key]:
    """Returns a key with effect for each field of a dataclass, by its type.

    `Annotated[int, convert]` names the conversion; booleans, texts and lists of texts have their own, and `| None` accepts null.
    """
    return {name: takes(_conversion(kind)) for name, kind in get_type_hints(settings, include_extras=True).items()}


def _conversion(kind: Any) -> Convert:
    if get_origin(kind) is Annotated:
        return kind.__metadata__[0]
    if NoneType in get_args(kind):
        return optional(_conversion(get_args(kind)[0]))
    return {bool: boolean, str: text, tuple[str, ...]: texts}[kind]


def read_section(
    given: object,
    *,
    path: str,
    keys: Mapping[str, Key],
    findings: Findings,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the converted values of a section's effective keys. Adds everything else to `findings`.

    path: the section's name with a trailing dot, or "" at the top. elsewhere: wrong name -> fix. aliases: another name -> name in `keys`.
    """
    if given is None:
        findings.notes.append(f"{path.rstrip('.')}=None: {_NULL}")
        return {}
    if not isinstance(given, Mapping):
        findings.faults.append(f"{path.rstrip('.')}: must be an object {{...}}, not {given!r}")
        return {}
    values = {}
    for name, value in given.items():
        proper = aliases.get(name, name)
        key = keys.get(proper)
        if key is None:
            fix = elsewhere.get(name)
            reason = fix or f"there is no such key{did_you_mean(nearest(name, known=[*keys, *aliases]))}"
            findings.faults.append(f"{path}{name}: {reason}")
            continue
        if proper != name:
            findings.notes.append(f"{path}{name}: is read as {proper}")
        if value == "auto" and "auto" not in key.usual:
            if not key.auto:
                findings.faults.append(
                    f"{path}{name}: 'auto' is for the Hugging Face Trainer, which fills it in; give a value"
                )
            continue
        if _is_usual(value, key=key):
            continue
        if value is None and key.null is not None and not _takes_null(key):
            findings.notes.append(f"{path}{name}=None: {key.null}")
            continue
        if type(value) is int and value in (0, 1) and _is_boolean(key):
            findings.notes.append(f"{path}{name}={value}: stands for {str(bool(value)).lower()}")
            value = bool(value)
            if _is_usual(value, key=key):
                continue
        if key.effect is Effect.fixed:
            findings.faults.append(f"{path}{name}={shown(value)}: {key.why}")
            continue
        try:
            converted = key.convert(value)
        except ValueError as error:
            findings.faults.append(f"{path}{name}={shown(value)}: {error}")
            continue
        if key.effect is Effect.takes:
            if values.setdefault(proper, converted) != converted:
                alias = next(alias for alias in given if aliases.get(alias) == proper)
                findings.faults.append(f"{path}{alias}: is another name of {proper}, which is given too; keep one")
        elif converted not in key.usual:
            findings.notes.append(f"{path}{name}={shown(value)}: {key.why}")
    return values


def _is_usual(value: object, *, key: Key) -> bool:
    return any(value is usual or (type(value) is type(usual) and value == usual) for usual in key.usual)


def _is_boolean(key: Key) -> bool:
    return key.convert is boolean or any(isinstance(usual, bool) for usual in key.usual)


def _takes_null(key: Key) -> bool:
    """Returns whether null is a value of this key. For other keys it means the default, as in DeepSpeed."""
    if key.effect is Effect.fixed:
        return False
    try:
        key.convert(None)
    except ValueError:
        return False
    return True


def nearest(name: str, *, known: Iterable[str]) -> list[str]:
    """Returns the known name most similar to `name`, if there is one."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not near:  # `enable` for `enabled`, `auto_ep_size` for `autoep_size`
        plain = {other.replace("_", ""): other for other in known}
        near = [plain[match] for match in difflib.get_close_matches(name.replace("_", ""), plain, n=1, cutoff=0.6)]
    return near


def shown(value: object) -> str:
    """Formats a value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Conversions


def anything(value: object) -> object:
    """Returns the value unchanged."""
    return value


def boolean(value: object) -> bool:
    """Converts true or false. Raises ValueError for all else."""
    if isinstance(value, bool):
        return value
    raise ValueError("must be true or false")


def number(value: object) -> float:
    """Converts a number, also from a text like "1e-8". Raises ValueError for all else, for NaN, and outside the range of a 64-bit
    float.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        raise ValueError("must be a number that a 64-bit float holds")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
        return float(value)
    if isinstance(value, str) and value.isascii():  # YAML and hand-written files may have 1e-8 as text
        try:
            return number(float(value))
        except ValueError:
            pass
    raise ValueError("must be a number")


def at_least(low: float, *, high: float | None = None) -> Convert:
    """Returns a conversion for numbers in this range, which kernels read in float32."""
    return within(Range(low=low, high=high, float32=True))


def within(allowed: Range) -> Convert:
    """Returns a conversion for numbers in a range."""

    def convert(value: object) -> float:
        if reason := allowed.fault(number(value)):
            raise ValueError(reason)
        return number(value)

    return convert


def whole_number(low: int = 0, *, high: int = INT64_MAX) -> Convert:
    """Returns a conversion for whole numbers from `low` to `high`, including `5e8`. Raises ValueError for all else."""

    def convert(value: object) -> int:
        plain = number(value)
        exact = value if isinstance(value, int) else int(plain) if plain.is_integer() else low - 1
        if not low <= exact <= high:
            upper = "" if high == INT64_MAX and exact < low else f" and at most {high}"
            raise ValueError(f"must be a whole number, {low} or more{upper}")
        return exact

    return convert


def text(value: object) -> str:
    """Converts a text. Raises ValueError for all else."""
    if isinstance(value, str):
        return value
    raise ValueError("must be a text")


def texts(value: object) -> tuple[str, ...]:
    """Converts a list of texts. Raises ValueError for all else."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a list of texts")


def one_or_more_texts(value: object) -> tuple[str, ...]:
    """Converts a text or a list of texts to the different texts. Raises ValueError for all else."""
    return tuple(dict.fromkeys([value] if isinstance(value, str) else texts(value)))


def one_of(*words: str) -> Convert:
    """Returns a conversion that accepts one of these words."""

    def convert(value: object) -> str:
        if value in words:
            return value
        near = did_you_mean(nearest(value, known=words)) if isinstance(value, str) else ""
        raise ValueError(f"must be one of {', '.join(words)}{near}")

    return convert


def optional(convert: Convert) -> Convert:
    """Returns a conversion that also accepts null."""
    return lambda value: None if value is None else convert(value)


class DeepSpeedConfigError(ValueError):
    """All faults of a configuration, one line each in `faults`."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        head = "the DeepSpeed configuration is refused:\n  " if len(faults) > 1 else ""
        super().__init__(head + "\n  ".join(faults))

    def __reduce__(self) -> tuple:
        return DeepSpeedConfigError, (self.faults,)
