"""Where a configuration comes from: a dict, a JSON file with or without comments, or base64 of one."""

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Mapping

from ztk.deepspeed.config.errors import DeepSpeedConfigError

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


def read_source(config: object) -> dict:
    """The configuration as a dict of its own.

    config: a dict, the path of a JSON file (comments //, # and /* */ and trailing commas are allowed), or urlsafe base64 of such a text.
    Raises DeepSpeedConfigError if it is none of these.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise DeepSpeedConfigError([f"config={config!r:.80}: must be a dict, a path, or base64 of JSON"])
    if os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            return parse_json(file.read(), where=str(config))
    decoded = _base64(str(config))
    if decoded is None:
        raise DeepSpeedConfigError(
            [f"config={str(config)!r:.200}: there is no such file, and it is not base64 of JSON"]
        )
    return parse_json(decoded, where="the base64 text")


def parse_json(source: str, *, where: str) -> dict:
    """JSON with comments. Raises DeepSpeedConfigError with line and column, and for a key given twice."""
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
        raise DeepSpeedConfigError([f"{where}, line {error.lineno}, column {error.colno}: {error.msg}"]) from None
    if doubled:
        raise DeepSpeedConfigError([f"{where}: {name} is given twice; keep one" for name in doubled])
    if not isinstance(value, dict):
        raise DeepSpeedConfigError([f"{where}: must hold an object {{...}}, not {type(value).__name__}"])
    return value


def _base64(word: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(word.encode()).decode()
    except (binascii.Error, UnicodeError):
        return None
    return decoded if decoded.lstrip().startswith(("{", "/", "#")) else None
