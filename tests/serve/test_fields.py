"""Fields of requests: accepted, acted on as vLLM acts on them, or refused by their names."""

import json
import logging

import httpx
import pytest

from tests.serve.test_server import Chatting, start
from ztk.inference import SamplingParams
from ztk.serve.bodies import read_body
from ztk.serve.fields import header, ignored
from ztk.serve.text import TextStream
from ztk.serve.values import BadRequest

USER = [{"role": "user", "content": "x"}]
EVERY_DAY = {
    **{"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"},
    **{"reasoning_effort": "low", "verbosity": "low", "safety_identifier": "s", "priority": 1},
}


@pytest.fixture(scope="module")
def running():
    found = start(tokenizer=Chatting())
    yield found
    found.stop()


def post(running, body, *, path="completions"):
    return httpx.post(f"{running.url}/v1/{path}", json=body, timeout=60)


def chosen(running, body, **more):
    found = post(running, {"prompt": "abc", "seed": 4, "max_tokens": 12} | body, **more)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def test_fields_without_an_effect_are_accepted_and_named(running, caplog):
    no_ops = {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True, "n": 1}
    body = {"messages": USER, "max_tokens": 4, "seed": 1} | no_ops
    with caplog.at_level(logging.WARNING, logger="ztk.serve.app"):
        plain, first, again = (
            post(running, body | more, path="chat/completions")
            for more in ({}, EVERY_DAY, EVERY_DAY | {"stream": True})
        )
    assert [found.status_code for found in (plain, first, again)] == [200] * 3
    assert "x-ztk-ignored-fields" not in plain.headers
    assert first.json()["choices"] == plain.json()["choices"]
    for found in (first, again):
        assert found.headers["x-ztk-ignored-fields"] == ", ".join(sorted(EVERY_DAY))
    named = [record.getMessage() for record in caplog.records]
    assert sum("the field user," in text for text in named) == 1


def test_the_header_of_ignored_fields_is_short_and_printable():
    [(name, text)] = header(tuple(["é\n\r: x", "a" * 500] + [f"f{number}" for number in range(40)])).items()
    assert name == "x-ztk-ignored-fields" and text.isascii() and text.isprintable() and len(text) < 400
    assert text.endswith(", ...") and "f13" in text and "f20" not in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "b"), ("use_beam_search", True), ("truncate_prompt_tokens", 5), ("modalities", ["audio"]),
        ("functions", [{}]), ("chat_template", "{{ 1 }}"), ("n_predict", 5), ("repeat_penalty", 1.1),
        ("mirostat", 2), ("typical_p", 0.9), ("mirostat", True),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_its_name(field, value):
    with pytest.raises(BadRequest, match=f"{field} is not supported") as error:
        ignored({"prompt": "a", field: value}, chat=False)
    assert error.value.param == field


def test_values_that_change_nothing_are_no_reason_to_refuse():
    neutral = {"suffix": "", "use_beam_search": False, "modalities": ["text"], "n_predict": -1, "mirostat": 0}
    assert ignored({"prompt": "a"} | neutral, chat=False) == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"min_tokens": "2"}, "min_tokens='2': must be an integer"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 50}, "min_tokens=50 is more than the 12 tokens"),
        ({"bad_words": [5]}, "bad_words must be a text or a list of texts"),
        ({"bad_words": ["a"] * 500}, "bad_words may have 128 texts"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids must be a list of token ids"),
        ({"allowed_token_ids": [200]}, "token 200 is outside the vocabulary of 128"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: must be 0 or more"),
        ({"prompt_logprobs": 1, "stream": True}, "come with the whole answer"),
        ({"return_token_ids": 1}, "return_token_ids=1: must be true or false"),
        ({"best_of": 2, "n": 3}, "best_of=2: must be n=3 or more"),
        ({"best_of": 2, "stream": True}, "a stream cannot wait for the best answer"),
        ({"include_stop_str_in_output": "yes"}, "must be true or false"),
        ({"stop_token_ids": {"a": 1}}, "stop_token_ids must be a list of token ids"),
        ({"allowed_token_ids": [5], "bad_words": ["\x05"]}, "no token is left to draw"),
    ],
)
def test_values_of_another_type_or_size_get_400(running, body, message):
    found = post(running, {"prompt": "abc", "max_tokens": 12} | body)
    assert found.status_code == 400 and message in found.json()["error"]["message"], found.text


