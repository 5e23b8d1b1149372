"""Reads a configuration from a dict, a file of JSON or Hjson, or base64 of such a text.

Hjson (https://hjson.github.io/syntax.html) is the format of DeepSpeed's files: JSON with comments, in which outer braces, commas at line ends,
and quotes around keys and one-line texts are optional, and ''' encloses a text of several lines.
"""

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping

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


_SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_BLANK = re.compile(r"(?:[ \t\r]|/\*.*?\*/)*(?:#[^\n]*|//[^\n]*)?", re.DOTALL)  # to the end of a line
_KEY = re.compile(r"[^\s,:\[\]{}]+")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')
_WORD = re.compile(
    r"(true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)[ \t\r]*(?=$|[,\]}\n]|#|//|/\*)"
)
_PUNCTUATION = "{}[],:"


def parse_hjson(source: str) -> object:
    """Returns the value of an Hjson text. Raises ValueError with line and column, and for duplicate keys."""
    return _Parser(source).root()


class _Parser:
    def __init__(self, source: str) -> None:
        self._source, self._at = source, 0

    def root(self) -> object:
        self._skip()
        if not self._next():
            raise self._error("the text is empty")
        value = self._value() if self._next() in ("{", "[") else self._members(end="")
        self._skip()
        if self._next():
            raise self._error("expected nothing after the end of the configuration")
        return value

    def _value(self) -> object:
        if self._next() == "{":
            self._at += 1
            return self._members(end="}")
        if self._next() == "[":
            self._at += 1
            return self._items()
        if self._source.startswith("'''", self._at):
            return self._lines()
        if quoted := _QUOTED.match(self._source, self._at):
            self._at = quoted.end()
            return self._unquoted(quoted[0])
        if word := _WORD.match(self._source, self._at):
            self._at = word.end()
            return json.loads(word[1])
        if self._next() in _PUNCTUATION or self._next() in "\"'":
            raise self._error("expected a value")
        line = self._source[self._at :].partition("\n")[0]
        self._at += len(line)
        return line.strip()

    def _members(self, *, end: str) -> dict:
        values: dict = {}
        while not self._ends(end):
            key = self._key()
            if key in values:
                raise self._error(f"{key} is given twice; keep one")
            self._skip()
            if self._next() != ":":
                raise self._error(f"expected : after {key}")
            self._at += 1
            self._skip()
            values[key] = self._value()
            self._separate(end)
        return values

    def _items(self) -> list:
        items = []
        while not self._ends("]"):
            items.append(self._value())
            self._separate("]")
        return items

    def _key(self) -> str:
        if quoted := _QUOTED.match(self._source, self._at):
            self._at = quoted.end()
            return self._unquoted(quoted[0])
        plain = _KEY.match(self._source, self._at)
        if plain is None:
            raise self._error("expected a key")
        self._at = plain.end()
        return plain[0]

    def _ends(self, end: str) -> bool:
        self._skip()
        if self._next() != end:
            if not self._next():
                raise self._error(f"expected {end} before the end of the text")
            return False
        self._at += len(end)
        return True

    def _separate(self, end: str) -> None:
        """Skips a comma or line end, or stops at the end of the surrounding object or list."""
        # pyrefly: ignore[missing-attribute]  # the pattern always matches
        self._at = _BLANK.match(self._source, self._at).end()
        if self._next() == ",":
            self._at += 1
        elif self._next() not in ("\n", "", end):
            raise self._error("expected a comma or the end of the line")

    def _lines(self) -> str:
        end = self._source.find("'''", self._at + 3)
        if end < 0:
            raise self._error("''' has no end")
        start = self._source.rfind("\n", 0, self._at) + 1
        margin = re.compile(rf"^[ \t]{{0,{self._at - start}}}", re.MULTILINE)
        text = re.sub(r"^[ \t]*\n", "", self._source[self._at + 3 : end])
        self._at = end + 3
        return re.sub(r"\n[ \t]*$", "", margin.sub("", text))

    def _unquoted(self, quoted: str) -> str:
        if quoted[0] == "'":
            inner = re.sub(r"\\'|\"", lambda found: "'" if found[0] == "\\'" else '\\"', quoted[1:-1])
            quoted = f'"{inner}"'
        try:
            return json.loads(quoted)
        except ValueError:
            raise self._error(f"{quoted} is no text") from None

    def _skip(self) -> None:
        # pyrefly: ignore[missing-attribute]  # the pattern always matches
        self._at = _SPACE.match(self._source, self._at).end()

    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _error(self, reason: str) -> ValueError:
        line = self._source.count("\n", 0, self._at) + 1
        column = self._at - self._source.rfind("\n", 0, self._at)
        return ValueError(f"line {line}, column {column}: {reason}")
