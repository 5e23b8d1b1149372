"""Streams tool calls in pieces: the name first, then the text of the arguments while the model generates it."""

import re
import uuid
from dataclasses import dataclass, replace
from typing import Any

_HEADER = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAMED = re.compile(r"([^\s\[\]{},;\"]+)(?:\[ARGS\])?\s*(?=\{)")  # mistral's newer form
_BETWEEN = " \n\r\t;,"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call in an answer. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str

    def written(self) -> dict[str, Any]:
        """Returns the call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPiece:
    """The beginning of a call, with its name, or more text of the last call's arguments."""

    arguments: str = ""
    name: str | None = None
    id: str | None = None

    def written(self, *, index: int) -> dict[str, Any]:
        """Returns the piece in OpenAI's streaming format. index: number of the call."""
        function = {} if self.name is None else {"name": self.name}
        head = {"index": index} if self.id is None else {"index": index, "id": self.id, "type": "function"}
        return head | {"function": function | {"arguments": self.arguments}}


def begun(name: str, *, arguments: str = "") -> CallPiece:
    """Returns the first piece of a new call."""
    return CallPiece(name=name, arguments=arguments, id=f"call_{uuid.uuid4().hex[:24]}")


def with_pieces(calls: list[Call], *, pieces: list[CallPiece]) -> list[Call]:
    """Returns the calls after more pieces."""
    found = list(calls)
    for piece in pieces:
        if piece.id is not None and piece.name is not None:
            found.append(Call(id=piece.id, name=piece.name, arguments=piece.arguments))
        else:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.arguments)
    return found


class Scan:
    """Finds calls in a growing text, from a mark or an opening bracket on.

    A call is certain when its name and the first bracket of its arguments are complete. Calls in another form, for example with the
    arguments first, are left to a parser of the complete text.

    mark: of the format. has_names: calls may be NAME{...}. count: number of calls so far.
    """

    def __init__(self, *, mark: str, has_names: bool) -> None:
        self._mark, self._has_names, self.count = mark, has_names, 0
        self._at = 0  # the text before this index was read
        self._is_open = self._is_text = self._is_escaped = (
            False  # within a call; within a JSON string; after a backslash
        )
        self._depth, self._outer = 0, 0  # open brackets of the call, and those around its arguments
        self._is_read = False  # the arguments are complete

    def push(self, text: str, *, most: int) -> list[CallPiece]:
        """Returns the new pieces of the text so far. most: maximum number of calls."""
        found: list[CallPiece] = []
        while self._at < len(text):
            if self._is_open:
                piece = self._arguments(text)
                if piece and self.count <= most:
                    found.append(CallPiece(arguments=piece))
                continue
            name = self._name(text)
            if name is None:
                break
            self.count += 1
            if self.count <= most:
                found.append(begun(name))
        return found

    def rest(self, text: str) -> str:
        """Returns the text that follows the calls in a complete text, without separators and closing brackets."""
        return text[self._at :].lstrip(_BETWEEN + "]}")

    def _name(self, text: str) -> str | None:
        """Returns the name of the next call and moves `_at` to its arguments. None if no call is certain."""
        at = self._at
        while at < len(text):
            if text.startswith(self._mark, at):
                at += len(self._mark)
            elif text[at] in _BETWEEN or (self._has_names and text[at] in "[]"):
                at += 1
            else:
                break
        match, self._outer = _HEADER.match(text, at), 1
        if match is None and self._has_names:
            match, self._outer = _NAMED.match(text, at), 0
        if match is None:
            return None
        self._at, self._depth, self._is_open, self._is_read = match.end(), self._outer, True, False
        return match[1]

    def _arguments(self, text: str) -> str:
        """Returns the arguments' part of the text from `_at` on, which is read to the end of the call."""
        found = []
        while self._is_open and self._at < len(text):
            letter, before = text[self._at], self._depth
            self._read(letter)
            self._at += 1
            if not self._is_read:
                found.append(letter)
                self._is_read = before > self._outer == self._depth
            self._is_open = self._depth > 0
        return "".join(found)

    def _read(self, letter: str) -> None:
        if self._is_text:
            self._is_text = self._is_escaped or letter != '"'
            self._is_escaped = letter == "\\" and not self._is_escaped
        elif letter == '"':
            self._is_text = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
