"""Request bodies: read as OpenAI's, refused with the field's name."""

import json
from dataclasses import replace

import pytest

from ztk.inference import SamplingParams
from ztk.serve.bodies import read_body
from ztk.serve.values import BadRequest, parsed

USUAL = SamplingParams(max_tokens=32, temperature=0.5)


def read(chat: bool = False, **body: object):
    return read_body(parsed(json.dumps(body).encode()), chat=chat, usual=USUAL)


def test_what_is_left_out_is_as_usual():
    asked = read(prompt="a")
    assert asked.sampling == replace(USUAL, max_tokens=1) and asked.max_tokens is None
    assert asked.prompts == ("a",) and not asked.stream


@pytest.mark.parametrize(
    "prompt, prompts", [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))]
)
def test_every_form_of_prompt(prompt, prompts):
    assert read(prompt=prompt).prompts == prompts


def test_numbers_reach_the_sampling():
    asked = read(
        prompt="a",
        temperature=0,
        top_p=0.5,
        top_k=-1,
        n=2,
        seed=7,
        stop="x",
        logprobs=3,
        logit_bias={"5": -100},
        max_tokens=9,
    )
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.n, sampling.seed) == (0, 0.5, 0, 2, 7)
    assert (sampling.logprobs, sampling.logit_bias, sampling.max_tokens, asked.stops) == (3, {5: -100.0}, 9, ("x",))


def test_a_salt_reaches_the_sampling():
    assert read(prompt="a", cache_salt="x").sampling.cache_salt == "x" and not read(prompt="a").sampling.cache_salt
    for salt in ("", 1, ["x"]):
        with pytest.raises(BadRequest, match="cache_salt=.*: must be a text that is not empty"):
            read(prompt="a", cache_salt=salt)


def test_a_chat_says_log_probabilities_with_a_flag():
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    asked = read(chat=True, messages=messages, logprobs=True, top_logprobs=4, max_completion_tokens=5)
    assert (
        asked.sampling.logprobs == 4
        and asked.max_tokens == 5
        and asked.messages == ({"role": "user", "content": "hi"},)
    )
    for more in ({}, {"logprobs": False}):
        with pytest.raises(BadRequest, match="top_logprobs goes with logprobs=true"):
            read(chat=True, messages=messages, top_logprobs=4, **more)
    assert not read(chat=True, messages=messages, top_logprobs=0).with_logprobs
    alone = read(chat=True, messages=messages, logprobs=True)
    assert alone.with_logprobs and alone.sampling.logprobs == 0


def test_zero_likely_tokens_are_not_no_log_probabilities():
    """OpenAI's logprobs=0 of completions: log-probabilities of the tokens themselves."""
    assert not read(prompt="a").with_logprobs and not read(prompt="a", logprobs=None).with_logprobs
    asked = read(prompt="a", logprobs=0, echo=True)
    assert asked.with_logprobs and asked.sampling.logprobs == 0 and asked.sampling.prompt_logprobs


def test_the_servers_options_are_defaults_of_requests():
    usual = SamplingParams(logprobs=2)
    asked = read_body(parsed(b'{"prompt": "a"}'), chat=False, usual=usual, stops=("END",))
    assert asked.with_logprobs and asked.sampling.logprobs == 2 and asked.stops == ("END",)
    asked = read_body(parsed(b'{"prompt": "a", "stop": "x", "logprobs": 0}'), chat=False, usual=usual, stops=("END",))
    assert asked.with_logprobs and asked.sampling.logprobs == 0 and asked.stops == ("x",)


def test_echo_without_tokens_asks_for_the_prompts_log_probabilities():
    asked = read(prompt=[1, 2], echo=True, max_tokens=0, logprobs=1)
    assert asked.sampling.prompt_logprobs and asked.max_tokens == 0


@pytest.mark.parametrize(
    "body, message",
    [
        ({"prompt": "a", "temperature": "hot"}, "temperature='hot': must be a number"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1.0: must be 0, or 1e-06 or more"),
        ({"prompt": "a", "top_p": 0}, "top_p=0.0: must be above 0"),
        ({"prompt": "a", "n": True}, "n=True: must be an integer"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens=-1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 asks for nothing"),
        ({"prompt": 5}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": "a", "stop": [1]}, "stop must be"),
        ({"prompt": "a", "stream": "yes"}, "stream='yes': must be true or false"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias must map"),
        ({"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ({"prompt": "a", "model": 5}, "model must be the name"),
    ],
)
def test_what_cannot_be_meant_is_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        read(**body)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff"])
def test_a_body_must_be_a_json_object(raw):
    with pytest.raises(BadRequest):
        read_body(parsed(raw), chat=False, usual=USUAL)


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]],
)
def test_messages_have_a_role_and_a_text(messages):
    with pytest.raises(BadRequest, match="messages"):
        read(chat=True, messages=messages)


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        (
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "has a part of type image_url, and this server",
        ),
        ({"content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}, "part of type input_audio"),
        ({"content": ["a"]}, "part of type None"),
        ({"content": [{"type": "text", "text": 5}]}, "a part whose text is no text"),
        ({"content": None, "function_call": {"name": "f"}}, "function_call is not supported: send tool_calls"),
        ({"content": "a", "prefix": True}, "prefix is not supported: send continue_final_message=true"),
        ({"content": "a", "audio": {"id": "x"}}, "audio is not supported"),
        ({"content": "a", "reasoning_content": 5}, "reasoning_content=5: must be a text"),
    ],
)
def test_what_a_message_cannot_have_is_refused_in_its_words(message, refusal):
    with pytest.raises(BadRequest, match=refusal) as error:
        read(chat=True, messages=[{"role": "assistant"} | message])
    assert str(error.value).startswith("messages[0].") and error.value.param == "messages"


def test_reasoning_reaches_the_template():
    sent = [{"role": "assistant", "content": "a", "reasoning_content": "b", "refusal": None, "annotations": []}]
    assert read(chat=True, messages=sent).messages == ({"role": "assistant", "content": "a", "reasoning_content": "b"},)


@pytest.mark.parametrize(
    ("chat", "field", "more"),
    [
        (True, "best_of", {"best_of": 5}),
        (False, "top_logprobs", {"top_logprobs": 3}),
        (False, "stream_options", {"stream_options": 5}),
        (True, "add_special_tokens", {"add_special_tokens": True}),
        (True, "prompt", {"prompt": "a"}),
        (False, "messages", {"messages": [{"role": "user", "content": "x"}]}),
        (False, "tools", {"tools": [{"type": "function"}]}),
    ],
)
def test_what_would_be_left_undone_is_refused(chat, field, more):
    body = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "a"}
    with pytest.raises(BadRequest) as error:
        read_body(parsed(json.dumps(body | more).encode()), chat=chat, usual=SamplingParams())
    assert error.value.param == field
