"""The server over real sockets, with OpenAI's client and with plain requests."""

import asyncio
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from types import MappingProxyType, SimpleNamespace

import httpx
import openai
import pytest
import torch
import transformers
import uvicorn

from tests.inference.models import save_letters
from ztk.core.runtime import PeerLost
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.nn import Decoder, DecoderConfig
from ztk.serve.app import ServePolicy, Server
from ztk.serve.messages import PLAIN
from ztk.serve.models import Opened
from ztk.serve.tokenizers import Bytes, Pretrained

MAX_LEN = 512
PATIENCE_SECONDS = 60


class Chatting(Bytes):
    """Bytes with a chat template."""

    def chat(self, messages, *, options=PLAIN):
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>")


def tiny(*, tokenizer):
    """A random model, with this tokenizer."""
    torch.manual_seed(3)
    config = DecoderConfig(vocab_size=300, dim=32, layers=2, heads=2, kv_heads=1, hidden_dim=64, max_seq_len=MAX_LEN)
    return Opened(name="tiny", module=Decoder(config).eval(), tokenizer=tokenizer, ends=(), vocabulary=128)


def start(*, tokenizer=None, opened=None, policy=None, incoming=None, open_weights=None, **inference):
    """A server on a free port: its address, the generator, and a function that stops it. opened: the model; by default a tiny one.
    incoming, open_weights: for new weights.
    """
    opened = opened or tiny(tokenizer=tokenizer)
    options = InferencePolicy(**{"max_sequences": 4} | inference)
    generator = Generator(opened.module, policy=options, open_weights=open_weights)
    server = Server(
        generator,
        opened=opened,
        policy=policy or ServePolicy(max_tokens=16),
        sampling=SamplingParams(max_tokens=16, temperature=0.8),
        incoming=incoming,
    )
    listening = socket.create_server(("127.0.0.1", 0))
    uvicorn_server = uvicorn.Server(uvicorn.Config(server.app, log_level="error"))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()

    def stop() -> None:
        uvicorn_server.should_exit = True
        thread.join()
        server.stop(drain_seconds=0)

    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    return SimpleNamespace(url=url, generator=generator, server=server, stop=stop, opened=opened)


# One client for all tests, as each loads certificates in 40 ms; every request has its own connection.
HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


@pytest.fixture(scope="module")
def running():
    found = start(tokenizer=Chatting())
    yield found
    found.stop()


@pytest.fixture
def client(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counters(running) -> dict[str, float]:
    """Values of metrics that have no label but the model's name."""
    lines = [line for line in HTTP.get(f"{running.url}/metrics").text.splitlines() if not line.startswith("#")]
    split = [line.rsplit(" ", 1) for line in lines]
    return {name.split("{")[0]: float(value) for name, value in split if "," not in name}


def test_a_completion_is_the_engines(running, client):
    found = client.completions.create(model="tiny", prompt="abc", max_tokens=12, seed=5, logprobs=2)
    sampling = SamplingParams(
        max_tokens=12, temperature=0.8, seed=5, draw_key=(0,), token_mask=lambda answer: torch.arange(300) < 128
    )
    [[answer]] = Generator(running.opened.module).generate([[97, 98, 99]], sampling=sampling)
    choice = found.choices[0]
    assert choice.text == bytes(answer.tokens).decode() and choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs.tolist(), rel=1e-6)
    assert choice.logprobs.processed_token_logprobs == pytest.approx(answer.processed_logprobs.tolist(), rel=1e-6)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 12, 15)


