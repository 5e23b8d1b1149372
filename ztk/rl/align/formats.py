"""Recognises known formats of chat, prompt and preference records, and converts them to a common one.

`unified` recognises a record's format by its fields. It returns a record with a subset of "messages" (a conversation with its answers),
"prompt" (a text or messages), "answer", "chosen", "rejected", "rejected_prompt" (if different), "label", "margin" and "tools".
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

Record = Mapping[str, Any]

CHAT, PREFERENCES, PROMPTS = "chat", "preferences", "prompts"
_KEPT = ("margin", "tools", "label")
_SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
    "system": "system",
}
_HH_TURN = re.compile(r"\n\n(Human|Assistant):[ \t]?")
# Names of ztk's fields in other data sets, suggested in errors.
_ALIASES = {
    "prompt": ("question", "query", "problem", "input", "instruction", "text"),
    "answer": ("response", "solution", "output", "completion", "target", "answers"),
    "chosen": ("accepted", "preferred", "positive", "response_chosen", "better"),
    "rejected": ("dispreferred", "negative", "response_rejected", "worse"),
    "messages": ("conversation", "chat", "dialogue", "dialog"),
    "conversations": ("conversation", "dialogue", "dialog"),
    "label": ("labels", "is_good", "desirable", "score"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Format:
    """needs: fields of all such records. fits: whether a record with these fields has the format. example: shown in errors."""

    name: str
    purposes: tuple[str, ...]
    needs: tuple[str, ...]
    convert: Callable[[Record], dict[str, Any]]
    example: str
    fits: Callable[[Record], bool] = lambda record: True


def unified(record: Record, *, purpose: str) -> Record:
    """Converts a record to the common format. purpose: chat, preferences or prompts; a record may support several.

    Raises:
        ValueError: no format of this purpose has these fields (the message has the nearest format), or a field has an invalid value.
    """
    for entry in _FORMATS:
        if purpose in entry.purposes and set(entry.needs) <= set(record) and entry.fits(record):
            found = {name: record[name] for name in _KEPT if name in record} | entry.convert(record)
            tools = found.pop("tools", None) or None
            if tools and (
                tools := _parsed(tools, key="tools")
            ):  # removes empty lists, because templates may test for tools
                found["tools"] = tools
            return found
    raise ValueError(_nearest(record, purpose=purpose))


def _nearest(record: Record, *, purpose: str) -> str:
    """Returns an error with the record's fields, the nearest format, and a suggestion for `data.fields`."""
    formats = [entry for entry in _FORMATS if purpose in entry.purposes and not set(entry.needs) <= set(record)]
    nearest = max(
        formats, key=lambda entry: sum(_nearness(name, record=record) for name in entry.needs) / len(entry.needs)
    )
    lacking = [name for name in nearest.needs if name not in record]
    fields = f"its fields are {', '.join(map(str, record)) or 'none'}"
    said = f"{fields}; the nearest format is {nearest.name}, {nearest.example}"
    free = [str(name) for name in record if name not in nearest.needs]
    near = {name: own for name in lacking if (own := _like(name, among=free)) is not None}
    fix = "".join(f"{', ' if number else ''}{name}: {own}" for number, (name, own) in enumerate(near.items()))
    missing = " and ".join(map(repr, lacking)).replace("'", '"')
    other = next((entry for entry in _FORMATS if set(entry.needs) <= set(record) and entry.purposes == (CHAT,)), None)
    if not fix and purpose == PREFERENCES and other is not None:
        return f"{said}, and it lacks {missing}; task=sft learns from {other.name}"
    return f"{said}, and it lacks {missing}: " + (
        f"use data.fields={{{fix}}}"
        if fix
        else f"use data.fields={{{lacking[0]}: NAME}} if a field has it under another name"
    )


def _nearness(name: str, *, record: Record) -> float:
    """Returns 1 for a field of the record, and less for a field that it has under a common other name."""
    return 1.0 if name in record else 0.8 * any(alias in record for alias in _ALIASES.get(name, ()))


