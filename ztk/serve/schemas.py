"""JSON schemas of answers, before llguidance compiles them.

[Note: Schemas]
llguidance refuses most keywords that it does not keep. This module refuses the rest: numbers that it would replace by others (it reads them
as doubles, not always the nearest), keywords that it takes for annotations, and references that only lead to themselves. An object has
no properties but those that its schema names, unless the schema has `additionalProperties`: so do xgrammar and vLLM, whose default it is, and
small models would otherwise invent properties until the limit. Arrays with `prefixItems` end with these in the same way.
"""

import copy
import functools
import importlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from ztk.serve.values import BadRequest, shown

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_JOINS = ("anyOf", "oneOf", "allOf")  # their schemas apply to the same value as the schema around them
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_EXACT = 1 << 53  # integers up to it are doubles
_NOT_KEPT = {  # llguidance reads them as annotations
    "nullable": 'add "null" to type',
    "divisibleBy": "send multipleOf",
    "disallow": "name the types that are allowed",
    "extends": "send allOf",
    **dict.fromkeys(("contentEncoding", "contentMediaType", "contentSchema"), "send pattern, or leave it out"),
    "x-guidance": "it is an option of the library: leave it out",
}


def library() -> Any:
    """Returns llguidance. Raises BadRequest if it is not installed."""
    try:
        importlib.import_module("llguidance._tokenizer")
        return importlib.import_module("llguidance")
    except ImportError:
        raise BadRequest(
            'the server has no library for grammars: pip install "ztk[serve]" there, or leave the format out',
            status=501,
        ) from None


def prepared(schema: dict[str, Any], *, param: str) -> dict[str, Any]:
    """Returns the schema with closed objects: see [Note: Schemas]. Raises BadRequest for one that would not be kept exactly."""
    for path, part in _walk(schema, path="#"):
        for reason in _faults(part):
            raise BadRequest(f"{param}: {path}{reason}", param=param)
    if not _has_answer(schema):
        raise BadRequest(
            f"{param}: no finite answer matches it, because a $ref that must be followed leads to itself", param=param
        )
    return _closed(schema)


def check_embedded(text: str, *, param: str) -> None:
    """Raises the errors of `prepared` for schemas after %json in a grammar of Lark. The schemas stay unchanged."""
    for piece in text.split("%json")[1:]:
        try:
            found, _ = json.JSONDecoder().raw_decode(piece.lstrip())
        except (ValueError, RecursionError):
            continue  # the library's own error is better
        if isinstance(found, dict):
            prepared({name: value for name, value in found.items() if name != "x-guidance"}, param=param)


def _walk(schema: object, *, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each schema that is an object, with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for _, child, name in _children(schema):
        yield from _walk(child, path=f"{path}/{name}")


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yields keyword, schema and pointer of each schema inside of another one."""
    for keyword in _MAPS:
        if isinstance(found := schema.get(keyword), dict):
            for name, child in found.items():
                yield keyword, child, f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}"
    for keyword in _LISTS:
        if isinstance(found := schema.get(keyword), list):
            for number, child in enumerate(found):
                yield keyword, child, f"{keyword}/{number}"
    for keyword in _SINGLE:
        if isinstance(found := schema.get(keyword), dict):
            yield keyword, found, keyword


def _faults(schema: dict[str, Any]) -> Iterator[str]:
    """Yields the rest of a line for each constraint of one schema that would not be kept."""
    for name, advice in _NOT_KEPT.items():
        if name in schema and schema[name] is not False:
            yield f"/{name} is not supported: {advice}"
    for name in ("const", "enum", *_BOUNDS):
        for number in _numbers(schema.get(name)):
            if not _is_kept(number):
                yield (
                    f"/{name}: {shown(number)} would become another number in the grammar: use integers up to 2^53 and fewer digits, or a text"
                )
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "format" in schema and isinstance(kinds, list) and "string" not in kinds:
        yield f"/format={shown(schema['format'])} is not checked for a value that is no text: send minimum and maximum, or leave it out"
    required, least = schema.get("required"), schema.get("minProperties")
    if isinstance(required, bool):
        yield "/required must be a list of names, in the schema of the object around it"
    distinct = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > distinct + 1:
        yield f"/minProperties={least}: the names of further properties might be equal; name {least - 1} of them in required"


def _numbers(value: object) -> Iterator[int | float]:
    """Yields the numbers in a JSON value."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _is_kept(number: float) -> bool:
    return (isinstance(number, int) and abs(number) <= _EXACT) or _is_forced(json.dumps(number))


@functools.lru_cache(maxsize=4096)
def _is_forced(number: str) -> bool:
    """Whether a grammar of this number alone forces it."""
    llguidance = library()
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(f'{{"const": {number}}}')
        forced = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0).compute_ff_bytes()
        return json.loads(bytes(forced)) == json.loads(number)
    except ValueError:
        return False


