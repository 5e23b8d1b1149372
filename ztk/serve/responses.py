"""OpenAI's Responses interface: requests as bodies of chats, answers complete and as typed events, and stored conversations."""

import json
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ztk.serve.answers import Shape
from ztk.serve.bodies import Asked
from ztk.serve.loop import Job
from ztk.serve.replies import Reply
from ztk.serve.tokenizers import Tokenizer
from ztk.serve.tools import Format
from ztk.serve.values import BadRequest, flag, joined_text, number, shown, thing

_CONVERSATIONS, _CHARACTERS = 1024, 1 << 26
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
_Item = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request.

    body: body of the chat with the same answer. conversation: its messages without instructions, which later requests may continue. echoed:
    fields that the response repeats. stores: whether to store the conversation.
    """

    body: dict[str, Any]
    conversation: tuple[dict[str, Any], ...]
    echoed: dict[str, Any]
    stores: bool


class Stored:
    """The latest conversations, by the ids of their responses. The least recently used are dropped first."""

    def __init__(self, *, conversations: int = _CONVERSATIONS, characters: int = _CHARACTERS) -> None:
        """conversations, characters: limits of the store. Characters are counted in the messages' JSON."""
        self._most, self._characters = conversations, characters
        self._found: OrderedDict[str, str] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, response: str, *, messages: tuple[dict[str, Any], ...]) -> None:
        """Stores the conversation that ends with `response`."""
        text = json.dumps(messages)
        with self._lock:
            self._found[response] = text
            self._size += len(text)
            while len(self._found) > self._most or self._size > self._characters:
                self._size -= len(self._found.popitem(last=False)[1])

    def conversation(self, response: object) -> tuple[dict[str, Any], ...]:
        """Returns the messages of a conversation. Raises BadRequest for a response that is not stored."""
        with self._lock:
            text = self._found.get(response) if isinstance(response, str) else None
            if text is not None:
                self._found.move_to_end(response)
        if text is None:
            raise BadRequest(
                f"Previous response with id '{shown(response)}' not found: the server stores the last {self._most} conversations, unless "
                "they have store=false; send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return tuple(json.loads(text))


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
        found["max_tokens"] = number(body, name="max_output_tokens", kind=int)
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
            messages.append(_read_message(item, name=name))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item, name=name))
        elif kind == "function_call_output":
            content = joined_text(item.get("output"), name=f"{name}.output", kinds=_TEXTS)
            messages.append({"role": "tool", "content": content, "tool_call_id": _word(item, "call_id", name=name)})
        else:
            raise BadRequest(
                f"{name} is {shown(kind)}: send messages, function_call or function_call_output", param="input"
            )
    return messages


def _read_message(item: dict[str, Any], *, name: str) -> dict[str, Any]:
    content = joined_text(item.get("content"), name=f"{name}.content", kinds=_TEXTS)
    return {"role": _word(item, "role", name=name), "content": content}


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


