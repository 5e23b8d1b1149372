"""OpenAI's Responses interface for texts, by the machinery of chats: its requests become bodies of chats, and chunks of chats its events.

Nothing is stored: `previous_response_id` is refused, and a client sends the whole conversation as `input`.
"""

import json
import uuid
from typing import Any

from ztk.serve.answers import Shape
from ztk.serve.bodies import Asked
from ztk.serve.loop import Job
from ztk.serve.models import Tokenizer
from ztk.serve.replies import Reply
from ztk.serve.tools import Format
from ztk.serve.values import BadRequest, number, shown, thing

_UNDONE = {
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), "send the whole conversation as input"),
    **dict.fromkeys(("tools", "background", "n"), "leave it out, or use /v1/chat/completions"),
}
_PARTS = ("input_text", "output_text", "text")


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat that asks for the same answer. body: as `parsed` returns it.

    Raises:
        BadRequest: an input that is no text, or a field that would change the answer and is not there.
    """
    for name, advice in _UNDONE.items():
        if body.get(name) not in (None, False, []):
            raise BadRequest(f"{name} is not supported: {advice}", param=name)
    own = {"input", "instructions", "text", "messages", "max_output_tokens", "tool_choice", *_UNDONE}
    found = {name: value for name, value in body.items() if name not in own}
    found["messages"] = [*_instructions(body), *_messages(body.get("input"))]
    if "max_output_tokens" in body:
        found["max_tokens"] = number(body, name="max_output_tokens", kind=int, usual=None)
    chosen = thing(body, name="text").get("format")
    if chosen is not None:
        found["response_format"] = _format(chosen)
    return found


def _instructions(body: dict[str, Any]) -> list[dict[str, Any]]:
    text = body.get("instructions")
    if text is None:
        return []
    if not isinstance(text, str):
        raise BadRequest("instructions must be a text", param="instructions")
    return [{"role": "system", "content": text}]


def _messages(found: object) -> list[dict[str, Any]]:
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise BadRequest("input must be a text or a list of messages", param="input")
    return [_message(item, number=number) for number, item in enumerate(found)]


def _message(item: object, *, number: int) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        kind = shown(item.get("type")) if isinstance(item, dict) else "no object"
        raise BadRequest(f"input[{number}] is {kind}: send messages with a role and texts as content", param="input")
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _PARTS]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) != len(parts):
        raise BadRequest(f"input[{number}].content must be a text or a list of input_text", param="input")
    role = item.get("role")
    return {"role": "system" if role == "developer" else role, "content": "".join(found)}


def _format(chosen: object) -> dict[str, Any]:
    """`response_format` of a chat, whose schema lies one level deeper."""
    if not isinstance(chosen, dict):
        raise BadRequest("text.format must be an object", param="text")
    if chosen.get("type") != "json_schema":
        return chosen
    return {"type": "json_schema", "json_schema": {name: value for name, value in chosen.items() if name != "type"}}


class ResponseReply(Reply):
    """A `Reply` in the shape of Responses: one message with one text."""

    def __init__(
        self, jobs: list[Job], *, asked: Asked, shape: Shape, tokenizer: Tokenizer, format: Format = Format.hermes
    ) -> None:
        super().__init__(jobs, asked=asked, shape=shape, tokenizer=tokenizer, format=format)
        self._message, self._number, self._text = f"msg_{uuid.uuid4().hex}", 0, list[str]()

    def opening(self) -> bytes:
        part = {"type": "output_text", "text": "", "annotations": []}
        return b"".join(
            (
                self._event("created", response=self._response(status="in_progress")),
                self._event("in_progress", response=self._response(status="in_progress")),
                self._event("output_item.added", output_index=0, item=self._item("in_progress", content=[])),
                self._event("content_part.added", **self._place_of_part, part=part),
            )
        )

    def written(self, chunks: list[dict]) -> bytes:
        """Chunks of a chat as events."""
        texts = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
        self._text += [text for text in texts if text]
        deltas = (self._event("output_text.delta", **self._place_of_part, delta=text) for text in texts if text)
        return b"".join(deltas)

    def closing(self) -> bytes:
        text = "".join(self._text)
        whole = self._whole()
        part = {"type": "output_text", "text": text, "annotations": []}
        status = whole["status"]
        return b"".join(
            (
                self._event("output_text.done", **self._place_of_part, text=text),
                self._event("content_part.done", **self._place_of_part, part=part),
                self._event("output_item.done", output_index=0, item=self._item(status, content=[part])),
                self._event(status, response=whole),
            )
        )

    def body(self) -> bytes:
        self.take_kept()
        return json.dumps(self._whole()).encode()

    def _whole(self) -> dict[str, Any]:
        """The response with its answer and the counts of tokens."""
        chat = self.complete()
        choice, usage = chat["choices"][0], chat["usage"]
        is_cut = choice["finish_reason"] == "length"
        status = "incomplete" if is_cut else "completed"
        part = {"type": "output_text", "text": choice["message"]["content"] or "", "annotations": []}
        found = self._response(status=status) | {"output": [self._item(status, content=[part])]}
        found["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        found["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return found

    def _response(self, *, status: str) -> dict[str, Any]:
        sampling = self.asked.sampling
        return {
            "id": self.shape.id,
            "object": "response",
            "created_at": self.shape.created,
            "status": status,
            "model": self.shape.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tool_choice": "none",
            "tools": [],
            "usage": None,
        }

    def _item(self, status: str, *, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._message, "type": "message", "role": "assistant", "status": status, "content": content}

    @property
    def _place_of_part(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": f"response.{kind}", "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
