"""OpenAI's request bodies: every field is checked with its type, and refused with its name."""

import json
import re
import reprlib
from dataclasses import dataclass, fields
from typing import Any

from ztk.inference import SamplingParams

_ANY = 1024  # logit_bias entries, and characters of a stop text, at most
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one request. body_bytes: of its body. answers: prompts times n. logprobs: of one position. stops: texts that end an answer."""

    body_bytes: int = 4 << 20
    answers: int = 128
    logprobs: int = 20
    stops: int = 16


class BadRequest(ValueError):
    """A request that is refused. param: the field. status, code, headers: of the response."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.headers = param, status, code, headers


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request, read. prompts: texts or token ids, of /completions; messages: of /chat/completions. echo: the prompt comes first.

    max_tokens: 0 with echo asks for the prompt's log-probabilities alone; None: the request has none, and `sampling` has 1. model: its name;
    None: whichever is served. with_logprobs: of drawn tokens, and of an echoed prompt's; `sampling.logprobs` is the number of likely ones
    next to each. stop_token_ids: tokens that end an answer, with the model's ends. shows_special: special tokens are part of the text.
    """

    sampling: SamplingParams
    max_tokens: int | None = None
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


def read_body(
    raw: bytes,
    *,
    chat: bool,
    usual: SamplingParams,
    stops: tuple[str, ...] = (),
    limits: Limits | None = None,
) -> Asked:
    """Reads one body. usual, stops: for what it leaves out; `usual.max_tokens` does not count.

    Raises:
        BadRequest: no JSON object, an unknown field, or a value of the wrong type, out of range or beyond `limits`.
    """
    most = limits or Limits()
    body = _parsed(raw)
    unknown = sorted(body.keys() - _ACCEPTED - _SHARED)
    if unknown:
        raise BadRequest(f"unknown field {_shown(unknown[0])}: leave it out", param=_shown(unknown[0]))
    _refuse_undone(body, chat=chat, n=usual.n)
    echo, logprobs = _flag(body, "echo"), _logprobs(body, chat=chat, usual=usual.logprobs or None)
    if logprobs is not None and logprobs > most.logprobs:
        raise BadRequest(
            f"{logprobs} likely tokens at each position, and this server gives {most.logprobs} at most: ask for fewer",
            param="top_logprobs" if chat else "logprobs",
        )
    if not isinstance(body.get("model", ""), str):
        raise BadRequest("model must be the name of the model", param="model")
    limit = _number(body, "max_completion_tokens", kind=int, usual=_number(body, "max_tokens", kind=int, usual=None))
    stops = _stops(body, most=most.stops) if "stop" in body else stops
    if limit == 0 and not echo:
        raise BadRequest("max_tokens=0 asks for nothing: use 1 or more, or echo=true", param="max_tokens")
    values: dict[str, Any] = {field.name: getattr(usual, field.name) for field in fields(SamplingParams)}
    kinds = {"temperature": float, "top_p": float, "min_p": float, "top_k": int, "n": int, "seed": int}
    kinds |= dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), float)
    for name, kind in kinds.items():
        values[name] = _number(body, name, kind=kind, usual=values[name])
    if values["top_k"] == -1:  # vLLM's word for all
        values["top_k"] = 0
    values |= {"max_tokens": limit or 1, "logprobs": logprobs or 0, "logit_bias": _bias(body)}
    values["prompt_logprobs"] = echo and logprobs is not None
    try:
        sampling = SamplingParams(**values)
    except ValueError as error:
        raise BadRequest(str(error).removeprefix("sampling.")) from None
    prompts = () if chat else _prompts(body)
    if (answers := max(1, len(prompts)) * sampling.n) > most.answers:
        raise BadRequest(
            f"{max(1, len(prompts))} prompts times n={sampling.n} are {answers} answers, and this server gives {most.answers} to one request: "
            "send fewer at a time",
            param="n" if sampling.n > 1 else "prompt",
        )
    return Asked(
        sampling=sampling,
        max_tokens=limit,
        prompts=prompts,
        messages=_messages(body) if chat else (),
        stops=stops,
        stream=_flag(body, "stream"),
        with_usage=_flag(body.get("stream_options", {}), "include_usage"),
        echo=echo,
        ignores_ends=_flag(body, "ignore_eos"),
        stop_token_ids=_stop_tokens(body),
        shows_special=not _flag(body, "skip_special_tokens", usual=True),
        with_logprobs=logprobs is not None,
        model=body.get("model"),
    )


def _parsed(raw: bytes) -> dict[str, Any]:
    """The object, without its nulls. Its texts are UTF-8: json.loads of bytes would let half a surrogate pair through."""
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is no JSON that can be read: its lists and objects are nested too deeply") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if b"\\u" in raw:
        for name, value in body.items():
            if _HALF_PAIR.search(json.dumps([name, value], ensure_ascii=False)):  # whose nesting is that of `body`
                raise BadRequest(
                    f"{_shown(name)} has half of a surrogate pair, such as \\ud83d, which is no character: send UTF-8, or both halves",
                    param=_shown(name),
                )
    return {name: value for name, value in body.items() if value is not None}


def _shown(value: object) -> str:
    """A value in a message: short, and with characters that every encoding has."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    return (text if len(text) <= 80 else f"{text[:60]}...").encode("utf-8", "backslashreplace").decode()


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 2, 60, 40, 60