def _like(name: str, *, among: Sequence[str]) -> str | None:
    aliases = _ALIASES.get(name, ())
    for alias in aliases:
        if alias in among:
            return alias
    scored = [(SequenceMatcher(None, name, other.lower()).ratio(), other) for other in among]
    best = max(scored, default=(0.0, ""))
    return best[1] if best[0] > 0.6 else None


def _parsed(value: Any, *, key: str) -> Any:
    """Parses a value that may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f'"{key}" is a text that is not JSON ({error})') from None


# Chats


def _messages(record: Record) -> dict[str, Any]:
    return {"messages": _with_parsed_calls(record["messages"])}


def _with_parsed_calls(messages: Any) -> Any:
    """Parses the arguments of tool calls: OpenAI has them as text, and templates read fields."""
    if not isinstance(messages, list):
        return messages
    return [_with_parsed_call(message) if isinstance(message, dict) else message for message in messages]


def _with_parsed_call(message: dict) -> dict:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _parsed(function["arguments"], key="arguments")
            found.append({**call, "function": {**function, "arguments": arguments}})
        else:
            found.append(call)
    return {**message, "tool_calls": found}


def _sharegpt(record: Record) -> dict[str, Any]:
    return {"messages": _turns(record["conversations"], system=record.get("system"))}


def _turns(turns: Any, *, system: Any = None) -> list[dict]:
    """Converts ShareGPT's turns, {"from": ..., "value": ...}, or messages under that name, to messages."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'"conversations": {shown(turns)} must be a list of turns')
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return [*messages, *(_turn(turn, number=number) for number, turn in enumerate(turns, start=1))]


def _turn(turn: Any, *, number: int = 1) -> dict:
    if isinstance(turn, dict) and "role" in turn:
        return _with_parsed_call(turn)
    speaker = turn.get("from") if isinstance(turn, dict) else None
    role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None or not isinstance(turn.get("value"), str):
        known = ", ".join(_SPEAKERS)
        raise ValueError(f'turn {number}: {shown(turn)} must be {{"from": ..., "value": ...}} from one of {known}')
    if isinstance(speaker, str) and speaker.lower() == "function_call":
        call = _parsed(turn["value"], key="value")
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    return {"role": role, "content": turn["value"]}


def _alpaca_prompt(record: Record) -> list[dict]:
    """Returns the instruction with its input, as a user's message."""
    parts = [record["instruction"], record.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f'"instruction": {shown(parts[0])} and "input": {shown(parts[1])} must be texts')
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    earlier = [
        {"role": role, "content": text}
        for pair in _history(record.get("history") or [])
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    if not any(parts):
        raise ValueError('"instruction" and "input" are empty: leave the line out')
    return [*system, *earlier, {"role": "user", "content": "\n\n".join(part for part in parts if part)}]


def _history(pairs: Any) -> list[list[str]]:
    """Returns earlier questions with their answers, checked."""
    is_list = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not is_list or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ValueError(f'"history": {shown(pairs)} must be a list of [question, answer]')
    return pairs


def _alpaca(record: Record) -> dict[str, Any]:
    return {"prompt": _alpaca_prompt(record), "answer": record["output"]}


def _answered(name: str) -> Callable[[Record], dict[str, Any]]:
    return lambda record: {"prompt": record["prompt"], "answer": record[name]}


# Preferences


def _pair(record: Record) -> dict[str, Any]:
    """Returns a prompt and two answers. If the answers include the conversation, as in UltraFeedback, it is the prompt."""
    sides = [record["chosen"], record["rejected"]]
    if all(_is_conversation(side) and side[0].get("role") != "assistant" for side in sides):
        if isinstance(record["prompt"], list) and _lacks(record["chosen"], messages=record["prompt"]):
            raise ValueError(
                '"prompt" has a message that the conversation of "chosen" lacks: put it there, or leave "prompt" out'
            )
        return _conversations(record)
    return {"prompt": record["prompt"], "chosen": record["chosen"], "rejected": record["rejected"]}


def _lacks(conversation: list[dict], *, messages: list) -> bool:
    """Returns whether one of `messages` is missing in the conversation."""
    contents = [message.get("content", message.get("value")) for message in conversation]
    return any(isinstance(message, dict) and message.get("content") not in contents for message in messages)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(message, dict) for message in value)


