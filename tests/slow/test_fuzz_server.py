"""Random and hostile requests next to 64 clients: no status 500, no end of the server, /health in time, no growth of memory.

10,000 random bodies and 200 hostile ones go to a server with a tiny random model in its own process. tests/serve/test_hostile.py sends some of
the random ones.
"""

import asyncio
import collections
import contextlib
import json
import random
import socket
import statistics
import time
from multiprocessing.connection import Connection

import httpx
import torch
import uvicorn

from scripts.bench import status_bytes
from tests.ranks import forkserver
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.nn import Decoder, DecoderConfig
from ztk.serve.app import ServePolicy, Server, calm_process
from ztk.serve.models import Opened
from ztk.serve.tokenizers import Bytes

HEALTH_SECONDS = 0.2  # at the 99th percentile
GROWTH_BYTES = 200 << 20  # largest growth of resident memory between the middle and the end of the run
MAX_LEN, CLIENTS = 16_384, 64
_FIELDS = (
    *("model", "prompt", "messages", "stream", "echo", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n"),
    *("seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "suffix"),
    *("stream_options", "best_of", "top_k", "min_p", "repetition_penalty", "ignore_eos", "user", "metadata", "nothing"),
    *("stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids", "include_stop_str_in_output", "prompt_logprobs"),
    *("return_token_ids", "add_special_tokens", "response_format", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "input", "tokens", "instructions", "previous_response_id"),
    *("store", "text", "include", "truncation", "echo", "truncate_prompt_tokens", "truncation_side"),
    *("return_tokens_as_token_ids", "system", "metadata"),
)  # fmt: skip
_TYPES = ("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
_RAW = (b"", b"{", b"[]", b"null", b"\xff\xfe", b'"a"', b"[" * 50_000, b'{"prompt": "\xed\xa0\x80"}', b"{}" * 100)


def random_value(chance: random.Random, *, depth: int = 0) -> object:
    """A random value that Python's json module can parse."""
    simple = [
        None, True, False, 0, 1, -1, 2, 5, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.0, -0.5, 0.5, 1.5, 1e308,
        float("nan"), float("inf"), -float("inf"), "", "a", "\ud83d", "\udc00x", "\x00", "é🔥", "a" * 3000, "1", "NaN",
    ]  # fmt: skip
    kind = chance.random()
    if depth > 3 or kind < 0.7:
        return chance.choice(simple)
    count = chance.randint(0, 4)
    if kind < 0.85:
        return [random_value(chance, depth=depth + 1) for _ in range(count)]
    return {str(random_value(chance, depth=4))[:50]: random_value(chance, depth=depth + 1) for _ in range(count)} | (
        {"role": "user", "content": random_value(chance, depth=4)} if chance.random() < 0.5 else {}
    )


_OF_RESPONSES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


def random_body(chance: random.Random) -> tuple[str, bytes]:
    """A path and a body, mostly valid with one to three invalid fields."""
    is_chat = chance.random() < 0.4
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    if chance.random() < 0.05:
        return path, chance.choice(_RAW)
    good: dict = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "abc"}
    good |= {"max_tokens": chance.randint(1, 8), "stream": chance.random() < 0.4}
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        good[chance.choice(_FIELDS)] = random_value(chance)
    if chance.random() < 0.1:
        path = chance.choice(("/tokenize", "/detokenize", "/v1/embeddings"))
    elif chance.random() < 0.15:
        path = "/v1/responses"
        good = {_OF_RESPONSES.get(name, name): value for name, value in good.items()}
    text = json.dumps(good)
    if chance.random() < 0.03:
        text = text[: chance.randrange(len(text))]
    if chance.random() < 0.02:
        return path, text.encode() + bytes(chance.randrange(256) for _ in range(8))
    return path, text.encode()


async def send(url: str, body: tuple[str, bytes], *, chance: random.Random) -> int:
    """Returns the status; 0 if the client left early. A stream that ends in an error counts as 500."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        path, content = body
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
        head += f"Content-Type: {chance.choice(_TYPES)}\r\n\r\n"
        leaves = chance.random()
        if leaves < 0.03:
            writer.write(head.encode() + content[: len(content) // 2])
            await writer.drain()
            return 0
        writer.write(head.encode() + content)
        await writer.drain()
        if leaves < 0.08:
            await reader.read(chance.choice((0, 1, 200)))
            return 0
        line = await reader.readline()
        rest = await reader.read()
        if not line:
            return 599  # closed without an answer
        return 500 if b': "server_error"' in rest else int(line.split()[1])
    except ConnectionError:
        return 599
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def hostile_bodies(count: int) -> list[tuple[str, bytes]]:
    """Bodies in turns: 30 MB of text, n=100000, and long prompts with all log-probabilities."""
    prompt = json.dumps("ab " * (MAX_LEN // 3 - 10))
    kinds = [
        b'{"prompt": "' + b"a" * (30 << 20) + b'"}',
        b'{"prompt": "a", "n": 100000}',
        f'{{"prompt": {prompt}, "echo": true, "logprobs": 5, "max_tokens": 1}}'.encode(),
        f'{{"prompt": {prompt}, "echo": true, "logprobs": 5, "max_tokens": 1, "stream": true}}'.encode(),
        b'{"prompt": "a", "logprobs": 2147483647}',
        b'{"prompt": [' + b"1," * 1_900_000 + b"1]}",
        b'{"prompt": "' + b"a" * 4_000_000 + b'"}',
        b'{"prompt": "a", "stop": ["' + b'","'.join([b"a"] * 100_000) + b'"]}',
        b'{"prompt": "a", "metadata": [' + b"{}," * 1_000_000 + b"1]}",
    ]
    return [("/v1/completions", kinds[number % len(kinds)]) for number in range(count)]


async def _ordinary(url: str, *, until: asyncio.Event, seed: int, counts: collections.Counter) -> None:
    chance = random.Random(seed)
    async with httpx.AsyncClient(timeout=120) as client:
        while not until.is_set():
            body = {"prompt": "hello " * chance.randint(1, 20), "max_tokens": chance.randint(4, 24), "seed": seed}
            body["stream"] = chance.random() < 0.5
            found = await client.post(f"{url}/v1/completions", json=body)
            broken = (
                found.status_code != 200
                or "server_error" in found.text
                or (body["stream"] and "[DONE]" not in found.text)
            )
            counts["broken" if broken else "good"] += 1
            await asyncio.sleep(chance.uniform(0.5, 2.0))


def _measure_health(url: str, pipe: Connection) -> None:
    """Measures /health in its own process until a message comes, so that the other clients do not delay the clock."""
    times = []
    with httpx.Client(timeout=60) as client:
        while not pipe.poll():
            started = time.perf_counter()
            client.get(f"{url}/health").raise_for_status()
            times.append(time.perf_counter() - started)
            time.sleep(0.02)
    pipe.send(sorted(times))


def _serve(pipe: Connection) -> None:
    """The server's process: sends its address."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=300, dim=32, layers=2, heads=2, kv_heads=1, hidden_dim=64, max_seq_len=MAX_LEN)
    opened = Opened(
        name="tiny", module=Decoder(config).eval(), tokenizer=Bytes(chat_stop=10), ends=(10,), vocabulary=128
    )
    generator = Generator(opened.module, policy=InferencePolicy(max_sequences=32))
    server = Server(
        generator, opened=opened, policy=ServePolicy(max_tokens=16), sampling=SamplingParams(temperature=0.8)
    )
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    pipe.send(f"http://127.0.0.1:{listening.getsockname()[1]}")
    with calm_process():
        uvicorn.Server(uvicorn.Config(server.app, log_level="error")).run(sockets=[listening])


async def fuzz(url: str, *, pid: int, bodies: int, hostile: int) -> tuple[dict[str, collections.Counter], list[int]]:
    """Sends everything. Returns the counts by status, and the server's memory after each random body."""
    statuses = {name: collections.Counter() for name in ("random", "hostile", "ordinary")}
    until, chance, sizes, todo = asyncio.Event(), random.Random(0), [], iter(range(bodies))
    ordinary = [
        asyncio.create_task(_ordinary(url, until=until, seed=number, counts=statuses["ordinary"]))
        for number in range(CLIENTS)
    ]

    async def throw() -> None:
        for _ in todo:
            statuses["random"][await send(url, random_body(chance), chance=chance)] += 1
            sizes.append(status_bytes("VmRSS", pid=pid))

    async def harm() -> None:
        calm = random.Random(1)
        calm.random = lambda: 1.0  # stays to the end
        for body in hostile_bodies(hostile):
            statuses["hostile"][await send(url, body, chance=calm)] += 1

    await asyncio.gather(*(throw() for _ in range(8)), harm())
    until.set()
    await asyncio.gather(*ordinary)
    return statuses, sizes


def test_no_request_ends_or_delays_the_server(show, amount):
    pipes = [forkserver().Pipe() for _ in range(2)]
    server = forkserver().Process(target=_serve, args=(pipes[0][1],), daemon=True)
    server.start()
    url, bodies = pipes[0][0].recv(), amount(10_000)
    httpx.Client(transport=httpx.HTTPTransport(retries=10)).get(f"{url}/health", timeout=60)
    probe = forkserver().Process(target=_measure_health, args=(url, pipes[1][1]), daemon=True)
    probe.start()
    try:
        statuses, sizes = asyncio.run(fuzz(url, pid=server.pid, bodies=bodies, hostile=bodies // 50))
        pipes[1][0].send("end")
        times, last = pipes[1][0].recv(), status_bytes("VmRSS", pid=server.pid)
        assert server.exitcode is None
    finally:
        server.kill()
        probe.kill()
    for name, counts in statuses.items():
        show(f"{name}: {dict(sorted(counts.items(), key=str))}")
    p99 = times[int(0.99 * len(times))]
    show(f"/health of {len(times)}: p50 {statistics.median(times):.4f} s, p99 {p99:.4f} s, max {times[-1]:.4f} s")
    middle = sizes[len(sizes) // 2]
    show(f"memory: {middle >> 20} MB in the middle, {max(sizes) >> 20} MB at most, {last >> 20} MB after")
    assert max([*statuses["random"], *statuses["hostile"]]) < 500 and not statuses["ordinary"]["broken"]
    assert p99 <= HEALTH_SECONDS and last - middle <= GROWTH_BYTES
