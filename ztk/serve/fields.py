"""The fields of a request: supported ones, and unsupported ones that must have a neutral value.

Other fields are accepted and ignored. The response lists them in the header x-ztk-ignored-fields.
"""

from typing import Any

from ztk.serve.values import BadRequest, shown

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