def _conversations(record: Record) -> dict[str, Any]:
    chosen, rejected = (_turns(record[name]) for name in ("chosen", "rejected"))
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1].get("role") != "assistant":
            raise ValueError(f'"{name}": its last message is no assistant\'s, so there is no answer to compare')
    found = {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
    return found if chosen[:-1] == rejected[:-1] else {**found, "rejected_prompt": rejected[:-1]}


def _hh(record: Record) -> dict[str, Any]:
    """Converts HH-RLHF: two conversations as texts, with turns of Human and Assistant."""
    turns = {name: _hh_messages(record[name], key=name) for name in ("chosen", "rejected")}
    return _conversations(turns)


def _is_hh(record: Record) -> bool:
    return all(isinstance(record[name], str) and _HH_TURN.match(record[name]) for name in ("chosen", "rejected"))


def _hh_messages(text: str, *, key: str) -> list[dict]:
    _, *parts = _HH_TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [
        {"role": roles[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if len(messages) < 2:
        raise ValueError(f'"{key}": {shown(text)} must have a turn of Human and one of Assistant')
    return messages


def _texts(record: Record) -> dict[str, Any]:
    """Converts two texts with a common beginning, which is the prompt, as TRL's `extract_prompt`: a space in front of the first
    difference belongs to the answers, and of a text that continues the other one the last common letter.
    """
    chosen, rejected = record["chosen"], record["rejected"]
    shorter = min(len(chosen), len(rejected))
    end = next((place for place in range(shorter) if chosen[place] != rejected[place]), None)
    end = max(0, shorter - 1) if end is None else end - 1 if end and chosen[end - 1] == " " else end
    if not end:
        raise ValueError('"chosen" and "rejected" have no common beginning, which would be the prompt: give a "prompt"')
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _are_texts(record: Record) -> bool:
    return isinstance(record["chosen"], str) and isinstance(record["rejected"], str)


def _ultrafeedback(record: Record) -> dict[str, Any]:
    """Returns the completions with the highest and the lowest score."""
    scored = sorted(
        (
            one
            for one in record["completions"]
            if isinstance(one, dict) and "response" in one and _score(one) is not None
        ),
        key=lambda entry: _score(entry) or 0.0,
    )
    if len(scored) < 2 or _score(scored[0]) == _score(scored[-1]):
        raise ValueError(
            '"completions" have no two different values of "overall_score", so there is nothing to compare: leave the line out'
        )
    prompt = [{"role": "user", "content": record["instruction"]}]
    return {"prompt": prompt, "chosen": scored[-1]["response"], "rejected": scored[0]["response"]}


def _score(entry: Mapping[str, Any]) -> float | None:
    value = entry.get("overall_score", entry.get("fine-grained_score"))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _sharegpt_pair(record: Record) -> dict[str, Any]:
    answers = {
        name: record[name] if isinstance(record[name], str) else [_turn(record[name])]
        for name in ("chosen", "rejected")
    }
    prompt = _turns(record["conversations"], system=record.get("system"))
    if prompt[-1].get("role") == "assistant":
        raise ValueError(
            '"conversations" ends with an answer, next to "chosen" and "rejected": leave its last turn out'
        )
    return {"prompt": prompt, **answers}


def _alpaca_pair(record: Record) -> dict[str, Any]:
    return {"prompt": _alpaca_prompt(record), "chosen": record["chosen"], "rejected": record["rejected"]}


# Prompts


def _asked(record: Record) -> dict[str, Any]:
    """Returns a conversation up to the last answer."""
    messages = _sharegpt(record)["messages"]
    return {"prompt": messages[:-1] if messages[-1].get("role") == "assistant" and len(messages) > 1 else messages}


_BOTH, _ALL = (PREFERENCES, CHAT), (PREFERENCES, CHAT, PROMPTS)
_FORMATS = (
    _Format(
        name="a conversation",
        purposes=(CHAT,),
        needs=("messages",),
        convert=_messages,
        example='{"messages": [{"role": ..., "content": ...}, ...]}',
    ),
    _Format(
        name="prompt and answer",
        purposes=(CHAT,),
        needs=("prompt", "answer"),
        convert=_answered("answer"),
        example='{"prompt": ..., "answer": ...}',
    ),
    _Format(
        name="a prompt",
        purposes=(PROMPTS,),
        needs=("prompt",),
        convert=lambda record: {"prompt": record["prompt"]},
        example='{"prompt": ...}',
    ),
    _Format(
        name="a conversation without its answer",
        purposes=(PROMPTS,),
        needs=("messages",),
        convert=lambda record: {"prompt": _messages(record)["messages"]},
        example='{"messages": [{"role": "user", "content": ...}]}',
    ),
    _Format(
        name="prompt and two answers",
        purposes=_BOTH,
        needs=("prompt", "chosen", "rejected"),
        convert=_pair,
        example='{"prompt": ..., "chosen": ..., "rejected": ...}',
    ),
    _Format(
        name="ShareGPT's pairs",
        purposes=_ALL,
        needs=("conversations", "chosen", "rejected"),
        convert=_sharegpt_pair,
        example='{"conversations": [...], "chosen": {"from": "gpt", "value": ...}, "rejected": {...}}',
    ),
    _Format(
        name="Alpaca's pairs",
        purposes=_ALL,
        needs=("instruction", "chosen", "rejected"),
        convert=_alpaca_pair,
        example='{"instruction": ..., "input": ..., "chosen": ..., "rejected": ...}',
    ),
    _Format(
        name="two conversations",
        purposes=_ALL,
        needs=("chosen", "rejected"),
        convert=_conversations,
        example='{"chosen": [{"role": ..., "content": ...}, ...], "rejected": [...]}',
        fits=lambda record: _is_conversation(record["chosen"]) and _is_conversation(record["rejected"]),
    ),
    _Format(
        name="HH-RLHF's pairs",
        purposes=_ALL,
        needs=("chosen", "rejected"),
        convert=_hh,
        example='{"chosen": "\\n\\nHuman: ...\\n\\nAssistant: ...", "rejected": "..."}',
        fits=_is_hh,
    ),
    _Format(
        name="two texts",
        purposes=_ALL,
        needs=("chosen", "rejected"),
        convert=_texts,
        example='{"chosen": "2+2=4", "rejected": "2+2=5"}',
        fits=_are_texts,
    ),
    _Format(
        name="KTO",
        purposes=(PREFERENCES,),
        needs=("prompt", "completion", "label"),
        convert=_answered("completion"),
        example='{"prompt": ..., "completion": ..., "label": true}',
    ),
    _Format(
        name="prompt and completion",
        purposes=(CHAT,),
        needs=("prompt", "completion"),
        convert=_answered("completion"),
        example='{"prompt": ..., "completion": ...}',
    ),
    _Format(
        name="ShareGPT",
        purposes=(CHAT,),
        needs=("conversations",),
        convert=_sharegpt,
        example='{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}',
    ),
    _Format(
        name="ShareGPT",
        purposes=(PROMPTS,),
        needs=("conversations",),
        convert=_asked,
        example='{"conversations": [{"from": "human", "value": ...}]}',
    ),
    _Format(
        name="Alpaca",
        purposes=(CHAT,),
        needs=("instruction", "output"),
        convert=_alpaca,
        example='{"instruction": ..., "input": ..., "output": ...}',
    ),
    _Format(
        name="Alpaca",
        purposes=(PROMPTS,),
        needs=("instruction",),
        convert=lambda record: {"prompt": _alpaca_prompt(record)},
        example='{"instruction": ..., "input": ...}',
    ),
    _Format(
        name="UltraFeedback",
        purposes=_ALL,
        needs=("instruction", "completions"),
        convert=_ultrafeedback,
        example='{"instruction": ..., "completions": [{"response": ..., "overall_score": ...}, ...]}',
        fits=lambda record: isinstance(record["completions"], list),
    ),
)


def shown(value: Any) -> str:
    """Returns a value of a record for an error, of 80 letters at most."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
