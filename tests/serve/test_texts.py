"""Routes without an answer, and requests of web pages."""

import base64
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import openai
import pytest
import tokenizers
import torch
import transformers

from tests.inference.models import save_letters
from tests.serve.test_server import HTTP, Chatting, start
from ztk.inference import Generator, InferencePolicy
from ztk.serve.app import ServePolicy
from ztk.serve.messages import PLAIN, read_messages
from ztk.serve.tokenizers import Pretrained, _templated


@pytest.fixture(scope="module")
def running():
    found = start(
        tokenizer=Chatting(), policy=ServePolicy(max_tokens=4, hosts=("mine",), origins=("https://app.example",))
    )
    yield found
    found.stop()


def post(running, path, body, **headers):
    return HTTP.post(f"{running.url}/{path}", json=body, headers=headers, timeout=60)


def test_texts_become_tokens_and_back(running):
    found = post(running, "tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert found["tokens"] == list("aé".encode()) and found["count"] == 3 and found["max_model_len"] == 512
    assert found["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    chat = post(running, "tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
    assert bytes(chat) == b"<user>x<assistant>"
    assert post(running, "detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "aé"}
    assert "version" in HTTP.get(f"{running.url}/version").json()


class Developers(Chatting):
    """Its template has the role."""

    template = "{{ developer }}"


@pytest.mark.parametrize(("tokenizer", "role"), [(Chatting(), "system"), (Developers(), "developer")])
def test_developers_are_the_system_where_the_template_has_no_such_role(tokenizer, role):
    server = start(tokenizer=tokenizer)
    messages = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "x"}]
    try:
        found = post(server, "tokenize", {"messages": messages}).json()["tokens"]
        assert bytes(found).decode() == f"<{role}>be short<user>x<assistant>"
        response = post(server, "v1/responses", {"input": messages, "max_output_tokens": 1}).json()
        assert response["usage"]["input_tokens"] == len(found)
    finally:
        server.stop()


def test_the_beginning_of_a_text_is_left_out_if_asked(tmp_path):
    save_letters(tmp_path)
    own = Pretrained(transformers.AutoTokenizer.from_pretrained(tmp_path))
    server = start(tokenizer=own)
    try:
        [with_it, without] = [
            post(server, "tokenize", {"prompt": "ab", "add_special_tokens": flag}).json()["tokens"]
            for flag in (True, False)
        ]
        assert with_it == own.encode("ab") and without == own.encode_text("ab")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("tokenize", {"prompt": 5}, "prompt must be a text"),
        ("tokenize", {"prompt": "a" * 10_000}, "has 10000 characters"),
        ("detokenize", {"tokens": "a"}, "tokens must be a list of token ids"),
        ("detokenize", {"tokens": [300]}, "token 300 is outside"),
        ("v1/embeddings", {"input": {}}, "input must be a text"),
        ("v1/embeddings", {"input": ""}, "the prompt is empty"),
        ("v1/embeddings", {"input": ["a"] * 500}, "500 inputs, and this server takes 128"),
        ("v1/embeddings", {"input": "a", "encoding_format": "x"}, "must be float or base64"),
        ("v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions is not supported"),
        ("v1/embeddings", {"input": [1, -1]}, "outside the vocabulary"),
        (
            "v1/score",
            {"text_1": ["a", "b"], "text_2": ["c"]},
            "text_1 has 2 texts and text_2 has 1: send one, or as many",
        ),
        ("v1/score", {"text_1": "a"}, "text_2 must be a text or a list of texts"),
        ("v1/score", {"queries": "a", "documents": [[1, 2]]}, "documents must be a text or a list of texts"),
        ("rerank", {"query": ["a"], "documents": ["a"]}, "query must be a text"),
        ("rerank", {"query": "a", "documents": []}, "documents must be a text"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n=-1"),
        ("rerank", {"query": "a", "documents": ["a"] * 500}, "500 inputs, and this server takes 128"),
    ],
)
def test_what_cannot_be_read_gets_400(running, path, body, message):
    found = post(running, path, body)
    assert found.status_code == 400 and message in found.json()["error"]["message"], found.text


