"""Clients that the test extra does not install: litellm and LangChain's ChatOpenAI, where they are."""

import json
from typing import Literal

import pydantic
import pytest

from tests.serve.test_server import Chatting, start

USER = [{"role": "user", "content": "hi"}]


class Knowing(Chatting):
    """Its template would show the tools."""

    template = "{{ tools }}"


class City(pydantic.BaseModel):
    """A city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


@pytest.fixture(scope="module")
def url():
    found = start(tokenizer=Knowing(), max_sequences=8)
    yield f"{found.url}/v1"
    found.stop()


def test_litellm(url):
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/tiny", "api_base": url, "api_key": "none", "messages": USER, "seed": 1}
    whole = litellm.completion(**asked, max_tokens=5, user="u").choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, max_tokens=5, stream=True)]
    assert "".join(pieces) == whole
    tool = {"type": "function", "function": {"name": "City", "parameters": City.model_json_schema()}}
    found = litellm.completion(**asked, max_tokens=300, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    [call] = found.choices[0].message.tool_calls
    City.model_validate(json.loads(call.function.arguments))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(url, method):
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="tiny", base_url=url, api_key="none", max_tokens=300, seed=1)
    assert isinstance(model.with_structured_output(City, method=method).invoke("hi"), City)
    assert len(list(model.stream("hi"))) > 100
