"""Tools of a chat: how they are asked for, shown to the model, written by a grammar, and found in its answer.

A format is how a family of models writes calls: hermes (also Qwen's), llama3 or mistral.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ztk.core.policies.inference import ToolFormat as Format
from ztk.serve.call_pieces import CallPiece, Scan, begun
from ztk.serve.structured import JSON_OPTIONS, Structure, check_size
from ztk.serve.values import BadRequest, flag, shown

_TOOLS, _NAME = 128, 64  # of a request; characters of a name
_CALLS = 16  # of one answer that a grammar writes
_MANY = 1 << 16  # calls of an answer, more than it has tokens for


MARKS = {Format.hermes: "<tool_call>", Format.llama3: "<|python_tag|>", Format.mistral: "[TOOL_CALLS]"}
_END = "</tool_call>"  # of hermes
_ARGUMENTS = {Format.hermes: "arguments", Format.llama3: "parameters", Format.mistral: "arguments"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The tools of a request. functions: by name, their parameters. named: the one that must be called. required: at least one must
    be. several: an answer may have more than one call."""

    given: tuple[dict[str, Any], ...]
    functions: Mapping[str, dict[str, Any]]
    named: str | None = None
    required: bool = False
    several: bool = True


def read_tools(body: dict) -> Tools | None:
    """Returns None where the answer is text. Raises BadRequest for tools or a choice of another form."""
    given, choice = body.get("tools", []), body.get("tool_choice", "auto")
    several = flag(body, name="parallel_tool_calls", usual=True)
    if not isinstance(given, list) or len(given) > _TOOLS:
        raise BadRequest(f"tools must be a list of {_TOOLS} functions at most", param="tools")
    functions = dict(_function(tool, number=number) for number, tool in enumerate(given))
    try:
        check_size(json.dumps(given), param="tools")
    except RecursionError:
        raise BadRequest("tools are nested too deeply", param="tools") from None
    named = _named(choice)
    if named is not None and named not in functions:
        raise BadRequest(f"tool_choice names {shown(named)}, which is not among tools", param="tool_choice")
    if choice == "required" and not functions:
        raise BadRequest("tool_choice=required goes with tools: send them", param="tool_choice")
    if choice == "none" or not functions:
        return None
    return Tools(given=tuple(given), functions=functions, named=named, required=choice == "required", several=several)


def _named(choice: object) -> str | None:
    if choice in ("none", "auto", "required"):
        return None
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequest(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return name


def _function(tool: object, *, number: int) -> tuple[str, dict[str, Any]]:
    """Name and parameters."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    parameters = (function.get("parameters") or {}) if isinstance(function, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= _NAME or not isinstance(parameters, dict):
        raise BadRequest(
            f'tools[{number}] must be {{"type": "function", "function": {{"name": ..., "parameters": a JSON schema}}}} with a name of {_NAME} '
            "characters at most",
            param="tools",
        )
    return name, parameters


def format_of(template: str | None) -> Format:
    """By the words of a chat template; hermes where it has none of a format."""
    text = template or ""
    if "[TOOL_CALLS]" in text:
        return Format.mistral
    return Format.llama3 if "<|python_tag|>" in text or '"parameters"' in text else Format.hermes


def told(messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template without tools: these in a system message, calls and results as texts, in the format hermes."""
    found = [_as_text(message) for message in messages]
    if not tools:
        return found
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions, whose signatures are within <tools></tools>:\n<tools>\n{listed}\n</tools>\nFor each call write a JSON "
        f'object with its name and arguments:\n<tool_call>\n{{"name": "NAME", "arguments": {{}}}}\n</tool_call>'
    )
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{text}"}, *found[1:]]
    return [{"role": "system", "content": text}, *found]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Role and content alone."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    content = "\n".join([*([message["content"]] if message["content"] or not calls else []), *calls])
    return {"role": message["role"], "content": content}


def call_structure(tools: Tools, *, format: Format, special: Mapping[int, str]) -> Structure:
    """A grammar of answers that make the required calls. special: of the tokenizer, whose tokens a grammar names by number."""
    names = [tools.named] if tools.named is not None else list(tools.functions)
    key = _ARGUMENTS[format]
    root = "#/items" if format == Format.mistral else "#"
    one = {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    key: {"type": "object"}
                    | _moved(tools.functions[name], to=f"{root}/anyOf/{number}/properties/{key}"),
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            for number, name in enumerate(names)
        ]
    }
    several = tools.several and tools.named is None
    if format == Format.mistral:
        calls = {"type": "array", "items": one, "minItems": 1, "maxItems": _CALLS if several else 1}
        token = next((number for number, text in special.items() if text == MARKS[format]), None)
        mark = json.dumps(MARKS[format]) if token is None else f"<[{token}]>"
        return _lark(f"start: {mark} calls\ncalls: {_json(calls)}")
    if format == Format.llama3:
        return _lark(f"start: call\ncall: {_json(one)}")
    more = f' ("\\n" call){{0,{_CALLS - 1}}}' if several else ""
    return _lark(f'start: call{more}\ncall: "<tool_call>\\n" body "\\n</tool_call>"\nbody: {_json(one)}')


