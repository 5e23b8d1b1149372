"""Adapters by request over HTTP: each answer has the bits of the merged model, and requests of all are in one step."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
import uvicorn

from tests.inference.models import build_decoder
from tests.inference.test_adapters import adapter_of, merged
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.serve.app import ServePolicy, Server
from ztk.serve.models import Opened
from ztk.serve.tokenizers import Bytes

NAMES = ("base", "sql", "chat")
MASK = lambda answer: torch.arange(256) < 128  # noqa: E731


@pytest.fixture(scope="module", params=[None, True], ids=["products", "kernels"])
def running(request):
    """A server over a decoder with two adapters."""
    model = build_decoder(vocab_size=256)
    adapters = {name: adapter_of(model, seed=seed) for seed, name in enumerate(NAMES[1:])}
    policy = InferencePolicy(max_sequences=6, kernels=request.param)
    opened = Opened(name="base", module=model, tokenizer=Bytes(chat_stop=3), ends=(), vocabulary=128)
    generator = Generator(model, policy=policy, adapters=adapters)
    server = Server(generator, opened=opened, policy=ServePolicy(), sampling=SamplingParams(temperature=0.8))
    listening = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(server.app, log_level="error"))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    models = {"base": model} | {name: merged(model, adapter=own) for name, own in adapters.items()}
    alone = {name: Generator(own, policy=policy) for name, own in models.items()}
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    yield SimpleNamespace(url=url, generator=generator, opened=opened, alone=alone)
    http.should_exit = True
    thread.join()
    server.stop(drain_seconds=0)


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_answers_by_model_equal_merged_models(running, client):
    prompts = ["one text of some letters", "one text of other letters, which is longer than the first " * 2]
    asked = [(name, prompt) for prompt in prompts for name in NAMES] * 2

    def ask(name: str, prompt: str):
        return client.completions.create(model=name, prompt=prompt, max_tokens=10, seed=4, logprobs=0)

    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda pair: ask(*pair), asked))
    texts = set()
    for (name, prompt), answer in zip(asked, found, strict=True):
        sampling = SamplingParams(max_tokens=10, temperature=0.8, seed=4, draw_key=(0,), vocabulary=128)
        [[wanted]] = running.alone[name].generate([list(prompt.encode())], sampling=sampling)
        assert answer.model == name and answer.choices[0].text == bytes(wanted.tokens).decode()
        logprobs = torch.tensor(answer.choices[0].logprobs.token_logprobs, dtype=torch.float32)
        assert torch.equal(logprobs, wanted.logprobs)
        texts.add(answer.choices[0].text)
    assert len(texts) == len(NAMES) * len(prompts)


def test_streams_chats_and_vectors_name_an_adapter(running, client):
    messages = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(model="sql", messages=messages, max_tokens=40, seed=1, stream=True)
    chunks = list(stream)
    own, base = (
        client.chat.completions.create(model=name, messages=messages, max_tokens=40, seed=1).choices[0].message.content
        for name in ("sql", "base")
    )
    assert {chunk.model for chunk in chunks} == {"sql"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own != base
    if not running.generator.policy.kernels:
        vector = client.embeddings.create(model="sql", input="hello", encoding_format="float").data[0].embedding
        wanted = running.alone["sql"].embed(list(b"hello"))
        assert torch.equal(torch.tensor(vector), wanted) and not torch.equal(
            wanted, running.alone["base"].embed(list(b"hello"))
        )


def test_models_are_listed_and_others_are_unknown(running, client):
    found = {model.id: model for model in client.models.list()}
    assert set(found) == set(NAMES)
    assert found["base"].parent is None and found["sql"].parent == found["chat"].parent == "base"
    assert httpx.get(f"{running.url}/v1/models/chat").json()["id"] == "chat"
    assert httpx.get(f"{running.url}/v1/models/other").status_code == 404
    with pytest.raises(openai.NotFoundError, match="this server has 'base', 'chat', 'sql'") as refused:
        client.completions.create(model="other", prompt="a")
    assert refused.value.code == "model_not_found"


def test_an_adapter_with_the_models_name_is_refused(running):
    opened = SimpleNamespace(**{name: getattr(running.opened, name) for name in Opened.__slots__} | {"name": "sql"})
    with pytest.raises(ValueError, match=r"inference\.adapters\.sql: the model has this name"):
        Server(running.generator, opened=opened, policy=ServePolicy(), sampling=SamplingParams())
