"""OpenAI's Responses interface: the answers of chats in its shape, by OpenAI's client and its own classes of events."""

import json
import threading
from types import SimpleNamespace
from typing import Literal

import openai
import pydantic
import pytest
from openai.types import responses

from tests.serve.test_server import HTTP, Chatting, start
from ztk.inference import Output, SamplingParams
from ztk.serve.answers import Shape
from ztk.serve.app import ServePolicy
from ztk.serve.bodies import read_body
from ztk.serve.messages import PLAIN
from ztk.serve.responses import ResponseReply, Stored, _Events, read_turn
from ztk.serve.values import BadRequest

EVENT = pydantic.TypeAdapter(responses.ResponseStreamEvent)


class Knowing(Chatting):
    """Its template shows calls, and the names of tools."""

    template = "{{ tools }}"

    def chat(self, messages, *, options=PLAIN):
        named = [tool["function"]["name"] for tool in options.tools]
        return self.encode(json.dumps([named, *messages]))


class City(pydantic.BaseModel):
    """A city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


TOOL = {"type": "function", "name": "City", "parameters": City.model_json_schema(), "strict": True}


@pytest.fixture(scope="module")
def running():
    found = start(tokenizer=Chatting(), policy=ServePolicy(max_tokens=6))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def knowing():
    found = start(tokenizer=Knowing(), policy=ServePolicy(), max_sequences=8)
    yield found
    found.stop()


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(running):
    return client_of(running)


@pytest.fixture
def tool_client(knowing):
    return client_of(knowing)


INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]
GIVEN = {"temperature": 0.8, "extra_body": {"seed": 5}}


def events_of(server, body):
    """Each event as the client's class for its type, which checks every field."""
    text = HTTP.post(f"{server.url}/v1/responses", json=body | {"stream": True}, timeout=60).text
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = EVENT.validate_python(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {event.type}"
        found.append(event)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def test_a_response_has_the_answer_of_the_chat(client):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "a\nb"}, *INPUT[1:]]
    chat = client.chat.completions.create(model="tiny", messages=messages, **GIVEN)
    found = client.responses.create(model="tiny", instructions="be short", input=INPUT, **GIVEN)
    assert found.output_text == chat.choices[0].message.content and found.output_text
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.output_tokens == chat.usage.completion_tokens == 6
    assert found.instructions == "be short" and found.output[0].status == "incomplete"


def test_a_complete_response_is_one_of_the_clients_class(running, monkeypatch):
    monkeypatch.setattr(
        Chatting, "template", "{{ tools }}"
    )  # which `Chatting` leaves out, so that the prompt stays short
    body = {"input": "ab", "metadata": {"a": "b"}, "max_output_tokens": 3, "tools": [TOOL], "tool_choice": "none"}
    found = HTTP.post(f"{running.url}/v1/responses", json=body, timeout=60)
    response = responses.Response.model_validate(found.json(), strict=False)
    assert response.metadata == {"a": "b"} and response.max_output_tokens == 3 and response.tools[0].name == "City"
    assert response.tool_choice == "none" and response.text.format.type == "text" and response.store


def test_a_stream_of_a_response_has_its_text_in_deltas(client, running):
    whole = client.responses.create(model="tiny", input="ab", max_output_tokens=4, **GIVEN)
    events = events_of(running, {"input": "ab", "max_output_tokens": 4, "temperature": 0.8, "seed": 5})
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage and whole.usage.output_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_keeps_to_a_schema(tool_client, stream):
    """The client's `parse` and `stream` send a class as text.format."""
    asked = {"model": "tiny", "input": "x", "text_format": City, "temperature": 0.7, "extra_body": {"seed": 2}}
    if not stream:
        assert tool_client.responses.parse(**asked).output_parsed.city in ("Rome", "Oslo")
        return
    with tool_client.responses.stream(**asked) as events:
        kinds = [event.type for event in events]
        found = events.get_final_response()
    assert found.output_parsed.city in ("Rome", "Oslo") and "response.output_text.delta" in kinds


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "City"}])
def test_a_response_calls_functions(knowing, tool_client, choice, stream):
    asked = {"input": "hi", "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0.7}
    if stream:
        events = events_of(knowing, asked)
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[2] == "output_item.added" and events[2].item.type == "function_call"
        assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
        assert "".join(one.delta for one in events if one.type.endswith("arguments.delta")) == events[-3].arguments
        output = events[-1].response.output
        assert output == [events[-2].item]
        with tool_client.responses.stream(model="tiny", **asked) as own:
            assert own.get_final_response().output[0].type == "function_call"
    else:
        output = tool_client.responses.create(model="tiny", **asked).output
    [call] = output
    City.model_validate(json.loads(call.arguments))
    assert (call.type, call.name, call.status) == ("function_call", "City", "completed") and call.call_id != call.id


def test_calls_and_their_results_become_messages_of_the_chat(knowing):
    """The messages that a client sends back: the output of a response, then the result of the function."""
    sent = [
        {"role": "user", "content": "hi"},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "City", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "City", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "warm"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "cold"},
    ]
    turn = read_turn({"input": sent, "tools": [TOOL]}, stored=Stored())
    user, said, first, second = turn.body["messages"]
    assert user == sent[0] and said["content"] == "I look"
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    assert (first, second) == (
        {"role": "tool", "content": "warm", "tool_call_id": "c1"},
        {"role": "tool", "content": "cold", "tool_call_id": "c2"},
    )
    assert turn.body["tools"][0]["function"] == {name: TOOL[name] for name in ("name", "parameters", "strict")}
    found = client_of(knowing).responses.create(model="tiny", input=sent, tools=[TOOL], max_output_tokens=3)
    assert found.usage.output_tokens == 3


