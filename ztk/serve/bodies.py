"""Parses OpenAI's request bodies. The type of every supported field is checked, and errors name the field.

Unsupported fields that would change an answer must have a neutral value, and a misspelt field is refused. Other fields are accepted and
ignored: the response lists them in the header x-ztk-ignored-fields.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any

from ztk.inference import SamplingParams
from ztk.serve.messages import MESSAGE_FIELDS, PLAIN, ChatOptions, read_messages, read_options
from ztk.serve.structured import STRUCTURE_FIELDS, Structure, read_structure
from ztk.serve.tools import TOOL_FIELDS, Tools, read_tools
from ztk.serve.values import MANY, BadRequest, choice, flag, number, shown, text_list, thing, token_list

_BAD_WORDS = 128
_ALLOWED = 1 << 18  # allowed tokens, up to the size of a vocabulary
_NAMES = 16  # ignored fields in a header, and fields whose spelling is checked
_MISSPELT = 0.84  # max_token is like max_tokens by 0.95; fields of other servers, except `_OTHERS`, reach 0.8
_LONGEST = 40  # letters of a field whose spelling is checked
_OTHERS = {"models", "parse_tool_calls", "return_tokens", "watermark"}  # of OpenRouter, llama.cpp and TGI


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one request. body_bytes: size of its body. answers: prompts times n. logprobs: number per position. stops: number of stop
    texts."""

    body_bytes: int = 4 << 20
    answers: int = 128
    logprobs: int = 20
    stops: int = 16


def _name(body: dict, *, name: str) -> str:
    if not isinstance(body[name], str):
        raise BadRequest("model must be the name of the model", param=name)
    return body[name]


def _most_prompt(body: dict, *, name: str) -> int:
    most = number(body, name=name, kind=int)
    if most < 1 and most != -1:
        raise BadRequest(f"{name}={most}: must be -1, or 1 or more", param=name)
    return most


def _keys(body: dict, *, name: str) -> tuple[int, ...]:
    keys = token_list(body, name=name)
    if any(not -(2**63) <= key < 2**63 for key in keys):
        raise BadRequest(f"{name} must be integers of 64 bits", param=name)
    return keys


def _field(read: Callable[..., Any], *, default: Any = None) -> Any:
    """Declares a field of requests. read: `(body, name=)` -> its checked value."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A parsed request.

    prompts: texts or token ids, for /completions. messages: messages for /chat/completions. chat: how they are formatted.
    structure: grammar of the answers. stops: stop texts. ignored: fields without an effect.
    max_tokens: 0 with echo requests only the prompt's log-probabilities. None if the request has none; `sampling` then has 1.
    tops: likely tokens for each sampled token, and for an echoed prompt, with the log-probabilities; None without log-probabilities.
    prompt_tops: likely tokens per prompt token in vLLM's format, if requested.
    keeps: number of answers to return, the likeliest of `sampling.n`.
    with_usage: the last event has token counts. with_running_usage: every event has them.

    The other attributes are fields of a request with the names that OpenAI and vLLM give them:
    echo: the answer starts with the prompt, or with the chat's last message if the answer continues it.
    stop_token_ids: tokens that end an answer, in addition to the model's.
    include_stop_str_in_output: with the stop text or token. return_tokens_as_token_ids: log-probabilities identify tokens by id.
    truncate_prompt_tokens: tokens to which a longer prompt is truncated; -1 leaves room for the answer.
    truncation_side: the side that is cut off. add_special_tokens: with the tokens that the tokenizer prepends to a text.

    One is ztk's own. draw_keys: the key of each prompt's random numbers, as in `SamplingParams.draw_key`.
    """

    sampling: SamplingParams
    prompts: tuple[str | list[int], ...]
    messages: tuple[dict[str, Any], ...]
    chat: ChatOptions
    tools: Tools | None
    structure: Structure | None
    stops: tuple[str, ...]
    max_tokens: int | None
    tops: int | None
    prompt_tops: int | None
    keeps: int
    with_usage: bool
    with_running_usage: bool
    ignored: tuple[str, ...]
    model: str | None = _field(_name)
    echo: bool = _field(flag, default=False)
    stream: bool = _field(flag, default=False)
    ignore_eos: bool = _field(flag, default=False)
    stop_token_ids: tuple[int, ...] = _field(token_list, default=())
    bad_words: tuple[str, ...] = _field(partial(text_list, most=_BAD_WORDS), default=())
    skip_special_tokens: bool = _field(flag, default=True)
    include_stop_str_in_output: bool = _field(flag, default=False)
    return_token_ids: bool = _field(flag, default=False)
    return_tokens_as_token_ids: bool = _field(flag, default=False)
    truncate_prompt_tokens: int | None = _field(_most_prompt)
    truncation_side: str = _field(partial(choice, of=("left", "right")), default="left")
    add_special_tokens: bool = _field(flag, default=True)
    draw_keys: tuple[int, ...] = _field(_keys, default=())

    @property
    def with_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.tops is not None