def test_metrics_have_vllms_names_and_count(running, client):
    names = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds")
    names += ("inter_token_latency_seconds", "request_generation_tokens", "request_time_per_output_token_seconds")
    before = counters(running)
    client.completions.create(model="tiny", prompt=["abc", "abcd"], max_tokens=5, n=2)
    ended = "vllm:e2e_request_latency_seconds_count"
    wait_until(lambda: counters(running)[ended] >= before.get(ended, 0) + 2)
    after = counters(running)
    change = {name: value - before.get(name, 0) for name, value in after.items()}
    assert [change[f"vllm:{name}_count"] for name in names] == [2, 2, 2, 16, 4, 4]
    assert change["vllm:request_generation_tokens_sum"] == change["vllm:generation_tokens_total"] == 20
    assert change["vllm:prompt_tokens_total"] == change["vllm:request_prompt_tokens_sum"] == 7
    assert (
        after["vllm:num_requests_running"]
        == after["vllm:num_requests_waiting"]
        == after["vllm:kv_cache_usage_perc"]
        == 0
    )
    assert change["ztk_requests_total"] == 2 and change["ztk_seconds_total"] > 0
    times = [change[f"vllm:{name}_sum"] for name in (names[2], names[1], names[0])]
    assert 0 < times[0] < times[1] < times[2]
    text = HTTP.get(f"{running.url}/metrics").text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in text


def test_a_stream_has_the_text_of_the_complete_answer(client):
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 24, "seed": 9}
    complete = client.completions.create(**asked).choices[0].text
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == complete
    assert (
        chunks[-1].usage.completion_tokens == 24
        and [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    )


def test_a_chat_streams_its_role_first(client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1}
    complete = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == complete.choices[0].message.content
    assert (
        len(complete.choices[0].logprobs.content) == 8
        and len(complete.choices[0].logprobs.content[0].top_logprobs) == 3
    )


def test_several_prompts_and_answers_keep_their_order(client):
    found = client.completions.create(model="tiny", prompt=["a", "bb"], n=2, max_tokens=4, echo=True, seed=2)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text[:1] for choice in found.choices] == ["a", "a", "b", "b"]
    assert found.choices[0].text != found.choices[1].text


def test_a_stop_text_ends_the_answer_and_is_left_out(client):
    asked = {"model": "tiny", "prompt": "q", "max_tokens": 40, "seed": 3}
    complete = client.completions.create(**asked).choices[0].text
    stop = complete[7:9]
    found = client.completions.create(**asked, stop=stop).choices[0]
    assert found.text == complete[: complete.find(stop)] and found.finish_reason == "stop"


def test_special_tokens_end_an_answer_and_are_shown_if_asked():
    class Special(Bytes):
        special = MappingProxyType({120: "<|end|>"})

        def decode(self, tokens):
            return super().decode([token for token in tokens if token != 120])

    running = start(tokenizer=Special())
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)

    def ask(**more):
        body = {"logit_bias": {"120": 100}, "max_tokens": 3} | more.pop("body", {})
        choice = client.completions.create(model="tiny", prompt="a", extra_body=body | more).choices[0]
        return choice.text, choice.finish_reason

    try:
        assert ask() == ("", "length")
        assert ask(skip_special_tokens=False) == ("<|end|>" * 3, "length")
        assert ask(stop="<|end|>") == ask(stop_token_ids=[120]) == ("", "stop")
        assert ask(stop=["<|end|><|end|>"], skip_special_tokens=False) == ("", "stop")
        with pytest.raises(openai.BadRequestError, match="stop_token_ids must be a list of token ids"):
            ask(stop_token_ids=[True])
    finally:
        running.stop()


def test_lm_evals_payload_gives_the_log_probabilities_of_the_prompt(running):
    """As lm-evaluation-harness's local-completions sends it: token ids, echo, no answer."""
    tokens = [[5, 6, 7, 8], [9, 10, 11]]
    body = {
        "model": "tiny",
        "prompt": tokens,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    found = HTTP.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS).json()
    scores = Generator(running.opened.module).score(tokens)
    for choice, prompt, expected in zip(
        sorted(found["choices"], key=lambda c: c["index"]), tokens, scores, strict=True
    ):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(prompt)] == pytest.approx(expected.tolist(), rel=1e-6)
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1 == len(logprobs["top_logprobs"])
        assert all(
            max(top.values()) >= value
            for top, value in zip(logprobs["top_logprobs"][1:], logprobs["token_logprobs"][1:], strict=True)
        )


