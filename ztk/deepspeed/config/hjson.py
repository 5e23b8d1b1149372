"""Parses Hjson (https://hjson.github.io/syntax.html), the format of DeepSpeed's files: JSON with comments, in which outer braces, commas
at line ends, and quotes around keys and one-line texts are optional, and ''' encloses a text of several lines.
"""

import json
import re

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
