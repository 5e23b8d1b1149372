"""OpenAI's request bodies: what is read of them, and what is refused with which words."""

import json
from dataclasses import dataclass, fields
from typing import Any

from ztk.inference import SamplingParams

# Sent by clients, and without effect here.
_ACCEPTED = {"user", "metadata", "store", "service_tier"}
_SHARED = {
    *(
        "model",
        "prompt",
        "messages",
        "stream",
        "echo",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "suffix",
        "stream_options",
        "best_of",
    ),
    *("top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "skip_special_tokens"),  # vLLM's
}


class BadRequest(ValueError):
    """A body that is refused. param: the field. status, code: of the response."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request, read. prompts: texts or token ids, of /completions; messages: of /chat/completions. echo: the prompt comes first.

    max_tokens: 0 with echo asks for the prompt's log-probabilities alone. model: its name; None: whichever is served. with_logprobs: of drawn
    tokens, and of an echoed prompt's; `sampling.logprobs` says how many likely ones beside each. stop_token_ids: tokens that end an answer
    beside the model's ends. shows_special: special tokens are part of the text.
    """

    sampling: SamplingParams
    max_tokens: int
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    stops: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    echo: bool = False
    ignores_ends: bool = False
    stop_token_ids: tuple[int, ...] = ()
    shows_special: bool = False
    with_logprobs: bool = False
    model: str | None = None


def read_body(raw: bytes, *, chat: bool, usual: SamplingParams, stops: tuple[str, ...] = ()) -> Asked:
    """Reads one body. usual, stops: for what it leaves out.

    Raises:
        BadRequest: no JSON object, an unknown field, or a value of the wrong type or out of range.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(body.keys() - _ACCEPTED - _SHARED)
    if unknown:
        raise BadRequest(f"unknown field {unknown[0]}: leave it out", param=unknown[0])
    if body.get("suffix"):
        raise BadRequest("suffix is not supported: leave it out", param="suffix")
    _refuse_undone(body, chat=chat, n=usual.n)
    echo, logprobs = _flag(body, "echo"), _logprobs(body, chat=chat, usual=usual.logprobs or None)
    if not isinstance(body.get("model", ""), str):
        raise BadRequest("model must be the name of the model", param="model")
    max_tokens = _number(
        body, "max_completion_tokens", kind=int, usual=_number(body, "max_tokens", kind=int, usual=usual.max_tokens)
    )
    stops = _stops(body) if "stop" in body else stops
    if max_tokens == 0 and not echo:
        raise BadRequest("max_tokens=0 asks for nothing: use 1 or more, or echo=true", param="max_tokens")
    values: dict[str, Any] = {field.name: getattr(usual, field.name) for field in fields(SamplingParams)}
    kinds = {"temperature": float, "top_p": float, "min_p": float, "top_k": int, "n": int, "seed": int}
    kinds |= dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), float)
    for name, kind in kinds.items():
        values[name] = _number(body, name, kind=kind, usual=values[name])
    if values["top_k"] == -1:  # vLLM's word for all
        values["top_k"] = 0
    values |= {"max_tokens": max(1, max_tokens), "logprobs": logprobs or 0, "logit_bias": _bias(body)}
    values["prompt_logprobs"] = echo and logprobs is not None
    try:
        sampling = SamplingParams(**values)
    except ValueError as error:
        raise BadRequest(str(error).removeprefix("sampling.")) from None
    return Asked(
        sampling=sampling,
        max_tokens=max_tokens,
        prompts=() if chat else _prompts(body),
        messages=_messages(body) if chat else (),
        stops=stops,
        stream=_flag(body, "stream"),
        with_usage=bool(body.get("stream_options", {}).get("include_usage")),
        echo=echo,
        ignores_ends=_flag(body, "ignore_eos"),
        stop_token_ids=_stop_tokens(body),
        shows_special=not _flag(body, "skip_special_tokens", usual=True),
        with_logprobs=logprobs is not None,
        model=body.get("model"),
    )


def _refuse_undone(body: dict, *, chat: bool, n: int) -> None:
    """Raises BadRequest for a field that would be read and change nothing. n: answers, where the body does not say."""
    if not isinstance(body.get("stream_options", {}), dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    if body.get("best_of", 1) not in (1, body.get("n", n)):
        raise BadRequest("best_of is not supported: leave it out, or ask for n answers", param="best_of")
    if "top_logprobs" in body and not chat:
        raise BadRequest("top_logprobs is of /chat/completions: send logprobs with the number", param="top_logprobs")
    if _flag(body, "echo") and chat:
        raise BadRequest("echo is of /completions: leave it out", param="echo")


def _flag(body: dict, name: str, *, usual: bool = False) -> bool:
    value = body.get(name, usual)
    if not isinstance(value, bool):
        raise BadRequest(f"{name}={value!r}: must be true or false", param=name)
    return value


def _number(body: dict, name: str, *, kind: type, usual: Any) -> Any:
    value = body.get(name, usual)
    good = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if not good or (name.startswith("max_") and value < 0):
        raise BadRequest(f"{name}={value!r}: must be {'a number' if kind is float else 'an integer'}", param=name)
    return kind(value)


def _logprobs(body: dict, *, chat: bool, usual: int | None) -> int | None:
    """How many of the likeliest tokens beside each; None: no log-probabilities. Chat says it with a flag and a number, completions with a
    number, of which 0 asks for those of the tokens themselves. usual: where it says nothing."""
    if "logprobs" not in body:
        return usual
    if not chat:
        return _number(body, "logprobs", kind=int, usual=0)
    return _number(body, "top_logprobs", kind=int, usual=0) if _flag(body, "logprobs") else None


def _stops(body: dict) -> tuple[str, ...]:
    found = body.get("stop", [])
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(stop, str) and stop for stop in found):
        raise BadRequest("stop must be a text or a list of texts", param="stop")
    return tuple(found)


def _stop_tokens(body: dict) -> tuple[int, ...]:
    found = body.get("stop_token_ids", [])
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise BadRequest("stop_token_ids must be a list of token ids", param="stop_token_ids")
    return tuple(found)


def _bias(body: dict) -> dict[int, float]:
    found = body.get("logit_bias", {})
    try:
        return {int(token): float(value) for token, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise BadRequest(
            'logit_bias must map token ids to numbers, as in {"50256": -100}', param="logit_bias"
        ) from None


def _prompts(body: dict) -> tuple[str | list[int], ...]:
    """One text, one list of tokens, or a list of either."""
    found = body.get("prompt", "")
    if isinstance(found, str):
        return (found,)
    if isinstance(found, list) and found:
        if all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            return (found,)
        if all(isinstance(item, str) for item in found):
            return tuple(found)
        if all(isinstance(item, list) and all(isinstance(token, int) for token in item) for item in found):
            return tuple(found)
    raise BadRequest(
        "prompt must be a text, a list of texts, a list of token ids, or a list of such lists", param="prompt"
    )


def _messages(body: dict) -> tuple[dict[str, str], ...]:
    found = body.get("messages")
    if not isinstance(found, list) or not found:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    read = []
    for number, message in enumerate(found):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = _joined(content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{number}] must have a role and a text as content", param="messages")
        read.append({"role": message["role"], "content": content})
    return tuple(read)


def _joined(parts: list) -> str | None:
    """The text of a message in parts; None if one of them is no text."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if len(found) == len(parts) else None
