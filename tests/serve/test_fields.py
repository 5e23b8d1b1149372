"""Fields of requests: accepted, acted on as vLLM acts on them, or refused by their names."""

import json
import logging

import pytest

from tests.serve.test_server import HTTP, Chatting, start
from ztk.inference import SamplingParams
from ztk.serve.bodies import header, ignored, read_body
from ztk.serve.text import TextStream
from ztk.serve.values import BadRequest, parsed

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
    return HTTP.post(f"{running.url}/v1/{path}", json=body, timeout=60)


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
        ("suffix", "b"), ("use_beam_search", True), ("modalities", ["audio"]), ("system", "be short"),
        ("instructions", "be short"), ("input", "a"), ("stop_sequences", ["a"]), ("max_output_tokens", 5),
        ("max_new_tokens", 5), ("logprob_token_ids", [5]), ("repetition_detection", {"max_pattern_size": 2}),
        ("thinking_token_budget", 5), ("watermarking", True), ("n_probs", 5), ("n_cmpl", 2), ("lora", [{"id": 0}]),
        ("top_n_sigma", 1.0),
        ("functions", [{}]), ("chat_template", "{{ 1 }}"), ("n_predict", 5), ("repeat_penalty", 1.1),
        ("mirostat", 2), ("typical_p", 0.9), ("mirostat", True),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_its_name(field, value):
    with pytest.raises(BadRequest, match=f"{field} is not supported") as error:
        ignored({"prompt": "a", field: value}, chat=False)
    assert error.value.param == field


@pytest.mark.parametrize(
    ("field", "meant"),
    [("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("temprature", "temperature"), ("topp", "top_p"), ("seeds", "seed")],
)  # fmt: skip
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_a_misspelt_field_is_refused_with_the_name_that_is_meant(running, route, field, meant):
    asked = {"completions": {"prompt": "a"}, "chat/completions": {"messages": USER}, "responses": {"input": "a"}}[route]
    found = post(running, asked | {field: 1}, path=route)
    assert found.status_code == 400 and found.json()["error"]["param"] == field
    assert f"did you mean {meant}?" in found.json()["error"]["message"]


def test_fields_of_other_servers_are_no_misspellings():
    others = ["models", "return_tokens", "parse_tool_calls", "watermark", "top_a", "prompt_id", "mirostat_tau", "usr"]
    assert ignored({"prompt": "a", "x" * 5000: 1} | dict.fromkeys(others, 1), chat=False) == tuple(
        sorted(["x" * 5000, *others])
    )


def test_values_that_change_nothing_are_no_reason_to_refuse():
    neutral = {"suffix": "", "use_beam_search": False, "modalities": ["text"], "n_predict": -1, "mirostat": 0}
    neutral |= {"thinking_token_budget": -1, "watermarking": False, "n_probs": 0, "lora": [], "stop_sequences": []}
    assert ignored({"prompt": "a"} | neutral, chat=False) == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: must be -1, or 1 or more"),
        ({"truncation_side": "both"}, "truncation_side=both: must be left or right"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids=1: must be true or false"),
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
        ({"best_of": 10**30}, f"1 prompts times n={10**30} are"),
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
    every = chosen(running, {"prompt_logprobs": 20})["prompt_logprobs"]
    for own, more in zip(found[1:], every[1:], strict=True):
        ranks = sorted(item["rank"] for item in own.values())
        assert ranks[:2] == [1, 2] and len(ranks) <= 3 and all(item["logprob"] <= 0 for item in own.values())
        likelier = [item["logprob"] for item in more.values()]
        for item in own.values():  # of tokens as likely or likelier, as in vLLM
            above = sum(value >= item["logprob"] for value in likelier)
            assert item["rank"] == above if item["rank"] <= 20 else item["rank"] > 20
    assert any(item["rank"] > 20 for own in every[1:] for item in own.values())
    echoed = chosen(running, {"echo": True, "logprobs": 0, "max_tokens": 1})["logprobs"]["token_logprobs"]
    assert [found[1]["98"]["logprob"], found[2]["99"]["logprob"]] == pytest.approx(echoed[1:3])
    chat = post(running, {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0}, path="chat/completions").json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_a_long_prompt_is_cut_as_asked(running):
    asked = {"prompt": "abcdef", "return_token_ids": True, "max_tokens": 4}
    for more, kept in (
        ({"truncate_prompt_tokens": 2}, b"ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, b"ab"),
        ({"truncate_prompt_tokens": 50}, b"abcdef"),
        ({"truncation_side": "right"}, b"abcdef"),
    ):
        assert bytes(chosen(running, asked | more)["prompt_token_ids"]) == kept
    whole = {"prompt": "a" * 600 + "b", "truncate_prompt_tokens": -1}  # of 512 tokens, 4 are the answer's
    found = chosen(running, asked | whole)
    assert len(found["prompt_token_ids"]) == 508 and found["prompt_token_ids"][-1] == ord("b")
    chat = post(running, {"messages": USER, "max_tokens": 1, "truncate_prompt_tokens": 3}, path="chat/completions")
    assert chat.json()["usage"]["prompt_tokens"] == 3


def test_tokens_are_named_by_their_ids_if_asked(running):
    asked = {"logprobs": 2, "echo": True, "max_tokens": 1, "return_tokens_as_token_ids": True}
    found = chosen(running, asked | {"return_token_ids": True})
    names = [f"token_id:{token}" for token in (*b"abc", *found["token_ids"])]
    assert found["logprobs"]["tokens"] == names and found["logprobs"]["top_logprobs"][1].keys() <= {
        f"token_id:{token}" for token in range(300)
    }
    chat = {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    [token] = post(running, chat, path="chat/completions").json()["choices"][0]["logprobs"]["content"]
    assert token["token"] == f"token_id:{token['bytes'][0]}" and token["top_logprobs"][0]["token"][:9] == "token_id:"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_event_counts_tokens_if_asked(running, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 4, "stream": True, "stream_options": options}
    body |= {"messages": USER} if "chat" in path else {"prompt": "abc"}
    text = post(running, body, path=path).text
    *chunks, last = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[-4:] == [1, 2, 3, 4] and {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {
        last["usage"]["prompt_tokens"]
    }
    plain = post(running, body | {"stream_options": {"continuous_usage_stats": True}}, path=path).text
    assert "usage" not in plain


@pytest.mark.parametrize("stream", [False, True])
def test_the_beginning_of_an_answer_is_repeated_in_a_chat(running, stream):
    messages = [*USER, {"role": "assistant", "content": "so "}]
    texts = []
    for more in ({"echo": False}, {"echo": True}, {"echo": True, "messages": USER}, {"messages": USER}):
        body = {"messages": messages, "seed": 4, "max_tokens": 5, "stream": stream} | more
        found = post(running, body, path="chat/completions")
        if stream:
            chunks = [json.loads(line[6:]) for line in found.text.split("\n\n") if line.startswith("data: {")]
            texts.append("".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks))
        else:
            texts.append(found.json()["choices"][0]["message"]["content"])
    assert texts[1] == "so " + texts[0] and texts[2] == texts[3]


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
        read_body(parsed(json.dumps({"messages": USER} | body).encode()), chat=True, usual=SamplingParams())
