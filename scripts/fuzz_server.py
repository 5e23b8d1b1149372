"""Sends random and hostile requests together with ordinary ones: no status 500, no crash, /health in time, no growth of memory.

    python scripts/fuzz_server.py                             10,000 random bodies, 200 hostile ones, 64 ordinary clients
    python scripts/fuzz_server.py --bodies 500 --hostile 10   a shorter run

Starts a server with a tiny random model in its own process, on a free port of 127.0.0.1. Prints counts by status, the times of /health and the
server's resident memory. Exit code 1 if a limit is exceeded.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HEALTH_SECONDS = 0.2  # at the 99th percentile
GROWTH_BYTES = 200 << 20  # largest growth of resident memory between the middle and the end of the run
MAX_LEN = 16_384
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


def _health_of_process(url: str, seconds: str) -> None:
    """Measures /health in its own process, so that this script's clients do not delay the clock."""
    with httpx.Client(timeout=60) as client:
        deadline, times = time.monotonic() + float(seconds), []
        while time.monotonic() < deadline and not _ended():
            started = time.perf_counter()
            client.get(f"{url}/health").raise_for_status()
            times.append(time.perf_counter() - started)
            time.sleep(0.02)
    print(json.dumps(times))


def _ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def serve() -> None:
    """The server's process: prints its address."""
    import torch
    import uvicorn

    from ztk.inference import Generator, InferencePolicy, SamplingParams
    from ztk.nn import Decoder, DecoderConfig
    from ztk.serve.app import ServePolicy, Server, calm_process
    from ztk.serve.models import Opened, _Bytes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=300, dim=32, layers=2, heads=2, kv_heads=1, hidden_dim=64, max_seq_len=MAX_LEN)
    opened = Opened(
        name="tiny", module=Decoder(config).eval(), tokenizer=_Bytes(chat_stop=10), ends=(10,), vocabulary=128
    )
    generator = Generator(opened.module, policy=InferencePolicy(max_sequences=32))
    server = Server(
        generator, opened=opened, policy=ServePolicy(max_tokens=16), sampling=SamplingParams(temperature=0.8)
    )
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    with calm_process():
        uvicorn.Server(uvicorn.Config(server.app, log_level="error")).run(sockets=[listening])


async def fuzz(url: str, *, pid: int, bodies: int, hostile: int, clients: int, seed: int) -> bool:
    """Returns whether all limits hold."""
    statuses: dict[str, collections.Counter] = {
        name: collections.Counter() for name in ("random", "hostile", "ordinary")
    }
    until, chance = asyncio.Event(), random.Random(seed)
    probe = subprocess.Popen(
        [sys.executable, __file__, "--probe", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ordinary = [
        asyncio.create_task(_ordinary(url, until=until, seed=number, counts=statuses["ordinary"]))
        for number in range(clients)
    ]
    before, memory, sizes = time.monotonic(), _memory(pid), []
    todo = iter(range(bodies))

    async def throw() -> None:
        for _ in todo:
            statuses["random"][await send(url, random_body(chance), chance=chance)] += 1
            sizes.append(_memory(pid))

    async def harm() -> None:
        calm = random.Random(1)
        calm.random = lambda: 1.0  # stays to the end
        for body in hostile_bodies(hostile):
            statuses["hostile"][await send(url, body, chance=calm)] += 1

    await asyncio.gather(*(throw() for _ in range(8)), harm())
    until.set()
    await asyncio.gather(*ordinary)
    times = sorted(json.loads(probe.communicate("end\n")[0]))
    for name, counts in statuses.items():
        print(f"{name}: {dict(sorted(counts.items(), key=str))}")
    p99 = times[int(0.99 * len(times))]
    print(f"/health of {len(times)}: p50 {statistics.median(times):.4f} s, p99 {p99:.4f} s, max {times[-1]:.4f} s")
    middle, last = sizes[len(sizes) // 2], _memory(pid)
    print(
        f"memory: {memory >> 20} MB before, {middle >> 20} MB in the middle, {max(sizes) >> 20} MB at most, {last >> 20} MB after"
    )
    print(f"{time.monotonic() - before:.0f} s")
    failed = [
        *("a status of 500 or more" for name in ("random", "hostile") if any(one >= 500 for one in statuses[name])),
        *(["an ordinary client's answer was broken"] if statuses["ordinary"]["broken"] else []),
        *([f"/health took {p99:.3f} s"] if p99 > HEALTH_SECONDS else []),
        *([f"memory grew by {last - middle >> 20} MB"] if last - middle > GROWTH_BYTES else []),
    ]
    print("\n".join(failed) or "all limits were kept")
    return not failed


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--hostile", type=int, default=200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    if given.probe:
        _health_of_process(given.probe, "3600")
        return 0
    child = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None, "a pipe"
    try:
        url = child.stdout.readline().strip()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/health", timeout=5)
                break
            time.sleep(0.1)
        options = {"bodies": given.bodies, "hostile": given.hostile, "clients": given.clients, "seed": given.seed}
        kept = asyncio.run(fuzz(url, pid=child.pid, **options))
        if child.poll() is not None:
            print(f"the server has ended with exit code {child.returncode}")
            kept = False
    finally:
        child.kill()
        child.wait()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
