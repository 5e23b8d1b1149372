"""Converts requests of OpenAI's Responses interface to bodies of chats."""

import json
from dataclasses import dataclass
from typing import Any

from ztk.serve.stored import Stored
from ztk.serve.values import BadRequest, flag, number, shown, thing

_CHAT = "use /v1/chat/completions"
_LEAVE = "leave it out"
# Fields that would change an answer and are not supported, with the advice. Values that are false, zero or empty have no effect.
_UNDONE = {
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "send its text as input",
    "messages": "send them as input",
    "background": _LEAVE,
    "context_management": _LEAVE,
    "moderation": _LEAVE,
    "n": f"{_LEAVE}, or {_CHAT}",
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "echo"), _CHAT),
}
_OWN = ("input", "instructions", "text", "max_output_tokens", "previous_response_id", "store", "metadata", "truncation")
_TEXTS = ("input_text", "output_text", "text")
_FUNCTION = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request.

    body: of the chat with the same answer. conversation: its messages without instructions, which later requests may continue. echoed:
    fields that the response repeats. stores: whether to store the conversation.
    """

    body: dict[str, Any]
    conversation: tuple[dict[str, Any], ...]
    echoed: dict[str, Any]
    stores: bool


def read_turn(body: dict[str, Any], *, stored: Stored) -> Turn:
    """Parses one body, as returned by `parsed`. stored: conversations that it may continue.

    Raises:
        BadRequest: an input that is not a text, message, call or result of a call, an unknown previous response, or an unsupported field
            that would change the answer.
    """
    _check(body)
    earlier = stored.conversation(body["previous_response_id"]) if "previous_response_id" in body else ()
    conversation = (*earlier, *_messages(body.get("input")))
    text = thing(body, name="text")
    found = {name: value for name, value in body.items() if name not in _OWN}
    found["messages"] = [*_instructions(body), *conversation]
    if "max_output_tokens" in body:
        found["max_tokens"] = number(body, name="max_output_tokens", kind=int, usual=None)
    if text.get("format") is not None:
        found["response_format"] = _format(text["format"])
    if text.get("verbosity") is not None:
        found["verbosity"] = text["verbosity"]
    if "tools" in body:
        found["tools"] = _tools(body["tools"])
    stores = flag(body, name="store", usual=True)
    echoed = {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": thing(body, name="metadata"),
        "parallel_tool_calls": flag(body, name="parallel_tool_calls", usual=True),
        "previous_response_id": body.get("previous_response_id"),
        "store": stores,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "truncation": "disabled",
    }
    return Turn(body=found, conversation=conversation, echoed=echoed, stores=stores)


def _check(body: dict[str, Any]) -> None:
    """Raises BadRequest for an unsupported field that would change the answer."""
    for name, advice in _UNDONE.items():
        if body.get(name) not in (None, False, [], {}):
            raise BadRequest(f"{name} is not supported: {advice}", param=name)
    include = body.get("include")
    if isinstance(include, list) and "message.output_text.logprobs" in include:
        raise BadRequest(f"include has message.output_text.logprobs, which is not supported: {_CHAT}", param="include")
    if (truncation := body.get("truncation", "disabled")) != "disabled":
        raise BadRequest(f"truncation={shown(truncation)} is not supported: send a shorter input", param="truncation")


def _instructions(body: dict[str, Any]) -> list[dict[str, Any]]:
    text = body.get("instructions")
    if text is None:
        return []
    if not isinstance(text, str):
        raise BadRequest("instructions must be a text", param="instructions")
    return [{"role": "system", "content": text}]


def _messages(found: object) -> list[dict[str, Any]]:
    """Merges calls that follow an answer, or each other, into one message."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise BadRequest("input must be a text or a list of messages", param="input")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(found):
        name = f"input[{place}]"
        kind = item.get("type", "message") if isinstance(item, dict) else "no object"
        if kind == "message":
            messages.append(_message(item, name=name))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item, name=name))
        elif kind == "function_call_output":
            content = _text(item.get("output"), name=f"{name}.output")
            messages.append({"role": "tool", "content": content, "tool_call_id": _word(item, "call_id", name=name)})
        else:
            raise BadRequest(
                f"{name} is {shown(kind)}: send messages, function_call or function_call_output", param="input"
            )
    return messages


def _message(item: dict[str, Any], *, name: str) -> dict[str, Any]:
    return {"role": _word(item, "role", name=name), "content": _text(item.get("content"), name=f"{name}.content")}


def _call(item: dict[str, Any], *, name: str) -> dict[str, Any]:
    arguments = _word(item, "arguments", name=name)
    if not are_arguments(arguments):
        raise BadRequest(f"{name}.arguments must be the text of a JSON object", param="input")
    function = {"name": _word(item, "name", name=name), "arguments": arguments}
    return {"id": _word(item, "call_id", name=name), "type": "function", "function": function}


def are_arguments(text: str) -> bool:
    """Of a call: a JSON object, or nothing."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _word(item: dict[str, Any], field: str, *, name: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise BadRequest(f"{name}.{field} must be a text", param="input")
    return value


def _text(content: object, *, name: str) -> str:
    """Returns the text of a content, which is a text or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{name} must be a text or a list of input_text", param="input")
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "no object"
        if kind not in _TEXTS:
            raise BadRequest(f"{name} has {shown(kind)}, and this server reads texts: send input_text", param="input")
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{name} has a part whose text is no text", param="input")
        found.append(part["text"])
    return "".join(found)


def _tools(found: object) -> list[dict[str, Any]]:
    """Returns tools in the form of chats, in which the function is one level deeper."""
    if not isinstance(found, list):
        raise BadRequest("tools must be a list of functions", param="tools")
    for place, tool in enumerate(found):
        kind = tool.get("type") if isinstance(tool, dict) else "no object"
        if kind != "function":
            raise BadRequest(f"tools[{place}] is {shown(kind)}: send functions, whose calls you answer", param="tools")
        if not isinstance(tool.get("name"), str):
            raise BadRequest(
                f'tools[{place}] must be {{"type": "function", "name": ..., "parameters": a JSON schema}}',
                param="tools",
            )
    return [
        {"type": "function", "function": {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}}
        for tool in found
    ]


def _format(chosen: object) -> dict[str, Any]:
    """Returns `response_format` of a chat, whose schema is one level deeper."""
    if not isinstance(chosen, dict):
        raise BadRequest("text.format must be an object", param="text")
    if chosen.get("type") != "json_schema":
        return chosen
    return {"type": "json_schema", "json_schema": {name: value for name, value in chosen.items() if name != "type"}}