def test_embeddings_are_the_mean_of_the_last_hidden_states(running):
    """With OpenAI's client, which requests base64."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="tiny", input=["hello there", "x"])
    assert [item.index for item in found.data] == [0, 1] and found.usage.prompt_tokens == 12
    hidden = []
    model = running.opened.module
    handle = model.norm.register_forward_hook(lambda module, inputs, out: hidden.append(out))
    with torch.no_grad():
        model(torch.tensor([list(b"hello there")]))
    handle.remove()
    mean = hidden[-1].reshape(-1, hidden[-1].shape[-1]).float().mean(0)
    expected = mean / mean.norm()
    assert torch.allclose(torch.tensor(found.data[0].embedding), expected, atol=1e-5)
    raw = post(running, "v1/embeddings", {"input": "x", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    numbers = struct.unpack(f"<{len(expected)}f", base64.b64decode(raw))
    assert numbers == pytest.approx(found.data[1].embedding, abs=1e-6)


def test_scores_are_the_similarities_of_embeddings(running):
    """vLLM's routes and names, and Jina's, of a model that has embeddings."""
    texts = ["hello there", "hello you", "something else"]
    data = post(running, "v1/embeddings", {"input": ["hello", *texts]}).json()["data"]
    query, *others = (torch.tensor(one["embedding"]) for one in data)
    expected = [float(query @ other) for other in others]
    for path in ("score", "v1/score"):
        for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            found = post(running, path, dict(zip(names, ("hello", texts), strict=True))).json()
            assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
            assert found["object"] == "list" and found["model"] == "tiny"
            assert found["usage"]["prompt_tokens"] == 3 * 5 + sum(map(len, texts))
    pairs = post(running, "v1/score", {"text_1": texts, "text_2": texts}).json()["data"]
    assert [one["score"] for one in pairs] == pytest.approx([1.0] * 3, abs=1e-5)
    order = sorted(range(3), key=lambda index: -expected[index])
    for path in ("rerank", "v1/rerank", "v2/rerank"):
        found = post(running, path, {"model": "tiny", "query": "hello", "documents": texts, "top_n": 2}).json()
        assert [one["index"] for one in found["results"]] == order[:2]
        assert [one["document"]["text"] for one in found["results"]] == [texts[index] for index in order[:2]]
        values = [one["relevance_score"] for one in found["results"]]
        assert values == pytest.approx([expected[index] for index in order[:2]], abs=1e-5)


def test_other_servers_checks_of_health_are_answered(running):
    for method in (HTTP.get, HTTP.post):
        assert method(f"{running.url}/ping").status_code == 200
    load = lambda: HTTP.get(f"{running.url}/load").json()["server_load"]  # noqa: E731
    wait_until(lambda: load() == 0)
    with ThreadPoolExecutor(1) as pool:
        with running.generator._lock:  # no step is computed
            answer = pool.submit(post, running, "v1/completions", {"prompt": "a", "max_tokens": 2})
            wait_until(lambda: load() == 1)
        assert answer.result().status_code == 200
    wait_until(lambda: load() == 0)


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_names_of_fields_write_one_line_into_the_log(running, caplog):
    post(running, "v1/completions", {"prompt": "a", "max_tokens": 1, "x\nERROR forged\r\x1b[31m\u2028": 1})
    [line] = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert line.isprintable() and "x\\nERROR forged\\r\\x1b[31m\\u2028" in line


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endfor %}", "<a><b>"),
        (
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p.text }};{% endfor %}{% endfor %}",
            "a;b;",
        ),
    ],
)
def test_parts_of_a_content_are_joined_as_by_vllm(template, expected):
    """By line feeds, or by the template if it has a loop over them."""
    inner = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    inner.chat_template = template
    [message] = read_messages({"messages": [{"role": "user", "content": PARTS}]})
    assert _templated(inner, messages=[message], options=PLAIN) == expected


def test_embeddings_in_parts_are_those_at_once(running):
    parts = Generator(running.opened.module, policy=InferencePolicy(max_step_tokens=4))
    tokens = list(b"a longer text than a part")
    assert torch.allclose(parts.embed(tokens), running.generator.embed(tokens), atol=1e-5)


def test_embeddings_leave_threads_and_steps_to_others(running, monkeypatch):
    """Two that wait hold no thread that reads requests; each part takes the engine's lock anew."""
    is_free, embed = threading.Event(), running.generator.embed
    monkeypatch.setattr(running.generator, "embed", lambda prompt, **named: is_free.wait(60) and embed(prompt, **named))
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(post, running, "v1/embeddings", {"input": text}) for text in ("one", "two", "three")]
        try:
            assert post(running, "tokenize", {"prompt": "a"}).status_code == 200
            assert not any(one.done() for one in waiting)
        finally:
            is_free.set()
        assert [one.result().status_code for one in waiting] == [200, 200, 200]
    parts = Generator(running.opened.module, policy=InferencePolicy(max_step_tokens=4))
    parts._lock = MagicMock(wraps=parts._lock)
    parts.embed(list(b"a longer text"))
    assert parts._lock.__enter__.call_count == 5  # one for the memory


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "mine:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "["}, 403),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:5", "Origin": "http://localhost:5"}, 200),
        ({"Host": "localhost:5", "Origin": "http://localhost:6"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "https://app.example"}, 200),
    ],
)
def test_foreign_names_are_refused_where_no_key_is_set(running, headers, status):
    found = HTTP.post(f"{running.url}/v1/completions", json={"prompt": "a"}, headers=headers, timeout=60)
    assert found.status_code == status and (status == 200 or found.json()["error"]["type"] == "invalid_request_error")


def test_a_page_that_may_send_requests_is_told_so(running):
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    found = HTTP.options(f"{running.url}/v1/completions", headers=asked)
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "https://app.example"
    assert HTTP.options(f"{running.url}/v1/completions", headers=asked | {"Origin": "https://x.y"}).status_code == 400


def test_a_key_is_enough_whatever_the_name():
    server = start(tokenizer=Chatting(), policy=ServePolicy(max_tokens=2, api_key="k"))
    try:
        headers = {"Host": "evil.example", "Authorization": "Bearer k"}
        assert post(server, "v1/completions", {"prompt": "a"}, **headers).status_code == 200
        for path in ("tokenize", "detokenize", "v1/embeddings"):
            assert post(server, path, {"prompt": "a"}).status_code == 401
    finally:
        server.stop()