def test_a_request_that_leaves_no_token_ends_its_stream_as_refused(running):
    found = post(running, {"prompt": "abc", "stream": True, "allowed_token_ids": [5], "bad_words": ["\x05"]})
    assert '"type": "invalid_request_error"' in found.text


def test_tokens_are_allowed_banned_and_put_off(running):
    plain = chosen(running, {"return_token_ids": True})
    assert plain["prompt_token_ids"] == [97, 98, 99] and bytes(plain["token_ids"]).decode() == plain["text"]
    assert set(chosen(running, {"allowed_token_ids": [65, 66]})["text"]) <= {"A", "B"}
    first, second = plain["text"][:2]
    assert first not in chosen(running, {"bad_words": [first]})["text"]
    assert chosen(running, {"bad_words": [plain["text"][:2]]})["text"][:2] not in (first + second, "")
    stopped = chosen(running, {"stop_token_ids": [ord(second)]})
    assert stopped["text"] == first and stopped["finish_reason"] == "stop"
    late = chosen(running, {"stop_token_ids": [ord(second)], "min_tokens": 6, "return_token_ids": True})
    assert ord(second) not in late["token_ids"][:6] and len(late["token_ids"]) >= 6


def test_a_stop_text_is_shown_if_asked_and_counts_after_min_tokens(running):
    text = chosen(running, {})["text"]
    stop = text[3:5]
    end = text.find(stop) + 2
    assert chosen(running, {"stop": stop, "include_stop_str_in_output": True})["text"] == text[:end]
    assert chosen(running, {"stop": text[3], "min_tokens": 9})["text"][:9] == text[:9]
    stream = TextStream(Chatting(), stops=("b",), first_stop=2)
    assert "".join(stream.push(ord(letter)) for letter in "abcb") == "abc" and stream.stopped


def test_prompt_logprobs_have_vllms_form(running):
    found = chosen(running, {"prompt_logprobs": 2})["prompt_logprobs"]
    assert found[0] is None and len(found) == 3 and "98" in found[1] and "99" in found[2]
    ranks = sorted(item["rank"] for item in found[1].values() if item["rank"] is not None)
    assert ranks == [1, 2] and all(item["logprob"] <= 0 for item in found[1].values())
    echoed = chosen(running, {"echo": True, "logprobs": 0, "max_tokens": 1})["logprobs"]["token_logprobs"]
    assert [found[1]["98"]["logprob"], found[2]["99"]["logprob"]] == pytest.approx(echoed[1:3])
    chat = post(running, {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0}, path="chat/completions").json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_best_of_returns_the_likeliest_answers(running):
    every = post(running, {"prompt": "q", "n": 4, "seed": 3, "max_tokens": 6, "logprobs": 0}).json()["choices"]
    best = post(running, {"prompt": "q", "n": 1, "best_of": 4, "seed": 3, "max_tokens": 6}).json()
    mean = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in every]
    assert len(best["choices"]) == 1 and best["choices"][0]["text"] == every[mean.index(max(mean))]["text"]
    assert best["choices"][0]["index"] == 0 and best["usage"]["completion_tokens"] == 24


def test_ids_come_in_a_stream_too(running):
    body = {"prompt": "abc", "seed": 4, "max_tokens": 6, "return_token_ids": True, "stream": True}
    events = [json.loads(line[6:]) for line in post(running, body).text.split("\n\n") if line.startswith("data: {")]
    assert events[0]["choices"][0]["prompt_token_ids"] == [97, 98, 99]
    drawn = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert drawn == chosen(running, {"return_token_ids": True, "max_tokens": 6})["token_ids"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has tokenize"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        ({"continue_final_message": True}, "goes with add_generation_prompt=false"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "tool_call_id=5: must be a text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}]}, "arguments"),
    ],
)  # fmt: skip
def test_chat_fields_of_another_form_are_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        read_body(json.dumps({"messages": USER} | body).encode(), chat=True, usual=SamplingParams())