class ResponseReply(Reply):
    """A `Reply` whose output is a list of items: a message with one text, and function calls."""

    def __init__(
        self,
        jobs: list[Job],
        *,
        asked: Asked,
        shape: Shape,
        tokenizer: Tokenizer,
        turn: Turn,
        stored: Stored,
        format: Format = Format.hermes,
    ) -> None:
        """stored: receives the conversation with its answer. format: format of tool calls."""
        super().__init__(jobs, asked=asked, shape=shape, tokenizer=tokenizer, format=format)
        self._turn, self._stored, self._events = turn, stored, _Events()

    def opening(self) -> bytes:
        response = self._response(status="in_progress")
        return b"".join(self._events.written(kind, response=response) for kind in ("created", "in_progress"))

    def written(self, chunks: list[dict]) -> bytes:
        """Returns chunks of a chat as events."""
        events = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                calls = choice["delta"].get("tool_calls", ())
                first = next((place for place, call in enumerate(calls) if "id" in call), len(calls))
                for call in calls[
                    :first
                ]:  # the rest of a call that began in an earlier chunk, before the text that follows it
                    events += self._events.of_call(call)
                events += self._events.of_text(choice["delta"].get("content") or "")
                for call in calls[first:]:
                    events += self._events.of_call(call)
        return b"".join(events)

    def closing(self) -> bytes:
        chat = self.complete()
        events = self._events.closed(status=_status(chat))
        whole = self._whole(chat)
        return b"".join((*events, self._events.written(whole["status"], response=whole)))

    def failing(self, error: BadRequest) -> bytes:
        written = {"code": "invalid_prompt" if error.status < 500 else "server_error", "message": str(error)}
        return self._events.written("failed", response=self._response(status="failed") | {"error": written})

    def body(self) -> bytes:
        self.take_kept()
        chat = self.complete()
        message = chat["choices"][0]["message"]
        self._events.of_text(message["content"] or "")
        for index, call in enumerate(message.get("tool_calls", [])):
            self._events.of_call(call | {"index": index})
        self._events.closed(status=_status(chat))
        return json.dumps(self._whole(chat)).encode()

    def _whole(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Returns the response with its output, whose events have ended, and token counts, and stores its conversation."""
        if self._turn.stores:
            self._stored.keep(self.shape.id, messages=(*self._turn.conversation, _kept(chat["choices"][0]["message"])))
        usage, status = chat["usage"], _status(chat)
        return self._response(status=status) | {
            "output": self._events.output,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, *, status: str) -> dict[str, Any]:
        sampling = self.asked.sampling
        return self._turn.echoed | {
            "id": self.shape.id,
            "object": "response",
            "created_at": self.shape.created,
            "status": status,
            "background": False,
            "model": self.shape.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None,
        }


class _Events:
    """Converts the pieces of a chat to the events of one stream.

    An item begins with its first piece and ends when another begins. White space before a call is dropped.
    """

    def __init__(self) -> None:
        self.output: list[_Item] = []  # completed items
        self._number = 0
        self._item: _Item | None = None
        self._pieces: list[str] = []  # of the item
        self._space = ""  # before the next item
        self._call: int | None = None  # the item's index among calls

    def written(self, kind: str, **fields: Any) -> bytes:
        """Returns one event."""
        event = {"type": f"response.{kind}", "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()

    def of_text(self, text: str) -> list[bytes]:
        """Returns events of a piece of text. White space outside a message is held back until the next piece."""
        self._space += text
        if not self._space or (not self._is_message and self._space.isspace()):
            return []
        return self._said()

    def of_call(self, call: dict[str, Any]) -> list[bytes]:
        """Returns events of one piece of a call; the first piece has the name."""
        function, events = call.get("function", {}), []
        if self._item is None or call["index"] != self._call:
            events = self._begun(_function_call(call["id"], name=function["name"]))
            self._call, self._space = call["index"], ""
        if text := function.get("arguments"):
            self._pieces.append(text)
            events.append(self.written("function_call_arguments.delta", **self._where, delta=text))
        return events

    def closed(self, *, status: str) -> list[bytes]:
        """Ends the last item, or an empty message if there is none. status: the item's."""
        events = [] if self.output or self._item else self._said()
        return [*events, *self._ended(status=status)]

    @property
    def _is_message(self) -> bool:
        return self._item is not None and self._item["type"] == "message"

    def _said(self) -> list[bytes]:
        """Returns the text held back, as a piece of a message."""
        events = [] if self._is_message else self._begun(_message())
        text, self._space = self._space, ""
        if text:
            self._pieces.append(text)
            events.append(self.written("output_text.delta", **self._where, content_index=0, delta=text, logprobs=[]))
        return events

    def _begun(self, item: _Item) -> list[bytes]:
        """Ends the item and begins another."""
        events = self._ended(status="completed")
        self._item, self._pieces, self._call = item, [], None
        events.append(self.written("output_item.added", output_index=len(self.output), item=item))
        if self._is_message:
            events.append(self.written("content_part.added", **self._where, content_index=0, part=_part("")))
        return events

    def _ended(self, *, status: str) -> list[bytes]:
        if self._item is None:
            return []
        text, where = "".join(self._pieces), self._where
        if self._is_message:
            item = self._item | {"status": status, "content": [_part(text)]}
            events = [
                self.written("output_text.done", **where, content_index=0, text=text, logprobs=[]),
                self.written("content_part.done", **where, content_index=0, part=_part(text)),
            ]
        else:
            item = self._item | {"status": status, "arguments": text}
            events = [self.written("function_call_arguments.done", **where, name=item["name"], arguments=text)]
        events.append(self.written("output_item.done", output_index=len(self.output), item=item))
        self.output.append(item)
        self._item = None
        return events

    @property
    def _where(self) -> dict[str, Any]:
        assert self._item is not None, "events of an item are written while it is there"
        return {"item_id": self._item["id"], "output_index": len(self.output)}


def _status(chat: dict[str, Any]) -> str:
    """Returns the status of the response to a chat."""
    return "incomplete" if chat["choices"][0]["finish_reason"] == "length" else "completed"


def _kept(message: dict[str, Any]) -> dict[str, Any]:
    """An answer as a part of its conversation: without a call that was cut off."""
    calls = [call for call in message.get("tool_calls", ()) if are_arguments(call["function"]["arguments"])]
    found = {"role": "assistant", "content": message["content"] or ""}
    return found | ({"tool_calls": calls} if calls else {})


def _message() -> _Item:
    name = f"msg_{uuid.uuid4().hex}"
    return {"id": name, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _function_call(call: str, *, name: str) -> _Item:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call,
        "name": name,
        "arguments": "",
        "status": "in_progress",
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
