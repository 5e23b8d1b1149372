"""OpenAI's Responses interface: the answers of chats in its shape."""

import openai
import pytest

from tests.serve.test_server import Chatting, start
from ztk.serve.app import ServePolicy


@pytest.fixture(scope="module")
def running():
    found = start(tokenizer=Chatting(), policy=ServePolicy(max_tokens=6))
    yield found
    found.stop()


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]
GIVEN = {"temperature": 0.8, "extra_body": {"seed": 5}}


def test_a_response_has_the_answer_of_the_chat(client):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "ab"}, *INPUT[1:]]
    chat = client.chat.completions.create(model="tiny", messages=messages, **GIVEN)
    found = client.responses.create(model="tiny", instructions="be short", input=INPUT, **GIVEN)
    assert found.output_text == chat.choices[0].message.content and found.output_text
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert found.usage.output_tokens == chat.usage.completion_tokens == 6


def test_a_stream_of_a_response_has_its_text_in_deltas(client):
    whole = client.responses.create(model="tiny", input="ab", max_output_tokens=4, **GIVEN)
    events = list(client.responses.create(model="tiny", input="ab", max_output_tokens=4, stream=True, **GIVEN))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage and whole.usage.output_tokens == 4


def test_a_response_keeps_to_a_schema(client):
    form = {"type": "json_schema", "name": "n", "schema": {"enum": [7]}, "strict": True}
    assert client.responses.create(model="tiny", input="x", text={"format": form}).output_text == "7"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id is not supported: send the whole"),
        ({"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools is not supported"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "2"}]}, "is function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "list of input_text"),
        ({"input": []}, "input must be a text or a list of messages"),
        ({"input": "a", "instructions": ["b"]}, "instructions must be a text"),
        ({"input": "a", "max_output_tokens": "b"}, "max_output_tokens='b': must be an integer"),
        ({"input": "a", "extra_body": {"n": 2}}, "n is not supported"),
    ],
)
def test_other_responses_are_refused(client, body, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(model="tiny", **body)