def test_log_probabilities_of_the_tokens_alone(client):
    """logprobs=0: only the drawn tokens' values; for a chat, the flag without a number."""
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "seed": 5}
    found = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    more = client.completions.create(**asked, logprobs=2).choices[0].logprobs
    assert found.token_logprobs == more.token_logprobs and found.top_logprobs == [{}] * 5
    assert client.completions.create(**asked).choices[0].logprobs is None
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, logprobs=True)
    assert [token.top_logprobs for token in chat.choices[0].logprobs.content] == [[]] * 3


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_stream_has_every_log_probability_of_the_complete_answer(client, max_tokens):
    """Raw and processed values, also of the echoed prompt, each once and in order."""
    asked = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": max_tokens,
        "seed": 4,
        "echo": True,
        "logprobs": 1,
        "n": 2,
    }
    complete = sorted(client.completions.create(**asked).choices, key=lambda choice: choice.index)
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    for choice in complete:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert len(choice.logprobs.tokens) == 5 + max_tokens
        for name in ("tokens", "token_logprobs", "processed_token_logprobs", "top_logprobs"):
            pieces = (getattr(chunk.logprobs, name) for chunk in own if chunk.logprobs)
            assert list(chain.from_iterable(pieces)) == getattr(choice.logprobs, name), name
        assert choice.logprobs.processed_token_logprobs[:5] == [None] * 5


def test_a_chat_has_raw_and_processed_log_probabilities(running, client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
    found = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs.content
    sampling = SamplingParams(
        max_tokens=4, temperature=0.8, seed=1, draw_key=(0,), token_mask=lambda answer: torch.arange(300) < 128
    )
    prompt = running.opened.tokenizer.chat(asked["messages"])
    [[answer]] = Generator(running.opened.module).generate([prompt], sampling=sampling)
    assert [token.logprob for token in found] == pytest.approx(answer.logprobs.tolist(), rel=1e-6)
    assert [token.processed_logprob for token in found] == pytest.approx(answer.processed_logprobs.tolist(), rel=1e-6)


def test_another_model_is_not_found(running, client):
    """As OpenAI's client expects: the served name is in /v1/models, and a request may omit the model."""
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="a")
    assert error.value.code == "model_not_found" and "'gpt-4' does not exist" in error.value.message
    assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="TINY", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert client.models.retrieve("tiny").id == "tiny"
    assert HTTP.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_more_prompts_than_may_ever_wait_are_refused():
    """Not with 429, after which they would be sent again for ever."""
    server = start(tokenizer=Bytes(), policy=ServePolicy(max_waiting=3))
    try:
        found = HTTP.post(f"{server.url}/v1/completions", json={"prompt": ["a"] * 4, "max_tokens": 1})
        message = found.json()["error"]["message"]
        assert found.status_code == 400 and "4 prompts in one request, and 3 may wait" in message
    finally:
        server.stop()


def test_a_client_who_leaves_before_its_stream_begins_frees_its_place(running):
    """No event was asked for: the generator of the events never begins, and so does not end either."""
    before = counters(running)["ztk_cancelled_total"]

    async def leave() -> None:
        body = b'{"prompt": "x", "max_tokens": 500, "stream": true}'
        messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.0"}}

        async def receive() -> dict:
            return messages.pop(0)

        async def send(message: dict) -> None:
            await asyncio.Event().wait()  # a connection that takes nothing any more

        await running.server.app(scope, receive, send)

    asyncio.run(leave())
    wait_until(lambda: counters(running)["ztk_cancelled_total"] == before + 1)
    assert not running.generator.has_work