def test_a_conversation_goes_on_by_the_id_of_its_last_response(client):
    first = client.responses.create(model="tiny", input="ab", instructions="be short", **GIVEN)
    second = client.responses.create(model="tiny", input="d", previous_response_id=first.id, **GIVEN)
    whole = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": first.output_text}, INPUT[-1]]
    assert second.output_text == client.responses.create(model="tiny", input=whole, **GIVEN).output_text
    assert second.previous_response_id == first.id  # without the instructions of the first, as OpenAI has it
    streamed = list(client.responses.create(model="tiny", input="ab", stream=True, instructions="be short", **GIVEN))
    third = client.responses.create(
        model="tiny", input="d", previous_response_id=streamed[-1].response.id, max_output_tokens=6, **GIVEN
    )
    assert third.output_text == second.output_text
    unstored = client.responses.create(model="tiny", input="ab", store=False, max_output_tokens=1)
    for name in (unstored.id, "resp_x"):
        with pytest.raises(openai.BadRequestError, match="not found: the server stores the last 1024") as error:
            client.responses.create(model="tiny", input="d", previous_response_id=name)
        assert error.value.code == "previous_response_not_found"


def test_conversations_are_stored_up_to_a_number_and_a_size():
    stored = Stored(conversations=2, characters=200)
    for name in "abc":
        stored.keep(name, messages=({"content": name},))
    assert stored.conversation("b") == ({"content": "b"},)
    with pytest.raises(BadRequest, match="'a' not found"):
        stored.conversation("a")
    stored.keep("d", messages=({"content": "d" * 150},))  # b was used after c
    assert stored.conversation("d") and stored.conversation("b")
    stored.keep("e", messages=({"content": "e" * 300},))
    for name in "bde":
        with pytest.raises(BadRequest):
            stored.conversation(name)