# Answers that end


def _has_answer(root: dict[str, Any]) -> bool:
    """Whether a finite value matches a schema, as far as its references decide it."""
    references = {ref for _, part in _walk(root, path="#") if isinstance(ref := part.get("$ref"), str)}
    targets = {ref: _resolved(root, reference=ref) for ref in references}
    known = {ref for ref, target in targets.items() if target is None}  # not within the schema: llguidance decides
    while found := [ref for ref in references - known if _ends(targets[ref], known=known)]:
        known.update(found)
    return _ends(root, known=known)


def _ends(schema: Any, *, known: set[str]) -> bool:
    """known: references to schemas that a finite value matches."""
    if not isinstance(schema, dict):
        return schema is not False
    if isinstance(ref := schema.get("$ref"), str) and ref not in known:
        return False
    for name, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(parts := schema.get(name), list) and not combine(_ends(part, known=known) for part in parts):
            return False
    if "const" in schema or "enum" in schema:
        return True
    needed: list[Any] = []
    if schema.get("type") == "object" and isinstance(schema.get("required"), list):
        properties = schema.get("properties")
        needed = [
            properties[name] for name in schema["required"] if isinstance(properties, dict) and name in properties
        ]
    elif schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        first, rest = schema.get("prefixItems", []), schema.get("items")
        first, rest = (rest, schema.get("additionalItems")) if isinstance(rest, list) else (first, rest)
        needed = [
            *(first[:least] if isinstance(first, list) else ()),
            *([rest] if rest is not None and least > len(first) else ()),
        ]
    return all(_ends(part, known=known) for part in needed)


def _resolved(root: dict[str, Any], *, reference: str) -> Any:
    """Returns the schema at a pointer, or None if it is not in `root`."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


# Objects without further properties


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy whose objects and arrays end with what they name, except those that are one of several parts of a value."""
    root = copy.deepcopy(schema)
    parts = _parts_of_values(root)
    for _, one in _walk(root, path="#"):
        if id(one) in parts:
            continue
        properties, patterns = one.get("properties"), one.get("patternProperties")
        named = properties if isinstance(properties, dict) else {}
        required = one.get("required") if isinstance(one.get("required"), list) else []
        least = one.get("minProperties")
        fits = set(map(str, required)) <= named.keys() and not (isinstance(least, int) and least > len(named))
        if (isinstance(properties, dict) and fits) or isinstance(patterns, dict):
            one.setdefault("additionalProperties", False)
        first, least = one.get("prefixItems"), one.get("minItems")
        if isinstance(first, list) and not (isinstance(least, int) and least > len(first)):
            one.setdefault("items", False)
    return root


def _parts_of_values(root: dict[str, Any]) -> set[int]:
    """Returns the ids of schemas that apply to a value together with others, which may name further properties of it."""
    found: set[int] = set()
    left = [(part, False) for _, part in _walk(root, path="#")]
    while left:
        one, is_part = left.pop()
        if not isinstance(one, dict) or (is_part and id(one) in found):
            continue
        joins = [name for name in (*_JOINS, "$ref") if name in one]
        together = isinstance(one.get("allOf"), list) and len(one["allOf"]) > 1
        is_own = bool(joins) and ("properties" in one or "patternProperties" in one)
        if not (is_part or is_own or together or len(joins) > 1):
            continue
        found.add(id(one))
        left += [(child, True) for keyword, child, _ in _children(one) if keyword in _JOINS]
        if isinstance(ref := one.get("$ref"), str):
            left.append((_resolved(root, reference=ref), True))
    return found