def test_a_client_who_leaves_frees_its_place(running):
    before = counters(running)["ztk_cancelled_total"]
    body = {"prompt": "x", "max_tokens": 500, "stream": True}
    with HTTP.stream("POST", f"{running.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS) as response:
        next(response.iter_lines())
    wait_until(lambda: counters(running)["ztk_cancelled_total"] == before + 1)
    assert not running.generator.has_work


def test_a_client_who_leaves_before_the_complete_answer_frees_its_place(running, monkeypatch):
    """While tokens come every 20 ms: who looks for the client only when none has come for a while never finds out."""
    before, step = counters(running), running.generator.step
    monkeypatch.setattr(running.generator, "step", lambda: time.sleep(0.02) or step())
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{running.url}/v1/completions", json={"prompt": "x", "max_tokens": 500}, timeout=0.5)
    wait_until(lambda: counters(running)["ztk_cancelled_total"] == before["ztk_cancelled_total"] + 1)
    after = counters(running)
    assert not running.generator.has_work
    assert after["vllm:generation_tokens_total"] < before["vllm:generation_tokens_total"] + 500


@pytest.mark.parametrize(
    "path, body, status, message",
    [
        (
            "completions",
            {"prompt": "a" * 500, "max_tokens": 20},
            400,
            "maximum context length is 512 tokens. The prompt has 500 tokens",
        ),
        ("completions", {"prompt": [299, 300]}, 400, "token 300 is outside the vocabulary of 300"),
        ("completions", {"prompt": "a", "logit_bias": {"50256": -100}}, 400, "token 50256 is outside the vocabulary"),
        ("completions", {"prompt": ""}, 400, "the prompt is empty"),
        ("chat/completions", {"messages": []}, 400, "messages must be a list"),
    ],
)
def test_refusals_have_openais_error_body(running, path, body, status, message):
    found = HTTP.post(f"{running.url}/v1/{path}", json=body)
    assert found.status_code == status and message in found.json()["error"]["message"]
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_models_health_and_page(running, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert HTTP.get(f"{running.url}/health").json() == {"status": "ok"}
    page = HTTP.get(running.url)
    assert page.headers["content-type"].startswith("text/html") and "v1/completions" in page.text


def test_the_time_to_the_first_token_is_recorded(caplog):
    """Seconds from the loaded model on: opening the engine, and the first request. Later requests do not change them."""
    server = start(tokenizer=Bytes())
    try:
        assert "ztk_first_token_seconds" not in counters(server)
        found = []
        with caplog.at_level(logging.INFO, logger="ztk"):
            for _ in range(2):
                started = time.perf_counter()
                HTTP.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
                found.append((counters(server)["ztk_first_token_seconds"], time.perf_counter() - started))
        (first, waited), (second, _) = found
        assert first == second and server.generator.opening_seconds < first
        assert first < server.generator.opening_seconds + waited
        assert f"first token {first:.2f} s after the model was loaded" in caplog.text
    finally:
        server.stop()


def test_a_key_is_asked_for_and_waiting_prompts_are_bounded():
    """One place, one waiting prompt: the next is refused with Retry-After, which OpenAI's client follows by itself."""
    server = start(tokenizer=Bytes(), policy=ServePolicy(api_key="secret", max_waiting=1), max_sequences=1)
    try:
        refused = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"

        async def crowd() -> None:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
            first = await client.completions.create(model="tiny", prompt="a", max_tokens=400, stream=True)
            await anext(first)
            second = asyncio.create_task(client.completions.create(model="tiny", prompt="b", max_tokens=2))
            while server.server._loop.waiting == 0:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError) as error:
                await client.completions.create(model="tiny", prompt="c", max_tokens=2)
            assert error.value.response.headers["retry-after"] == "1"
            patient = client.with_options(max_retries=60)
            third = asyncio.create_task(patient.completions.create(model="tiny", prompt="d", max_tokens=2))
            await first.close()
            assert len((await second).choices[0].text) == len((await third).choices[0].text) == 2

        asyncio.run(crowd())
        for scheme, status in (("bearer", 200), ("BEARER", 200), ("Bearer ", 200), ("Basic", 401), ("", 401)):
            headers = {"Authorization": f"{scheme} secret".lstrip()}
            assert HTTP.get(f"{server.url}/v1/models", headers=headers).status_code == status, scheme
        headers = {"Authorization": "Bearer secret"}
        found = HTTP.post(
            f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=headers
        )
        assert found.status_code == 400 and "no chat template" in found.json()["error"]["message"]
    finally:
        server.stop()


def test_who_finds_no_memory_waits_and_who_never_could_is_refused(monkeypatch):
    """Memory for two short sequences or a long one: the long one waits for the short ones, the next is refused with 429."""
    server = start(tokenizer=Bytes(), policy=ServePolicy(max_waiting=1), cache_tokens=512)
    ask = partial(HTTP.post, f"{server.url}/v1/completions", timeout=PATIENCE_SECONDS)
    goes_on, step = threading.Event(), server.generator.step
    goes_on.set()
    monkeypatch.setattr(server.generator, "step", lambda: goes_on.wait(PATIENCE_SECONDS) and step())
    try:
        with HTTP.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 250, "stream": True}
        ) as first:
            lines = first.iter_lines()
            next(lines)
            goes_on.clear()
            with ThreadPoolExecutor(1) as other:
                long = other.submit(ask, json={"prompt": "b" * 300, "max_tokens": 2})
                wait_until(lambda: server.server._loop.waiting == 1)
                refused = ask(json={"prompt": "c", "max_tokens": 2})
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                goes_on.set()
                assert list(lines)[-2] == "data: [DONE]"
                assert long.result().json()["usage"]["completion_tokens"] == 2
    finally:
        server.stop()
    server = start(tokenizer=Bytes(), cache_tokens=256)
    try:
        found = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "b" * 250, "max_tokens": 7})
        message = found.json()["error"]["message"]
        assert found.status_code == 400 and "need 81920 bytes" in message and "may take 65536" in message
    finally:
        server.stop()


