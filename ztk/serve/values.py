"""Reads values of a request's fields with type checks."""

import json
import re
import reprlib
from collections.abc import Iterable
from typing import Any, Self

MANY = 1024  # tokens that a field may name, and characters of a text in it
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 2, 60, 40, 60


class BadRequest(ValueError):
    """A rejected or failed request. param: the field. status, code, headers: the response's."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.headers = param, status, code, headers

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Parts(str):
    """A text of several parts, joined by line feeds as vLLM joins them. parts: for templates that join them themselves."""

    parts: tuple[str, ...]

    def __new__(cls, parts: Iterable[str]) -> Self:
        texts = tuple(parts)
        found = super().__new__(cls, "\n".join(texts))
        found.parts = texts
        return found


def parsed(raw: bytes) -> dict[str, Any]:
    """Parses the JSON object and drops its nulls. Its texts are valid UTF-8: json.loads of bytes would accept half a surrogate pair.

    Raises:
        BadRequest: not a JSON object, or half a surrogate pair.
    """
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is no JSON that can be read: its lists and objects are nested too deeply") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if b"\\u" in raw:
        for name, value in body.items():
            if _HALF_PAIR.search(json.dumps([name, value], ensure_ascii=False)):  # as deeply nested as `body`
                raise BadRequest(
                    f"{shown(name)} has half of a surrogate pair, such as \\ud83d, which is no character: send UTF-8, or both halves",
                    param=shown(name),
                )
    return {name: value for name, value in body.items() if value is not None}


def shown(value: object) -> str:
    """Formats a value for a message or the log: short, in printable characters of every encoding."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    short = text if len(text) <= 80 else f"{text[:60]}..."
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in short)


def flag(body: dict, *, name: str, usual: bool = False) -> bool:
    """Returns true or false. Raises BadRequest for another value."""
    value = body.get(name, usual)
    if not isinstance(value, bool):
        raise BadRequest(f"{name}={_SHORT.repr(value)}: must be true or false", param=name)
    return value


def choice(body: dict, *, name: str, of: tuple[str, ...]) -> str:
    """Returns one of some words, by default the first. Raises BadRequest for another value."""
    value = body.get(name, of[0])
    if value not in of:
        raise BadRequest(f"{name}={shown(value)}: must be {' or '.join(of)}", param=name)
    return value


def number(body: dict, *, name: str, kind: type, usual: Any = None) -> Any:
    """Returns an int or a float; `usual` if the body has none. Raises BadRequest for another value."""
    value = body.get(name)
    if value is None:
        return usual
    good = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if not good or (name.startswith("max_") and value < 0):
        asked = "a number" if kind is float else "an integer"
        raise BadRequest(f"{name}={_SHORT.repr(value)}: must be {asked}", param=name)
    try:
        return kind(value)
    except OverflowError:
        raise BadRequest(f"{name}={_SHORT.repr(value)}: is too large", param=name) from None


def thing(body: dict, *, name: str) -> dict[str, Any]:
    """Returns an object; empty if the body has none. Raises BadRequest for another value."""
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    return value


def token_list(body: dict, *, name: str, most: int = MANY) -> tuple[int, ...]:
    """Returns token ids; none if the body has none. Raises BadRequest for other values, or for too many."""
    found = body.get(name, [])
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise BadRequest(f"{name} must be a list of token ids", param=name)
    if len(found) > most:
        raise BadRequest(f"{name} may have {most} tokens at most, and has {len(found)}", param=name)
    return tuple(found)


def text_list(body: dict, *, name: str, most: int) -> tuple[str, ...]:
    """Returns one text or a list of texts, none of them empty. Raises BadRequest for other values, or for too many."""
    found = body.get(name, [])
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise BadRequest(f"{name} must be a text or a list of texts", param=name)
    if len(found) > most or any(len(text) > MANY for text in found):
        raise BadRequest(
            f"{name} may have {most} texts of {MANY} characters at most: send fewer or shorter ones", param=name
        )
    return tuple(found)


def joined_text(content: object, *, name: str, kinds: tuple[str, ...]) -> str:
    """Returns a content that is a text, or the texts of its parts. kinds: types of a part that have a text; errors name the first.

    Raises:
        BadRequest: another value, or a part of another type.
    """
    param = name.partition("[")[0]
    example = f'{{"type": "{kinds[0]}", "text": ...}}'
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{name} must be a text or a list of {example}", param=param)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise BadRequest(
                f"{name} has a part of type {shown(kind)}, and this server reads texts: send {example}", param=param
            )
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{name} has a part whose text is no text", param=param)
    return Parts(part["text"] for part in content)