def _refuse_undone(body: dict, *, chat: bool, n: int) -> None:
    """Raises BadRequest for a field that would be read and change nothing. n: answers, where the body does not say."""
    if not isinstance(body.get("stream_options", {}), dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    if body.get("suffix", "") != "":
        raise BadRequest("suffix is not supported: leave it out", param="suffix")
    if _number(body, "best_of", kind=int, usual=1) not in (1, body.get("n", n)):
        raise BadRequest("best_of is not supported: leave it out, or ask for n answers", param="best_of")
    if "top_logprobs" in body and not chat:
        raise BadRequest("top_logprobs is of /chat/completions: send logprobs with the number", param="top_logprobs")
    if _flag(body, "echo") and chat:
        raise BadRequest("echo is of /completions: leave it out", param="echo")


def _flag(body: dict, name: str, *, usual: bool = False) -> bool:
    value = body.get(name, usual)
    if not isinstance(value, bool):
        raise BadRequest(f"{name}={_SHORT.repr(value)}: must be true or false", param=name)
    return value


def _number(body: dict, name: str, *, kind: type, usual: Any) -> Any:
    value = body.get(name)
    if value is None:
        return usual
    good = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if not good or (name.startswith("max_") and value < 0):
        asked = "a number" if kind is float else "an integer"
        raise BadRequest(f"{name}={_SHORT.repr(value)}: must be {asked}", param=name)
    try:
        return kind(value)
    except OverflowError:
        raise BadRequest(f"{name}={_SHORT.repr(value)}: is too large", param=name) from None


def _logprobs(body: dict, *, chat: bool, usual: int | None) -> int | None:
    """How many of the likeliest tokens beside each; None: no log-probabilities. Chat says it with a flag and a number, completions with a
    number, of which 0 asks for those of the tokens themselves. usual: where it says nothing."""
    if "logprobs" not in body:
        return usual
    if not chat:
        return _number(body, "logprobs", kind=int, usual=0)
    return _number(body, "top_logprobs", kind=int, usual=0) if _flag(body, "logprobs") else None


def _stops(body: dict, *, most: int) -> tuple[str, ...]:
    found = body.get("stop", [])
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(stop, str) and stop for stop in found):
        raise BadRequest("stop must be a text or a list of texts", param="stop")
    if len(found) > most or any(len(stop) > _ANY for stop in found):
        raise BadRequest(
            f"stop may have {most} texts of {_ANY} characters at most: send fewer or shorter ones", param="stop"
        )
    return tuple(found)


def _stop_tokens(body: dict) -> tuple[int, ...]:
    found = body.get("stop_token_ids", [])
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise BadRequest("stop_token_ids must be a list of token ids", param="stop_token_ids")
    if len(found) > _ANY:
        raise BadRequest(f"stop_token_ids may have {_ANY} tokens at most, and has {len(found)}", param="stop_token_ids")
    return tuple(found)


def _bias(body: dict) -> dict[int, float]:
    found = body.get("logit_bias", {})
    if not isinstance(found, dict) or not all(
        re.fullmatch(r"[0-9]{1,18}", token) and isinstance(value, int | float) and not isinstance(value, bool)
        for token, value in found.items()
    ):
        raise BadRequest('logit_bias must map token ids to numbers, as in {"50256": -100}', param="logit_bias")
    if len(found) > _ANY:
        raise BadRequest(f"logit_bias may have {_ANY} tokens at most, and has {len(found)}", param="logit_bias")
    return {int(token): _number(found, token, kind=float, usual=0.0) for token in found}


def _prompts(body: dict) -> tuple[str | list[int], ...]:
    """One text, one list of tokens, or a list of either."""
    found = body.get("prompt", "")
    if isinstance(found, str):
        return (found,)
    if isinstance(found, list) and found:
        kinds = set(map(type, found))
        if kinds == {int}:
            return (found,)
        if kinds == {str}:
            return tuple(found)
        if kinds == {list} and all(set(map(type, item)) <= {int} for item in found):
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
