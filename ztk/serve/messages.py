"""The messages of a chat, and the template that formats them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ztk.serve.values import BadRequest, flag, joined_text, shown, thing

MESSAGE_FIELDS = ("messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
# Arguments of transformers' apply_chat_template that are not template variables.
_RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)

_WORDS = ("name", "tool_call_id", "reasoning_content")  # texts of a message that templates use
# Fields of a message that would change the answer and are not supported, with the advice.
_UNDONE = {
    "audio": "send its text as content",
    "function_call": "send tool_calls",
    "prefix": "send continue_final_message=true and add_generation_prompt=false",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """Inputs of a template other than the messages. tools: the request's. variables: the template's own. begins: adds the beginning
    of an answer.
    continues: the last message is the beginning of the answer.
    """

    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    begins: bool = True
    continues: bool = False

    @property
    def needs_template(self) -> bool:
        """Whether the options need a chat template."""
        return bool(self.variables) or self.continues or not self.begins


PLAIN = ChatOptions()


def read_options(body: dict, *, tools: tuple[dict[str, Any], ...]) -> ChatOptions:
    """Parses the options. Raises BadRequest for values that exclude each other or that no template supports."""
    variables = thing(body, name="chat_template_kwargs")
    if reserved := sorted(_RESERVED & variables.keys()):
        raise BadRequest(
            f"chat_template_kwargs has {reserved[0]}, which is no variable of a template: leave it out",
            param="chat_template_kwargs",
        )
    continues = flag(body, name="continue_final_message")
    begins = flag(body, name="add_generation_prompt", usual=True)
    if continues and begins:
        raise BadRequest(
            "continue_final_message goes with add_generation_prompt=false: the last message is the beginning of the answer",
            param="continue_final_message",
        )
    return ChatOptions(tools=tools, variables=variables, begins=begins, continues=continues)


def read_messages(body: dict) -> tuple[dict[str, Any], ...]:
    """Returns role and content of each message, and the fields of tool calls. Raises BadRequest for others."""
    found = body.get("messages")
    if not isinstance(found, list) or not found:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    return tuple(_message(message, number=number) for number, message in enumerate(found))


def _message(message: object, *, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequest(f"messages[{number}] must have a role and a text as content", param="messages")
    for name, advice in _UNDONE.items():
        if message.get(name):
            raise BadRequest(f"messages[{number}].{name} is not supported: {advice}", param="messages")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{number}] must have a role and a text as content", param="messages")
    if content is None and calls:
        content = ""
    read: dict[str, Any] = {
        "role": message["role"],
        "content": joined_text(content, name=f"messages[{number}].content", kinds=("text",)),
    }
    for name in _WORDS:
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise BadRequest(f"messages[{number}].{name}={shown(value)}: must be a text", param="messages")
            read[name] = value
    if calls:
        read["tool_calls"] = _calls(calls, number=number)
    return read


def _calls(calls: object, *, number: int) -> list[dict[str, Any]]:
    """Returns calls with arguments as objects, which templates format as JSON."""
    try:
        return [
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {
                    "name": _name(call["function"]["name"]),
                    "arguments": _object(call["function"].get("arguments") or {}),
                },
            }
            for call in (calls if isinstance(calls, list) else [calls])
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise BadRequest(
            f"messages[{number}].tool_calls must be a list of functions, each with a name and arguments that are a JSON object",
            param="messages",
        ) from None


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _object(value: object) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise TypeError(value)
    return found
