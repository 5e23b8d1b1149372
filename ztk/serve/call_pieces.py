"""Calls of tools in pieces, as a stream has them: the name first, then the text of the arguments while the model writes it."""

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
        """In OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPiece:
    """The beginning of a call, with its name, or more text of the last one's arguments."""

    arguments: str = ""
    name: str | None = None
    id: str | None = None

    def written(self, *, index: int) -> dict[str, Any]:
        """In OpenAI's form for streams. index: the call's."""
        function = {} if self.name is None else {"name": self.name}
        head = {"index": index} if self.id is None else {"index": index, "id": self.id, "type": "function"}
        return head | {"function": function | {"arguments": self.arguments}}


def begun(name: str, *, arguments: str = "") -> CallPiece:
    """The first piece of a new call."""
    return CallPiece(name=name, arguments=arguments, id=f"call_{uuid.uuid4().hex[:24]}")


def with_pieces(calls: list[Call], *, pieces: list[CallPiece]) -> list[Call]:
    """The calls after more pieces."""
    found = list(calls)
    for piece in pieces:
        if piece.id is not None and piece.name is not None:
            found.append(Call(id=piece.id, name=piece.name, arguments=piece.arguments))
        else:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.arguments)
    return found


class Scan:
    """Follows calls in a text that grows, from a mark or an opening bracket on. A call is certain when its name and the first bracket of its
    arguments are there; one that is written otherwise, with the arguments first for example, is left to whoever reads the complete text.

    mark: of the format. has_names: calls may be NAME{...}. count: calls so far.
    """

    def __init__(self, *, mark: str, has_names: bool) -> None:
        self._mark, self._has_names, self.count = mark, has_names, 0
        self._at = 0  # what is before it in the text was read
        self._is_open = self._is_text = self._is_escaped = (
            False  # within a call; within a text of its JSON; after a backslash
        )
        self._depth, self._outer = 0, 0  # open brackets of the call, and those around its arguments
        self._is_read = False  # the arguments have ended

    def push(self, text: str, *, most: int) -> list[CallPiece]:
        """The pieces that are new in the text so far. most: calls that are returned."""
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

    def _name(self, text: str) -> str | None:
        """The name of the call that begins next; `_at` is then at its arguments. None: none begins for certain."""
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
        """The arguments' part of the text from `_at` on, which is read to the end of the call."""
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