def _moved(schema: Any, *, to: str) -> Any:
    """A schema whose references to its own parts are right where it is a part itself, at the pointer `to`."""
    if isinstance(schema, list):
        return [_moved(part, to=to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _moved(part, to=to) for name, part in schema.items()}
    if isinstance(own := schema.get("$ref"), str) and own.startswith("#"):
        found["$ref"] = to + own.removeprefix("#")
    return found


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": JSON_OPTIONS})


def _lark(text: str) -> Structure:
    return Structure(kind="lark", text=text, param="tools")


class CallStream:
    """Finds calls in a text that comes piece by piece. Text that may be the beginning of a call waits until that is decided.

    in_pieces: a call begins when its name is there, and its arguments follow as they are written; otherwise it comes when it is complete.
    """

    def __init__(self, format: Format, *, tools: Tools, in_pieces: bool = False) -> None:
        self._format, self._mark, self._in_pieces = format, MARKS[format], in_pieces
        self._most = _MANY if tools.several else 1
        self._waiting, self._is_call, self._has_text, self._is_after = "", False, False, False
        self._scan = self._new_scan()
        self.count = 0

    def push(self, piece: str) -> tuple[str, list[CallPiece]]:
        """Text and pieces of calls that are certain after one more piece of text."""
        self._waiting += piece
        text, calls = "", []
        while self._waiting:
            if not self._is_call:
                before, found = self._begun()
                text += before
                if not found:
                    break
                self._is_call = True
            inside, end, rest = self._waiting.partition(_END)
            if self._format != Format.hermes or not end:
                calls += self._followed(self._waiting)
                break
            own, has_calls = self._completed(inside)
            text += "" if has_calls else inside + end
            calls += own
            self._waiting, self._is_call, self._is_after = rest, False, has_calls
        self._has_text |= bool(text.strip())
        return text, calls

    def finish(self) -> tuple[str, list[CallPiece]]:
        """The pending text, at the end of the answer."""
        rest, self._waiting = self._waiting, ""
        pieces, has_calls = self._completed(rest) if self._is_call else ([], False)
        return "" if has_calls else rest, pieces

    def _followed(self, region: str) -> list[CallPiece]:
        """New pieces of a text that begins with a mark or an object and goes on."""
        if not self._in_pieces:
            return []
        return self._scan.push(region, most=self._most - self.count)

    def _completed(self, region: str) -> tuple[list[CallPiece], bool]:
        """The last pieces of such a text, and whether it has calls. Calls that did not come in pieces come in one."""
        pieces = self._followed(region)
        followed, self._scan = self._scan.count, self._new_scan()
        found = self._calls(region)
        left = max(0, self._most - self.count - followed)
        self.count += max(followed, len(found))
        return [*pieces, *found[followed:][:left]], bool(found or followed)

    def _new_scan(self) -> Scan:
        return Scan(mark=self._mark, has_names=self._format == Format.mistral)

    def _begun(self) -> tuple[str, bool]:
        """Text before a call, and whether one begins; `_waiting` is then from there on, its mark included."""
        if self._is_after:  # white space after a call is no text
            self._waiting = self._waiting.lstrip()
            self._is_after = not self._waiting
        place = self._waiting.find(self._mark)
        if self._format == Format.llama3 and not self._has_text and not self.count:
            start = self._waiting.lstrip()
            if start.startswith("{"):
                self._waiting = start
                return "", True
            if not start:
                return "", False
        if place >= 0:
            before, self._waiting = self._waiting[:place], self._waiting[place:]
            return before, True
        keep = next(
            (size for size in range(min(len(self._waiting), len(self._mark) - 1), 0, -1)
             if self._mark.startswith(self._waiting[-size:])), 0
        )  # fmt: skip
        cut = len(self._waiting) - keep
        before, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return before, False

    def _calls(self, region: str) -> list[CallPiece]:
        """The calls in a text that begins with a mark or an object; none where it has another form."""
        text = region.replace(self._mark, "", 1).strip() if region.startswith(self._mark) else region.strip()
        key, found, reader = _ARGUMENTS[self._format], [], json.JSONDecoder()
        try:
            while text:
                name = ""
                if self._format == Format.mistral and text[0] not in "[{":  # NAME{...} or NAME[ARGS]{...}
                    name, _, text = text.partition("{")
                    name, text = name.removesuffix("[ARGS]").strip(), "{" + text
                value, end = reader.raw_decode(text)
                text = text[end:].lstrip(" \n\r\t;,").removeprefix(self._mark).lstrip()
                values = value if isinstance(value, list) else [value]
                found += [_call({"name": name, key: one} if name else one, key=key) for one in values]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        return found


def _call(value: dict[str, Any], *, key: str) -> CallPiece:
    """Raises KeyError or TypeError for another object."""
    name, arguments = value["name"], value.get(key, value.get("arguments", value.get("parameters", {})))
    if not isinstance(name, str) or not name:
        raise TypeError(name)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return begun(name, arguments=text)