class Whole(Chatting):
    """A token for each piece of a text, and token 0 for nothing."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces = ["", *pieces]

    def decode(self, tokens):
        return "".join(self.pieces[token] for token in tokens)


def written(text, *, finish="stop", stored=None, size=1):
    """Events of an answer whose characters come `size` at a time, and the complete response."""
    tokenizer = Whole([text[at : at + size] for at in range(0, len(text), size)])
    turn = read_turn({"input": "x", "tools": [TOOL]}, stored=Stored())
    replies = []
    for stream in (True, False):
        asked = read_body(turn.body | {"stream": stream}, chat=True, usual=SamplingParams())
        job = SimpleNamespace(prompt=[0], sampling=SamplingParams())
        shape = Shape(id="resp_1", model="m", chat=True, created=0)
        kept = stored if stream and stored is not None else Stored()
        reply = ResponseReply([job], asked=asked, shape=shape, tokenizer=tokenizer, turn=turn, stored=kept)
        tokens = range(1, len(tokenizer.pieces))
        outputs = [
            Output(request_id=0, sample=0, token=token, logprob=0.0, processed_logprob=0.0, finish_reason=last)
            for token, last in zip(tokens, [None] * (len(tokens) - 1) + [finish], strict=True)
        ]
        raw = reply.opening()
        for output in outputs:
            reply.keep([(0, output)])
            raw += reply.take_kept()
        replies.append(raw + reply.closing() if stream else reply.body())
    blocks = replies[0].decode().strip().split("\n\n")
    events = [EVENT.validate_python(json.loads(block.split("data: ", 1)[1])) for block in blocks]
    return events, responses.Response.model_validate(json.loads(replies[1]))


CALL = '<tool_call>\n{"name": "City", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"I look\n{CALL}\n{CALL}", ["message", "function_call", "function_call"]),
        (f"\n{CALL}", ["function_call"]),
        (" ", ["message"]),
        ("a b", ["message"]),
    ],
)
@pytest.mark.parametrize("size", [1, 30])
def test_items_of_a_stream_equal_the_complete_response(text, kinds, size):
    events, whole = written(text, size=size)
    assert [item.type for item in whole.output] == kinds
    strip = {"id": True, "call_id": True}
    assert [item.model_dump(exclude=strip) for item in events[-1].response.output] == [
        item.model_dump(exclude=strip) for item in whole.output
    ]
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done] == list(range(len(kinds)))
    assert [event.item.id for event in added] == [item.id for item in events[-1].response.output]


@pytest.mark.parametrize("size", [1, 7, 30, 45])
def test_text_after_a_call_begins_where_the_call_has_ended(size):
    """Also where one piece has the end of the call and the beginning of the text."""
    events, _ = written(f"{CALL} Bye, {CALL}", size=size)
    call, message, other = events[-1].response.output
    assert json.loads(call.arguments) == json.loads(other.arguments) == {"city": "Rome"}
    assert message.content[0].text.strip() == "Bye,"


@pytest.mark.parametrize("length", [40, 50, 55, len(CALL) - 1])
def test_a_call_that_is_cut_off_does_not_end_its_conversation(length):
    stored = Stored()
    events, whole = written(CALL[:length], finish="length", stored=stored)
    assert events[-1].type == "response.incomplete" and whole.status == "incomplete"
    turn = read_turn({"input": "go on", "previous_response_id": "resp_1"}, stored=stored)
    asked = read_body(turn.body, chat=True, usual=SamplingParams())
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "user"]


def test_a_call_may_come_in_pieces():
    """As in the chunks of a chat: the name first, then parts of the arguments."""
    events = _Events()
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "City", "arguments": ""}}
    raw = [*events.of_text(" "), *events.of_call(first)]
    for part in ('{"city"', ': "Rome"}'):
        raw += events.of_call({"index": 0, "function": {"arguments": part}})
    raw += [*events.of_call(first | {"index": 1, "id": "c2"}), *events.closed(status="incomplete")]
    found = [EVENT.validate_python(json.loads(one.split(b"data: ", 1)[1])) for one in raw]
    assert [event.delta for event in found if event.type.endswith("arguments.delta")] == ['{"city"', ': "Rome"}']
    assert [(item["call_id"], item["arguments"], item["status"]) for item in events.output] == [
        ("c1", '{"city": "Rome"}', "completed"),
        ("c2", "", "incomplete"),
    ]


def test_a_conversation_is_stored_outside_the_event_loop(running, monkeypatch):
    """It may have megabytes, and other streams go on meanwhile."""
    names, keep = [], Stored.keep

    def keeping(self, response, *, messages):
        names.append(threading.current_thread().name)
        keep(self, response, messages=messages)

    monkeypatch.setattr(Stored, "keep", keeping)
    assert events_of(running, {"input": "ab", "max_output_tokens": 2})[-1].type == "response.incomplete"
    assert len(names) == 1 and names[0].startswith("ztk-serve-whole")


def test_a_stream_that_fails_ends_with_its_event(running):
    """No token is left to draw."""
    events = events_of(running, {"input": "x", "allowed_token_ids": [5], "bad_words": ["\x05"]})
    assert events[-1].type == "response.failed" and events[-1].response.error.code == "invalid_prompt"
    assert "no token is left" in events[-1].response.error.message


def test_fields_without_an_effect_are_named(running):
    body = {"input": "x", "max_output_tokens": 2, "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
    body |= {"include": ["reasoning.encrypted_content"], "truncation": "disabled", "metadata": {}, "store": False}
    found = HTTP.post(f"{running.url}/v1/responses", json=body, timeout=60)
    assert found.headers["x-ztk-ignored-fields"] == "include, reasoning, verbosity"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "a", "tools": [{"type": "web_search"}]}, r"tools\[0\] is web_search: send functions"),
        ({"input": "a", "extra_body": {"tools": [{"type": "function", "function": {}}]}}, r'"function", "name"'),
        ({"input": "a", "extra_body": {"tools": 5}}, "tools must be a list of functions"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "is item_reference: send messages, function_call"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "output must be a text"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1]"}]}, "JSON object"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id must be a text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "has a part of type input_image, and this",
        ),
        ({"input": [{"role": 5, "content": "a"}]}, "role must be a text"),
        ({"input": []}, "input must be a text or a list of messages"),
        ({"input": "a", "conversation": "c"}, "conversation is not supported: send previous_response_id"),
        ({"input": "a", "background": True}, "background is not supported"),
        ({"input": "a", "truncation": "auto"}, "truncation=auto is not supported: send a shorter input"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs is not supported: use /v1/chat/completions"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include has message.output_text.logprobs"),
        ({"input": "a", "instructions": ["b"]}, "instructions must be a text"),
        ({"input": "a", "max_output_tokens": "b"}, "max_output_tokens='b': must be an integer"),
        ({"input": "a", "extra_body": {"n": 2}}, "n is not supported"),
        ({"input": "a", "extra_body": {"messages": [1]}}, "messages is not supported: send them as input"),
    ],
)
def test_other_responses_are_refused(client, body, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(model="tiny", **body)