def _top_k(body: dict, *, name: str) -> int:
    most = number(body, name=name, kind=int)
    return 0 if most == -1 else most  # -1 is vLLM's value for all


def _bias(body: dict, *, name: str) -> Mapping[int, float]:
    found = body[name]
    if not isinstance(found, dict) or not all(
        re.fullmatch(r"[0-9]{1,18}", token) and isinstance(value, int | float) and not isinstance(value, bool)
        for token, value in found.items()
    ):
        raise BadRequest(f'{name} must map token ids to numbers, as in {{"50256": -100}}', param=name)
    if len(found) > MANY:
        raise BadRequest(f"{name} may have {MANY} tokens at most, and has {len(found)}", param=name)
    return {int(token): number(found, name=token, kind=float) for token in found}


def _allowed(body: dict, *, name: str) -> tuple[int, ...]:
    if not body[name]:
        raise BadRequest(f"{name} is empty: name tokens, or leave it out", param=name)
    return tuple(dict.fromkeys(token_list(body, name=name, most=_ALLOWED)))


def _salt(body: dict, *, name: str) -> str:
    salt = body[name]
    if not isinstance(salt, str) or not salt:
        raise BadRequest(f"{name}={shown(salt)}: must be a text that is not empty", param=name)
    return salt


# Fields of a request that are attributes of `Asked` and `SamplingParams`, which checks their ranges.
_FIELDS = {one.name: one.metadata["read"] for one in fields(Asked) if "read" in one.metadata}
_SAMPLING: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), partial(number, kind=float)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), partial(number, kind=float)),
    **dict.fromkeys(("n", "seed", "min_tokens"), partial(number, kind=int)),
    "top_k": _top_k,
    "logit_bias": _bias,
    "allowed_token_ids": _allowed,
    "cache_salt": _salt,
    "fp32_logprobs": flag,
}
_SHARED = {
    *(*_FIELDS, *_SAMPLING, *STRUCTURE_FIELDS, "stop", "stream_options"),
    *("max_tokens", "max_completion_tokens", "logprobs", "prompt_logprobs"),
}
COMPLETIONS = _SHARED | {"prompt", "best_of"}
CHAT = _SHARED | {*MESSAGE_FIELDS, *TOOL_FIELDS, "top_logprobs"}

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
    sent = {name: read(body, name=name) for name, read in _FIELDS.items() if name in body}
    echoes, streams = sent.get("echo", False) and not chat, sent.get("stream", False)
    tops, prompt_tops = _tops(body, chat=chat, usual=usual.logprobs or None, most=limits.logprobs)
    limit = _limit(body, echo=echoes)
    if prompt_tops is not None and streams:
        raise BadRequest("prompt_logprobs come with the whole answer: leave stream out", param="prompt_logprobs")
    with_prompt = prompt_tops is not None or (echoes and tops is not None)
    likely = max(tops or 0, prompt_tops or 0)
    sampling = _sampling(body, usual=usual, max_tokens=limit or 1, logprobs=likely, prompt_logprobs=with_prompt)
    prompts = () if chat else read_prompts(body, name="prompt")
    keys = sent.get("draw_keys", ())
    if keys and (len(keys) != max(1, len(prompts)) or sampling.n > 1):
        raise BadRequest(
            f"{len(keys)} draw_keys for {max(1, len(prompts))} prompts and n={sampling.n}: send one per prompt, and n=1",
            param="draw_keys",
        )
    options = thing(body, name="stream_options")
    with_usage = flag(options, name="include_usage")
    drawn = sampling.n if chat else _best_of(body, n=sampling.n, stream=streams)
    if (answers := max(1, len(prompts)) * drawn) > limits.answers:
        raise BadRequest(
            f"{max(1, len(prompts))} prompts times n={drawn} are {answers} answers, and this server gives {limits.answers} to one "
            "request: send fewer at a time",
            param="n" if drawn > 1 else "prompt",
        )
    tools = read_tools(body) if chat else None
    structure = read_structure(body)
    if structure is not None and tools is not None and (tools.required or tools.named):
        raise BadRequest(f"{structure.param} and tool_choice exclude each other: send one", param="tool_choice")
    return Asked(
        sampling=replace(sampling, n=drawn),
        prompts=prompts,
        messages=read_messages(body) if chat else (),
        chat=read_options(body, tools=() if tools is None else tools.given) if chat else PLAIN,
        tools=None if tools is None or tools.forbidden else tools,
        structure=structure,
        stops=text_list(body, name="stop", most=limits.stops) if "stop" in body else stops,
        max_tokens=limit,
        tops=tops,
        prompt_tops=prompt_tops,
        keeps=sampling.n,
        with_usage=with_usage,
        with_running_usage=with_usage and flag(options, name="continuous_usage_stats"),
        ignored=unused,
        **sent,
    )


