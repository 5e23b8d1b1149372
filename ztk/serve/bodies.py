"""Parses OpenAI's request bodies. The type of every supported field is checked, and errors name the field.

Unsupported fields that would change an answer must have a neutral value. Other fields are accepted and ignored: the response lists them in
the header x-ztk-ignored-fields.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ztk.inference import SamplingParams
from ztk.serve.messages import PLAIN, ChatOptions, read_messages, read_options
from ztk.serve.structured import Structure, read_structure
from ztk.serve.tools import Tools, read_tools
from ztk.serve.values import MANY, BadRequest, flag, number, shown, text_list, thing, token_list

_BAD_WORDS = 128
_ALLOWED = 1 << 18  # allowed tokens, up to the size of a vocabulary
_NUMBERS = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "n": int,
    "seed": int,
    "min_tokens": int,
}
_NUMBERS |= dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), float)
_SAMPLING = (
    *(
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        "presence_penalty",
        "frequency_penalty",
    ),
    *("logit_bias", "logprobs"),
    # vLLM's
    *("top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "min_tokens", "bad_words"),
    *("allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs", "cache_salt"),
    *(
        "return_token_ids",
        "return_tokens_as_token_ids",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
    ),
)
STRUCTURED = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "json_schema"),  # llama.cpp's
)
_SHARED = {"model", "stream", "stream_options", "echo", *_SAMPLING, *STRUCTURED}
COMPLETIONS = _SHARED | {"prompt", "best_of"}
CHAT = _SHARED | {
    *("messages", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
}

_LEAVE, _SEND_TOOLS, _SEND_LIMIT = "leave it out", "send tools", "send max_tokens"
_SEND_SYSTEM = "send it as the first of messages, with the role system"
# Unsupported fields that would change an answer: their neutral values, and the advice.
_UNDONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), _LEAVE),
    "modalities": ((["text"],), "ask for text"),
    "audio": ((), "ask for text"),
    "web_search_options": ((), _LEAVE),
    "functions": (([],), _SEND_TOOLS),
    "function_call": (("none", "auto"), _SEND_TOOLS),
    # of other routes and interfaces
    "system": ((), _SEND_SYSTEM),
    "instructions": ((), _SEND_SYSTEM),
    "input": ((), "send messages, or a prompt to /v1/completions"),
    "max_output_tokens": ((), _SEND_LIMIT),
    "max_new_tokens": ((), _SEND_LIMIT),
    "stop_sequences": (([],), "send stop"),
    # vLLM's
    "use_beam_search": ((False,), _LEAVE),
    "logits_processors": (([],), _LEAVE),
    "logprob_token_ids": ((), "send logprobs with the number of likely tokens"),
    "prompt_embeds": (([],), "send texts or token ids"),
    "chat_template": ((), "put the template into the model's folder"),
    "documents": (([],), "send them in chat_template_kwargs"),
    "detokenize": ((True,), _LEAVE),
    "repetition_detection": ((), _LEAVE),
    "thinking_token_budget": ((-1,), _SEND_LIMIT),
    "watermarking": ((False,), _LEAVE),
    # llama.cpp's
    "n_predict": ((-1,), _SEND_LIMIT),
    "n_cmpl": ((1,), "send n"),
    "n_probs": ((0,), "send logprobs"),
    "n_indent": ((0,), _LEAVE),
    "repeat_penalty": ((1,), "send repetition_penalty"),
    "typical_p": ((1,), _LEAVE),
    "top_n_sigma": ((-1,), _LEAVE),
    "mirostat": ((0,), _LEAVE),
    "dynatemp_range": ((0,), _LEAVE),
    "dry_multiplier": ((0,), _LEAVE),
    "xtc_probability": ((0,), _LEAVE),
    "samplers": ((), _LEAVE),
    "lora": (([],), "name the model that you want"),
}
_ONE_ROUTE = {
    "best_of": (CHAT, (1,), f"it is of /completions: {_LEAVE}"),
    "add_special_tokens": (CHAT, (False,), f"a chat template writes its own special tokens: {_LEAVE}"),
    "prompt": (CHAT, ("",), "it is of /completions: send messages"),
    "messages": (COMPLETIONS, ([],), "they are of /chat/completions: send a prompt"),
    "tools": (COMPLETIONS, ([],), "they are of /chat/completions: send messages there"),
    "top_logprobs": (COMPLETIONS, (), "it is of /chat/completions: send logprobs with the number"),
}
_NAMES = 16  # ignored fields in a header


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one request. body_bytes: of its body. answers: prompts times n. logprobs: per position. stops: number of stop texts."""

    body_bytes: int = 4 << 20
    answers: int = 128
    logprobs: int = 20
    stops: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A parsed request.

    prompts: texts or token ids, for /completions. messages: for /chat/completions. echo: the answer starts with the prompt, or with the
    chat's last message if the answer continues it.
    max_tokens: 0 with echo requests only the prompt's log-probabilities. None if the request has none; `sampling` then has 1.
    model: its name, or None for any.
    with_logprobs: for sampled tokens, and for an echoed prompt, with `tops` likely tokens each.
    prompt_tops: likely tokens per prompt token in vLLM's format, if requested.
    stop_token_ids: tokens that end an answer, in addition to the model's.
    shows_special: includes special tokens in the text. shows_stop: includes the stop text or token.
    keeps: number of answers to return, the likeliest of `sampling.n`. names_ids: log-probabilities identify tokens by id.
    most_prompt: tokens to which a longer prompt is truncated, its last ones, or its first ones with `cuts_end`; -1 leaves room for the
    answer.
    chat: how messages are formatted. structure: grammar of the answers. ignored: fields without an effect.
    with_usage: the last event has token counts. with_running_usage: every event has them.
    """

    sampling: SamplingParams
    max_tokens: int | None = None
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    chat: ChatOptions = PLAIN
    tools: Tools | None = None
    structure: Structure | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    with_running_usage: bool = False
    echo: bool = False
    ignores_ends: bool = False
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    shows_special: bool = False
    shows_stop: bool = False
    with_logprobs: bool = False
    tops: int = 0
    prompt_tops: int | None = None
    with_ids: bool = False
    names_ids: bool = False
    most_prompt: int | None = None
    cuts_end: bool = False
    has_beginning: bool = True
    keeps: int = 1
    model: str | None = None
    ignored: tuple[str, ...] = ()


def read_body(
    body: dict[str, Any],
    *,
    chat: bool,
    usual: SamplingParams,
    stops: tuple[str, ...] = (),
    limits: Limits | None = None,
) -> Asked:
    """Parses one body, as returned by `parsed`. usual, stops: defaults; `usual.max_tokens` is ignored.

    Raises:
        BadRequest: a value of the wrong type, out of range or beyond `limits`, or an unsupported field that would change the answer.
    """
    limits = limits or Limits()
    unused = ignored(body, chat=chat)
    if not isinstance(body.get("model", ""), str):
        raise BadRequest("model must be the name of the model", param="model")
    echo, stream = flag(body, name="echo"), flag(body, name="stream")
    tops, prompt_tops = _tops(body, chat=chat, usual=usual.logprobs or None, most=limits.logprobs)
    limit = _limit(body, echo=echo and not chat)
    with_prompt = prompt_tops is not None or (echo and not chat and tops is not None)
    if prompt_tops is not None and stream:
        raise BadRequest("prompt_logprobs come with the whole answer: leave stream out", param="prompt_logprobs")
    likely = max(tops or 0, prompt_tops or 0)
    sampling = _sampling(body, usual=usual, limit=limit, likely=likely, with_prompt=with_prompt)
    prompts = () if chat else read_prompts(body, name="prompt")
    options = thing(body, name="stream_options")
    with_usage = flag(options, name="include_usage")
    keeps = sampling.n
    sampling = _best_of(body, sampling=sampling, stream=stream) if not chat else sampling
    if (answers := max(1, len(prompts)) * sampling.n) > limits.answers:
        raise BadRequest(
            f"{max(1, len(prompts))} prompts times n={sampling.n} are {answers} answers, and this server gives {limits.answers} to one "
            "request: send fewer at a time",
            param="n" if sampling.n > 1 else "prompt",
        )
    tools = read_tools(body) if chat else None
    structure = read_structure(body)
    if structure is not None and tools is not None and (tools.required or tools.named):
        raise BadRequest(f"{structure.param} and tool_choice exclude each other: send one", param="tool_choice")
    return Asked(
        sampling=sampling,
        max_tokens=limit,
        prompts=prompts,
        messages=read_messages(body) if chat else (),
        chat=read_options(body, tools=() if tools is None else tools.given) if chat else PLAIN,
        tools=tools,
        structure=structure,
        stops=text_list(body, name="stop", most=limits.stops) if "stop" in body else stops,
        stream=stream,
        with_usage=with_usage,
        with_running_usage=with_usage and flag(options, name="continuous_usage_stats"),
        echo=echo,
        ignores_ends=flag(body, name="ignore_eos"),
        stop_token_ids=token_list(body, name="stop_token_ids"),
        bad_words=text_list(body, name="bad_words", most=_BAD_WORDS),
        shows_special=not flag(body, name="skip_special_tokens", usual=True),
        shows_stop=flag(body, name="include_stop_str_in_output"),
        with_logprobs=tops is not None,
        tops=tops or 0,
        prompt_tops=prompt_tops,
        with_ids=flag(body, name="return_token_ids"),
        names_ids=flag(body, name="return_tokens_as_token_ids"),
        most_prompt=_most_prompt(body),
        cuts_end=_cuts_end(body),
        has_beginning=flag(body, name="add_special_tokens", usual=True),
        keeps=keeps,
        model=body.get("model"),
        ignored=unused,
    )


def _limit(body: dict, *, echo: bool) -> int | None:
    """Returns the tokens of an answer, or None if the body has no limit."""
    limit = number(
        body, name="max_completion_tokens", kind=int, usual=number(body, name="max_tokens", kind=int, usual=None)
    )
    if limit == 0 and not echo and "prompt_logprobs" not in body:
        raise BadRequest("max_tokens=0 asks for nothing: use 1 or more, or echo=true", param="max_tokens")
    return limit


def _most_prompt(body: dict) -> int | None:
    most = number(body, name="truncate_prompt_tokens", kind=int, usual=None)
    if most is not None and most < 1 and most != -1:
        raise BadRequest(f"truncate_prompt_tokens={most}: must be -1, or 1 or more", param="truncate_prompt_tokens")
    return most


def _salt(body: dict) -> str:
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise BadRequest(f"cache_salt={shown(salt)}: must be a text that is not empty", param="cache_salt")
    return salt or ""


def _cuts_end(body: dict) -> bool:
    side = body.get("truncation_side", "left")
    if side not in ("left", "right"):
        raise BadRequest(f"truncation_side={shown(side)}: must be left or right", param="truncation_side")
    return side == "right"


def _sampling(
    body: dict, *, usual: SamplingParams, limit: int | None, likely: int, with_prompt: bool
) -> SamplingParams:
    values: dict[str, Any] = {field.name: getattr(usual, field.name) for field in fields(SamplingParams)}
    for name, kind in _NUMBERS.items():
        values[name] = number(body, name=name, kind=kind, usual=values[name])
    if values["top_k"] == -1:  # vLLM's value for all
        values["top_k"] = 0
    if "allowed_token_ids" in body and not body["allowed_token_ids"]:
        raise BadRequest("allowed_token_ids is empty: name tokens, or leave it out", param="allowed_token_ids")
    values |= {"max_tokens": limit or 1, "logprobs": likely, "logit_bias": _bias(body), "prompt_logprobs": with_prompt}
    values["allowed_token_ids"] = tuple(dict.fromkeys(token_list(body, name="allowed_token_ids", most=_ALLOWED)))
    values["cache_salt"] = _salt(body)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        text = str(error).removeprefix("sampling.")
        raise BadRequest(text, param=text.partition("=")[0]) from None


def _best_of(body: dict, *, sampling: SamplingParams, stream: bool) -> SamplingParams:
    """Returns sampling with the number of answers to generate."""
    drawn = number(body, name="best_of", kind=int, usual=sampling.n)
    if drawn == sampling.n:
        return sampling
    if drawn < sampling.n or stream:
        reason = "a stream cannot wait for the best answer" if stream else f"must be n={sampling.n} or more"
        raise BadRequest(f"best_of={drawn}: {reason}", param="best_of")
    return replace(sampling, n=drawn)


def _tops(body: dict, *, chat: bool, usual: int | None, most: int) -> tuple[int | None, int | None]:
    """Returns the numbers of likely tokens per token and per prompt token, or None without log-probabilities.

    A chat has a flag and a number. Completions have a number, where 0 means only the tokens themselves. usual: the default.
    """
    tops = usual
    if "logprobs" in body and not chat:
        tops = number(body, name="logprobs", kind=int, usual=0)
    elif "logprobs" in body:
        tops = number(body, name="top_logprobs", kind=int, usual=0) if flag(body, name="logprobs") else None
    prompt_tops = number(body, name="prompt_logprobs", kind=int, usual=None)
    for name, value in (("top_logprobs" if chat else "logprobs", tops), ("prompt_logprobs", prompt_tops)):
        if value is not None and value > most:
            raise BadRequest(
                f"{value} likely tokens at each position, and this server gives {most} at most: ask for fewer",
                param=name,
            )
    if prompt_tops is not None and prompt_tops < 0:
        raise BadRequest(f"prompt_logprobs={prompt_tops}: must be 0 or more", param="prompt_logprobs")
    return tops, prompt_tops


def _bias(body: dict) -> Mapping[int, float]:
    found = body.get("logit_bias", {})
    if not isinstance(found, dict) or not all(
        re.fullmatch(r"[0-9]{1,18}", token) and isinstance(value, int | float) and not isinstance(value, bool)
        for token, value in found.items()
    ):
        raise BadRequest('logit_bias must map token ids to numbers, as in {"50256": -100}', param="logit_bias")
    if len(found) > MANY:
        raise BadRequest(f"logit_bias may have {MANY} tokens at most, and has {len(found)}", param="logit_bias")
    return {int(token): number(found, name=token, kind=float, usual=0.0) for token in found}


def read_prompts(body: dict, *, name: str) -> tuple[str | list[int], ...]:
    """Returns one text, one list of tokens, or a list of either. Raises BadRequest for something else."""
    found = body.get(name, "")
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
        f"{name} must be a text, a list of texts, a list of token ids, or a list of such lists", param=name
    )


def ignored(body: dict, *, chat: bool) -> tuple[str, ...]:
    """Returns the ignored fields. Raises BadRequest for an unsupported field that would change the answer."""
    known = CHAT if chat else COMPLETIONS
    for name, value in body.items():
        if name in _UNDONE and not _is_neutral(value, neutral=_UNDONE[name][0]):
            raise BadRequest(f"{name} is not supported: {_UNDONE[name][1]}", param=name)
        if name in _ONE_ROUTE and _ONE_ROUTE[name][0] is known and not _is_neutral(value, neutral=_ONE_ROUTE[name][1]):
            raise BadRequest(f"{name}={shown(value)}: {_ONE_ROUTE[name][2]}", param=name)
    return tuple(sorted(body.keys() - known - _UNDONE.keys() - _ONE_ROUTE.keys()))


def header(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the response's header with the ignored fields."""
    if not names:
        return {}
    safe = (shown(name).encode("ascii", "backslashreplace").decode() for name in names[:_NAMES])
    text = ", ".join("".join(letter if letter.isprintable() else "?" for letter in name) for name in safe)
    return {"x-ztk-ignored-fields": text + ", ..." * (len(names) > _NAMES)}


def _is_neutral(value: object, *, neutral: tuple[Any, ...]) -> bool:
    """Returns whether a value is neutral. Numbers are not flags: true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
