"""Answers in the format of OpenAI's Responses interface: complete, and as typed events."""

import json
import uuid
from typing import Any

from ztk.serve.answers import Shape
from ztk.serve.bodies import Asked
from ztk.serve.loop import Job
from ztk.serve.models import Tokenizer
from ztk.serve.replies import Reply
from ztk.serve.responses import Turn, are_arguments
from ztk.serve.stored import Stored
from ztk.serve.tools import Format

_Item = dict[str, Any]


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
        """stored: receives the conversation with its answer. format: of tool calls."""
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
        whole = self._whole(chat, output=self._events.output)
        return b"".join((*events, self._events.written(whole["status"], response=whole)))

    def failing(self, message: str, *, is_by_request: bool = False) -> bytes:
        error = {"code": "invalid_prompt" if is_by_request else "server_error", "message": message}
        return self._events.written("failed", response=self._response(status="failed") | {"error": error})

    def body(self) -> bytes:
        self.take_kept()
        chat = self.complete()
        message = chat["choices"][0]["message"]
        text, calls = message["content"] or "", message.get("tool_calls", [])
        output = [_message() | {"content": [_part(text)]}] if text.strip() or not calls else []
        output += [
            _function_call(call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in calls
        ]
        ended = [item | {"status": "completed"} for item in output]
        ended[-1]["status"] = _status(chat)
        return json.dumps(self._whole(chat, output=ended)).encode()

    def _whole(self, chat: dict[str, Any], *, output: list[_Item]) -> dict[str, Any]:
        """Returns the response with its output and token counts, and stores its conversation."""
        if self._turn.stores:
            self._stored.keep(self.shape.id, messages=(*self._turn.conversation, _kept(chat["choices"][0]["message"])))
        usage, status = chat["usage"], _status(chat)
        return self._response(status=status) | {
            "output": output,
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
            events = self._begun(_function_call(call["id"], name=function["name"], arguments=""))
            self._call, self._space = call["index"], ""
        if text := function.get("arguments"):
            self._pieces.append(text)
            events.append(self.written("function_call_arguments.delta", **self._where, delta=text))
        return events

    def closed(self, *, status: str) -> list[bytes]:
        """Ends the last item, or an empty message if there is none. status: of the item."""
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


def _function_call(call: str, *, name: str, arguments: str) -> _Item:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call,
        "name": name,
        "arguments": arguments,
        "status": "in_progress",
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
