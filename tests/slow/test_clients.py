"""Clients that the test extra does not install, where they are: litellm, LangChain's ChatOpenAI, lm-evaluation-harness, and vLLM's benchmark
client. `pip install "ztk[clients]"` has the first three."""

import argparse
import json
from typing import Literal

import pydantic
import pytest

from tests.hf.small import save_model
from tests.serve.test_field_table import FIELDS, IGNORED, VLLM
from tests.serve.test_server import Chatting, start
from tests.slow.harness import ANSWER, CHOICE, ROLLING, evaluated, write_tasks
from ztk.serve.models import open_model

USER = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
DOCUMENTS = [
    {"question": question, "choices": choices, "label": label}
    for label, (question, choices) in enumerate(
        [("abc", ["de", "xyz"]), ("hello1", ["a", "b", "cc"]), ("q", ["77", "8", "z9", "z"]), ("zzzz", ["a"] * 5)]
    )
]
# Two fp32 computations of log p of 7 tokens at most, by transformers and by ztk; see PER_TOKEN in tests/inference/test_scoring.py.
ABSOLUTE = 1e-4
# Fields that vLLM declares and ignores: `user`, and the fields of its routes that only render prompts.
UNUSED = ("user", "mm_payload", "return_mm_kwargs", "return_token_offsets")


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with a tokenizer of letters and a chat template, and the tasks."""
    made = save_model(tmp_path_factory.mktemp("model"))
    settings = json.loads((made / "tokenizer_config.json").read_text(encoding="utf-8"))
    (made / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), documents=DOCUMENTS, stop="m")


@pytest.fixture(scope="module")
def served(folder):
    found = start(opened=open_model(str(folder)), max_sequences=8)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def expected(folder, tasks):
    """By the harness's own class for transformers."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    arguments = {"pretrained": str(folder), "dtype": "float32", "max_length": 40}
    return evaluated("hf", arguments=arguments, tasks=[CHOICE, ROLLING, ANSWER], folder=tasks)


def same(found: dict, expected: dict) -> None:
    for name, (answers, metrics) in found.items():
        wanted, numbers = expected[name]
        for own, one in zip(answers, wanted, strict=True):
            if name == ANSWER:
                assert own == one
            elif name == CHOICE:
                assert [flag for _, flag in own] == [flag for _, flag in one]
                assert [value for value, _ in own] == pytest.approx([value for value, _ in one], abs=ABSOLUTE)
            else:
                assert own == pytest.approx(one, abs=ABSOLUTE)
        for metric, value in numbers.items():
            if isinstance(value, float):
                assert metrics[metric] == pytest.approx(value, abs=ABSOLUTE), metric


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


def test_litellm_by_responses(url):
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/tiny", "api_base": url, "api_key": "none", "input": "hi", "max_output_tokens": 5}
    asked |= {"extra_body": {"seed": 1}}
    whole = litellm.responses(**asked).output_text
    deltas = [event.delta for event in litellm.responses(**asked, stream=True) if "text.delta" in event.type]
    assert "".join(deltas) == whole and whole


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(url, method):
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="tiny", base_url=url, api_key="none", max_tokens=300, seed=1)
    assert isinstance(model.with_structured_output(City, method=method).invoke("hi"), City)
    assert len(list(model.stream("hi"))) > 100


def test_langchain_by_responses(url):
    """A stream of typed events, a schema, and a second turn by the id of the first."""
    library = pytest.importorskip("langchain_openai")
    long, short = (
        library.ChatOpenAI(model="tiny", base_url=url, api_key="none", max_tokens=count, use_responses_api=True)
        for count in (300, 5)
    )
    assert isinstance(long.with_structured_output(City).invoke("hi"), City)
    assert len(list(long.stream("hi"))) > 100
    first = short.invoke("hi")
    again = short.invoke("more", previous_response_id=first.response_metadata["id"])
    assert again.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


@pytest.mark.parametrize("sends_tokens", [True, False])
def test_the_harness_scores_by_completions(served, folder, tasks, expected, sends_tokens):
    """The harness's backend local-completions: log-likelihoods through echo and logprobs, and answers."""
    arguments = {"model": served.opened.name, "base_url": f"{served.url}/v1/completions", "tokenizer": str(folder)}
    arguments |= {"tokenizer_backend": "huggingface", "tokenized_requests": sends_tokens, "max_length": 40}
    same(evaluated("local-completions", arguments=arguments, tasks=[CHOICE, ROLLING, ANSWER], folder=tasks), expected)


def test_the_harness_asks_for_chats(served, tasks, folder):
    """The backend local-chat-completions, which sends messages. The expected answers use the same template in transformers."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    arguments = {"model": served.opened.name, "base_url": f"{served.url}/v1/chat/completions"}
    found = evaluated("local-chat-completions", arguments=arguments, tasks=[ANSWER], folder=tasks, chat=True)
    own = {"pretrained": str(folder), "dtype": "float32", "max_length": 40}
    same(found, evaluated("hf", arguments=own, tasks=[ANSWER], folder=tasks, chat=True))


def test_the_harness_has_the_engine_itself(folder, tasks, expected):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    import ztk.serve.harness  # noqa: F401  # registers the model

    arguments = {"model": str(folder), "max_length": 40}
    same(evaluated("ztk", arguments=arguments, tasks=[CHOICE, ROLLING, ANSWER], folder=tasks), expected)


def test_the_field_table_has_the_fields_of_vllm():
    """The fields that the library's classes of that version declare. No other fields have an effect."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed, nor its files on the path")
    if vllm.__version__ != VLLM:
        pytest.skip(f"vLLM is {vllm.__version__}, and the table is of {VLLM}")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    chat, plain = (kind.model_fields for kind in (ChatCompletionRequest, CompletionRequest))
    listed = {name.split()[0] for name, *_ in FIELDS}
    assert {*chat, *plain} - listed == {"model", "messages", "prompt"}
    for name, _, column, _ in FIELDS:
        field, *route = name.split()
        is_declared = field in (plain if route else chat)
        assert is_declared == (column != IGNORED) or (is_declared and field in UNUSED), name


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllms_benchmark_client(served, folder, tmp_path, backend, endpoint):
    """`vllm bench serve`: random prompts of 8 tokens, 6 tokens per answer, and its counts from usage and events."""
    serve = pytest.importorskip("vllm.benchmarks.serve", reason="vLLM is not installed, nor its files on the path")
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    words = f"--backend {backend} --base-url {served.url} --endpoint {endpoint} --model {served.opened.name}"
    words += f" --tokenizer {folder} --dataset-name random --random-input-len 8 --random-output-len 6 --num-prompts 12"
    words += f" --ignore-eos --disable-tqdm --save-result --result-dir {tmp_path} --result-filename found.json"
    serve.main(parser.parse_args(words.split()))
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (12, 0, 72)
    assert found["mean_ttft_ms"] > 0 and found["mean_itl_ms"] > 0
