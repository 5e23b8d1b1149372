"""Reads a configuration from a dict, a file of JSON or Hjson, or base64 of such a text."""

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping

from ztk.deepspeed.config.hjson import parse_hjson
from ztk.deepspeed.config.keys import DeepSpeedConfigError, Findings

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


def read_source(config: object, *, findings: Findings | None = None) -> dict:
    """Returns the configuration as a new dict.

    config: a dict, the path of a file, or urlsafe base64 of its text. The text may be JSON with comments (//, # and /* */) and trailing
    commas, or Hjson, which adds a note to `findings`. Raises DeepSpeedConfigError if it is none of these.
    """
    if isinstance(config, Mapping):
        if faults := list(_key_faults(config)):
            raise DeepSpeedConfigError(faults)
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise DeepSpeedConfigError([f"config={config!r:.80}: must be a dict, a path, or base64 of JSON"])
    if os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            return parse_json(file.read(), where=str(config), findings=findings)
    decoded = _base64(str(config))
    if decoded is None:
        raise DeepSpeedConfigError(
            [f"config={str(config)!r:.200}: there is no such file, and it is not base64 of JSON"]
        )
    return parse_json(decoded, where="the base64 text", findings=findings)


def _key_faults(values: Mapping, *, path: str = "") -> Iterator[str]:
    """Yields one line per key, at any depth, that is not a text."""
    for key, value in values.items():
        if not isinstance(key, str):
            yield f"{path}{key!r}: a key must be a text, and this is of type {type(key).__name__}; put it in quotes, or leave it out"
        elif isinstance(value, Mapping):
            yield from _key_faults(value, path=f"{path}{key}.")


def parse_json(source: str, *, where: str, findings: Findings | None = None) -> dict:
    """Parses JSON with comments, or Hjson. Raises DeepSpeedConfigError with line and column, and for duplicate keys."""
    plain = _TOKEN.sub(lambda m: m[0] if m[0].startswith('"') else re.sub(r"[^\n]", " ", m[0]), source)
    plain = _TRAILING_COMMA.sub(lambda m: m[1] or " ", plain)
    doubled: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict:
        names = [name for name, _ in items]
        doubled.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(items)

    try:
        value = json.loads(plain, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        value = _hjson(source, where=where, error=error)
        if findings is not None:
            findings.notes.append(f"{where}: is read as Hjson; line {error.lineno}, column {error.colno} is not JSON")
    if doubled:
        raise DeepSpeedConfigError([f"{where}: {name} is given twice; keep one" for name in doubled])
    if not isinstance(value, dict):
        raise DeepSpeedConfigError([f"{where}: must hold an object {{...}}, not {type(value).__name__}"])
    return value


def _hjson(source: str, *, where: str, error: json.JSONDecodeError) -> object:
    """Parses Hjson. error: the error of the JSON parser, raised if Hjson fails too."""
    try:
        return parse_hjson(source)
    except ValueError as reason:
        faults = [f"{where}, line {error.lineno}, column {error.colno}: {error.msg}"]
        swallowed = _swallowed(source)
        if swallowed:
            faults = [
                f"{where}, line {swallowed[0]}: the comment {swallowed[1]} runs to the end of its line, closing braces "
                "included; begin a new line after its last word"
            ]
        elif (
            "given twice" in str(reason) or error.doc[: error.pos].isspace() or error.pos == 0
        ):  # without a brace, the author meant Hjson
            faults = [f"{where}, {reason}"]
        raise DeepSpeedConfigError(faults) from None


def _swallowed(source: str) -> tuple[int, str] | None:
    """Finds a comment that swallows keys and closing braces, as in a file that lost its line ends. Returns its line and beginning."""
    for found in _TOKEN.finditer(source):
        if found[0].startswith(("//", "#")) and "}" in found[0] and '"' in found[0]:
            return source.count("\n", 0, found.start()) + 1, repr(found[0][:30])
    return None


def _base64(word: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(word.encode()).decode()
    except (binascii.Error, UnicodeError):
        return None
    return decoded if decoded.lstrip().startswith(("{", "/", "#")) else None