@pytest.mark.parametrize("is_of_transformers", [False, True])
def test_the_error_of_a_chat_without_a_template_has_a_fix(tmp_path, is_of_transformers):
    tokenizer, advice = Bytes(), "send the text to /v1/completions, or train it on chats with task=sft"
    if is_of_transformers:
        save_letters(tmp_path)
        tokenizer = Pretrained(transformers.AutoTokenizer.from_pretrained(tmp_path))
        advice = "put one into its tokenizer_config.json (key chat_template), or send the text to /v1/completions"
    server = start(tokenizer=tokenizer)
    try:
        body = {"messages": [{"role": "user", "content": "x"}]}
        found = HTTP.post(f"{server.url}/v1/chat/completions", json=body)
        error = found.json()["error"]
        assert found.status_code == 400 and error["type"] == "invalid_request_error"
        assert "has no chat template" in error["message"] and advice in error["message"]
    finally:
        server.stop()


def test_logits_that_are_not_finite_end_their_request_alone(running):
    server = start(tokenizer=Bytes())
    try:
        server.opened.module.embedding.weight.data[120] = float("nan")
        bad = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_SECONDS)
        assert bad.status_code == 500 and "after layer 0 of 2" in bad.json()["error"]["message"]
        assert (
            HTTP.post(
                f"{server.url}/v1/completions",
                json={"prompt": "y", "logit_bias": {"120": -100}},
                timeout=PATIENCE_SECONDS,
            ).status_code
            == 200
        )
    finally:
        server.stop()


def test_an_error_that_belongs_to_no_request_ends_those_there_are_and_the_server_goes_on(monkeypatch):
    """It ended the process for everybody."""
    server = start(tokenizer=Bytes())
    ask = partial(HTTP.post, f"{server.url}/v1/completions", timeout=PATIENCE_SECONDS)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(server.generator, "step", lambda: 1 / 0)
            for _ in range(3):
                found = ask(json={"prompt": "x"})
                assert found.status_code == 500 and "division by zero" in found.json()["error"]["message"]
        assert HTTP.get(f"{server.url}/health").status_code == 200 and server.server.error is None
        assert ask(json={"prompt": "x"}).status_code == 200
        assert counters(server)["ztk_failed_total"] == 3 and not server.generator.has_work
    finally:
        server.stop()


def test_a_lost_rank_ends_all_requests_and_the_engine(monkeypatch):
    server, failed = start(tokenizer=Bytes()), []
    server.server.on_failure(lambda: failed.append(1))

    def fail():
        wait_until(lambda: server.server._loop.waiting == 2)  # the second came during the step that fails
        raise PeerLost("a rank is gone")

    monkeypatch.setattr(server.generator, "step", fail)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            url = f"{server.url}/v1/completions"
            first = asyncio.create_task(client.post(url, json={"prompt": "x"}))
            while server.server._loop.waiting == 0:
                await asyncio.sleep(0.01)
            return [await client.post(url, json={"prompt": "y"}), await first]

    try:
        for found in asyncio.run(ask()):
            assert found.status_code == 500 and "a rank is gone" in found.json()["error"]["message"]
        assert HTTP.get(f"{server.url}/health").status_code == 503 and failed == [1]
        assert HTTP.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 503
    finally:
        server.stop()