def _limit(body: dict, *, echo: bool) -> int | None:
    """Returns the tokens of an answer, or None if the body has no limit."""
    limit = number(body, name="max_completion_tokens", kind=int, usual=number(body, name="max_tokens", kind=int))
    if limit == 0 and not echo and "prompt_logprobs" not in body:
        raise BadRequest("max_tokens=0 asks for nothing: use 1 or more, or echo=true", param="max_tokens")
    return limit


def _sampling(body: dict, *, usual: SamplingParams, **others: Any) -> SamplingParams:
    values = {name: read(body, name=name) for name, read in _SAMPLING.items() if name in body}
    try:
        return replace(usual, **values, **others)
    except ValueError as error:
        text = str(error).removeprefix("sampling.")
        raise BadRequest(text, param=text.partition("=")[0]) from None


def _best_of(body: dict, *, n: int, stream: bool) -> int:
    """Returns the number of answers to generate for each prompt."""
    drawn = number(body, name="best_of", kind=int, usual=n)
    if drawn < n or (stream and drawn > n):
        reason = "a stream cannot wait for the best answer" if stream else f"must be n={n} or more"
        raise BadRequest(f"best_of={drawn}: {reason}", param="best_of")
    return drawn


def _tops(body: dict, *, chat: bool, usual: int | None, most: int) -> tuple[int | None, int | None]:
    """Returns the numbers of likely tokens per token and per prompt token, or None without log-probabilities.

    A chat has a flag and a number. Completions have a number, where 0 means only the tokens themselves. usual: the default.
    """
    tops = usual
    if "logprobs" in body and not chat:
        tops = number(body, name="logprobs", kind=int, usual=0)
    elif "logprobs" in body:
        tops = number(body, name="top_logprobs", kind=int, usual=0) if flag(body, name="logprobs") else None
    if chat and tops is None and number(body, name="top_logprobs", kind=int, usual=0):
        raise BadRequest("top_logprobs goes with logprobs=true: send both", param="top_logprobs")
    prompt_tops = number(body, name="prompt_logprobs", kind=int)
    for name, value in (("top_logprobs" if chat else "logprobs", tops), ("prompt_logprobs", prompt_tops)):
        if value is not None and value > most:
            raise BadRequest(
                f"{value} likely tokens at each position, and this server gives {most} at most: ask for fewer",
                param=name,
            )
    if prompt_tops is not None and prompt_tops < 0:
        raise BadRequest(f"prompt_logprobs={prompt_tops}: must be 0 or more", param="prompt_logprobs")
    return tops, prompt_tops


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
    """Returns the ignored fields. Raises BadRequest for a misspelt field and for an unsupported one that would change the answer."""
    known = CHAT if chat else COMPLETIONS
    for name, value in body.items():
        if name in _UNDONE and not _is_neutral(value, neutral=_UNDONE[name][0]):
            raise BadRequest(f"{name} is not supported: {_UNDONE[name][1]}", param=name)
        if name in _ONE_ROUTE and _ONE_ROUTE[name][0] is known and not _is_neutral(value, neutral=_ONE_ROUTE[name][1]):
            raise BadRequest(f"{name}={shown(value)}: {_ONE_ROUTE[name][2]}", param=name)
    unused = tuple(sorted(body.keys() - known - _UNDONE.keys() - _ONE_ROUTE.keys()))
    for name in unused[:_NAMES]:
        if len(name) <= _LONGEST and name not in _OTHERS and (meant := _nearest(name, chat=chat)):
            raise BadRequest(f"{shown(name)}: there is no such field; did you mean {meant}?", param=name)
    return unused


@lru_cache(maxsize=1024)
def _nearest(name: str, *, chat: bool) -> str | None:
    """The field that `name` is probably meant to be."""
    fields_here = [*(CHAT if chat else COMPLETIONS), *_UNDONE, *_ONE_ROUTE]
    return next(iter(difflib.get_close_matches(name, fields_here, n=1, cutoff=_MISSPELT)), None)


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
