"""Requests that must not hold, end or confuse the server; and the answers' log-probabilities token by token."""

import asyncio
import json
import random
import time

import httpx
import pytest
import tokenizers
import transformers

from tests.inference.models import save_letters
from tests.serve.test_server import HTTP, PATIENCE_SECONDS, Chatting, start
from tests.slow.test_fuzz_server import random_body, send
from ztk.inference import Output, PromptLogprob, SamplingParams
from ztk.serve.answers import Answer, Shape
from ztk.serve.app import ServePolicy
from ztk.serve.bodies import Limits, read_body
from ztk.serve.text import TextStream
from ztk.serve.tokenizers import Bytes, Pieces, Pretrained, token_name

USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def running():
    limits = Limits(body_bytes=20_000, answers=8, logprobs=5, stops=3)
    found = start(tokenizer=Chatting(), policy=ServePolicy(max_tokens=4, limits=limits))
    yield found
    found.stop()


def post(running, body: object, *, path: str = "completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTP.post(f"{running.url}/v1/{path}", content=content, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": [[True]]}, "prompt must be"),
        ("completions", {"prompt": [[1, 2.0]]}, "prompt must be"),
        ("completions", {"prompt": [1, None]}, "prompt must be"),
        ("completions", {"prompt": [["a"]]}, "prompt must be"),
        ("completions", {"prompt": "a", "logit_bias": {"5": True}}, "logit_bias must map"),
        ("completions", {"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias must map"),
        ("completions", {"prompt": "a", "logit_bias": {"5_0": 1}}, "logit_bias must map"),
        ("completions", b'{"prompt": "a", "logit_bias": {"5": 1' + b"0" * 400 + b"}}", "is too large"),
        ("completions", b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "is too large"),
        ("completions", b'{"prompt": "a", "temperature": NaN}', "temperature=nan"),
        ("completions", b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "no JSON"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": 1}}, "include_usage=1"),
        ("completions", {"prompt": "a", "best_of": True}, "best_of=True"),
        ("completions", {"prompt": "a", "suffix": []}, "suffix is not supported"),
        ("completions", {"prompt": "a\ud83d"}, "prompt has half of a surrogate pair"),
        ("completions", {"prompt": "a", "model": "\ud83d"}, "model has half of a surrogate pair"),
        ("completions", {"prompt": "a", "\ud83d": 1}, "\\ud83d has half of a surrogate pair"),
        ("completions", b'{"prompt": "\xed\xa0\xbd"}', "no JSON"),
        ("completions", b'{"prompt": "\xff"}', "no JSON"),
        ("completions", b"[" * 10_000, "nested too deeply"),
        ("completions", b'{"prompt": ' + b"[" * 9_000 + b"]" * 9_000 + b"}", "nested too deeply"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\udc00"}]}, "messages has half"),
        ("completions", {"prompt": ["a", "b"], "n": 5}, "2 prompts times n=5 are 10 answers, and this server gives 8"),
        ("completions", {"prompt": "a", "n": 100_000}, "this server gives 8"),
        ("completions", {"prompt": "a", "logprobs": 6}, "gives 5 at most"),
        ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2**31}, "gives 5 at most"),
        ("completions", {"prompt": "a", "stop": ["a", "b", "c", "d"]}, "stop may have 3 texts"),
        ("completions", {"prompt": "a", "stop": "a" * 2000}, "stop may have 3 texts of 1024 characters"),
        ("completions", {"prompt": "a" * 10_000}, "has 10000 characters, and the 512 tokens of this model have 512"),
    ],
    ids=range(29),
)  # fmt: skip
def test_bodies_that_cannot_be_meant_get_400_with_the_reason(running, path, body, message):
    found = post(running, body, path=path)
    assert found.status_code == 400 and message in found.json()["error"]["message"], found.text[:300]
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_a_body_beyond_the_limit_gets_413_and_no_memory(running):
    found = post(running, b'{"prompt": "' + b"a" * 200_000 + b'"}')
    assert found.status_code == 413 and "20000 bytes" in found.json()["error"]["message"]


def test_routes_that_are_not_there_have_openais_error_body(running):
    for found, status in (
        (HTTP.get(f"{running.url}/v1/engines"), 404),
        (HTTP.get(f"{running.url}/v1/completions"), 405),
    ):
        assert found.status_code == status and found.json()["error"]["type"] == "invalid_request_error"


def test_random_bodies_end_no_other_answer(running):
    """A sample of tests/slow/test_fuzz_server.py: no 500, and the server answers as before."""
    expected = post(running, {"prompt": "abc", "seed": 1, "max_tokens": 8}).json()["choices"]

    async def fuzz() -> list[int]:
        chance = random.Random(0)
        return [await send(running.url, random_body(chance), chance=chance) for _ in range(300)]

    found = asyncio.run(fuzz())
    assert all(status == 0 or 200 <= status < 500 for status in found), sorted(set(found))
    assert found.count(400) > 50 and found.count(200) > 10
    assert post(running, {"prompt": "abc", "seed": 1, "max_tokens": 8}).json()["choices"] == expected


class Slow(Chatting):
    """Takes a second for texts that begin with !, and for their tokens."""

    def encode(self, text):
        time.sleep(text.startswith("!"))
        return super().encode(text)

    def decode(self, tokens):
        time.sleep(len(tokens) > 100)
        return super().decode(tokens)


def test_long_texts_do_not_block_other_requests():
    server = start(tokenizer=Slow(), policy=ServePolicy(max_tokens=4))

    async def ask() -> float:
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            body = {"prompt": "!" * 200, "echo": True, "logprobs": 1, "stream": True}
            other = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
            longest = 0.0
            while not other.done():
                started = time.perf_counter()
                await client.get(f"{server.url}/health")
                longest = max(longest, time.perf_counter() - started)
                await asyncio.sleep(0.01)
            assert other.result().status_code == 200
            return longest

    try:
        assert asyncio.run(ask()) < 0.7  # of two seconds and more that the texts take
    finally:
        server.stop()


def test_an_answer_without_max_tokens_ends_where_the_context_does():
    server = start(tokenizer=Bytes(), policy=ServePolicy(), cache_tokens=512)
    try:
        choice = post(server, {"prompt": "a" * 480}).json()
        assert choice["usage"]["completion_tokens"] == 32 and choice["choices"][0]["finish_reason"] == "length"
        found = post(server, {"prompt": "a" * 512})
        assert found.status_code == 400 and "The prompt has 512 tokens: shorten the prompt" in found.text
    finally:
        server.stop()
    server = start(tokenizer=Bytes(), policy=ServePolicy(), cache_tokens=256)  # memory for less than the context
    try:
        assert post(server, {"prompt": "a" * 250}).json()["usage"]["completion_tokens"] == 6
    finally:
        server.stop()


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ nothing.at.all }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}"],
)
def test_a_chat_template_that_raises_gives_400_with_its_reason(tmp_path, template):
    save_letters(tmp_path)
    inner = transformers.AutoTokenizer.from_pretrained(tmp_path)
    inner.chat_template = template
    with pytest.raises(ValueError, match="chat template refuses the messages: "):
        Pretrained(inner).chat(USER)


def answered(tokens: list[int], *, body: dict, chat: bool, tokenizer: Bytes, top: dict | None = None) -> tuple:
    """The complete choice, and the chunks of a stream."""
    asked = read_body(body | ({"messages": USER} if chat else {"prompt": "é"}), chat=chat, usual=SamplingParams())
    shape = Shape(id="x", model="m", chat=chat, created=0)
    prompt = tokenizer.encode("é")
    answer = Answer(shape=shape, index=0, prompt=prompt, asked=asked, tokenizer=tokenizer)
    chunks = answer.opening()
    for place, token in enumerate(tokens):
        is_last = place == len(tokens) - 1
        chunks += answer.push(
            Output(
                request_id=0,
                sample=0,
                token=token,
                logprob=-1.0,
                processed_logprob=-1.0,
                finish_reason="length" if is_last else None,
                top_logprobs=top,
                prompt_logprobs=[PromptLogprob(-1.0, {}, 1)] * (len(prompt) - 1)
                if asked.sampling.prompt_logprobs and not place
                else None,
            )
        )
    return answer.choice(), [chunk["choices"][0] for chunk in chunks]


def test_tokens_have_their_own_bytes_and_places():
    """Six tokens of two characters had the bytes of U+FFFD; places drifted behind them and began at 0 in each chunk."""
    tokens = list("ok 🔥é.".encode())
    choice, _ = answered(tokens, body={"logprobs": True}, chat=True, tokenizer=Bytes())
    content = choice["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[byte] for byte in tokens]
    assert [token["token"] for token in content][2:5] == [" ", "bytes:\\xf0", "bytes:\\x9f"]
    choice, chunks = answered(tokens, body={"logprobs": 0, "echo": True}, chat=False, tokenizer=Bytes())
    assert choice["text"] == "éok 🔥é."
    expected = [0, 0, 1, 2, 3, 4, 4, 4, 4, 5, 5, 6]
    assert choice["logprobs"]["text_offset"] == expected
    assert [place for chunk in chunks if chunk["logprobs"] for place in chunk["logprobs"]["text_offset"]] == expected


def test_tokens_of_one_text_are_all_named():
    top = {65: -1.0, 300: -2.0, 301: -3.0}
    choice, _ = answered([65], body={"logprobs": 3}, chat=False, tokenizer=Bytes(), top=top)
    assert choice["logprobs"]["top_logprobs"] == [{"A": -1.0, "token_id:300": -2.0, "token_id:301": -3.0}]

    class Twice(Bytes):
        def token_bytes(self, token: int) -> bytes | None:
            return b"A"

    choice, _ = answered([65], body={"logprobs": 3}, chat=False, tokenizer=Twice(), top=top)
    assert choice["logprobs"]["top_logprobs"] == [{"A": -1.0, "token_id:300": -2.0, "token_id:301": -3.0}]


def test_a_tokenizers_pieces_have_spaces_bytes_and_special_tokens():
    vocabulary = {"▁the": 0, "cat": 1, "<0xE2>": 2, "<s>": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    inner.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    ])  # fmt: skip
    inner.add_special_tokens(["<s>"])
    pieces = Pieces(inner)
    assert [pieces.token_bytes(token) for token in range(5)] == [b" the", b"cat", b"\xe2", b"<s>", None]
    assert [token_name(token, own=pieces.token_bytes(token)) for token in (0, 2, 4)] == [
        " the",
        "bytes:\\xe2",
        "token_id:4",
    ]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġthe": 0, "Ã": 1}, []))
    inner.decoder = tokenizers.decoders.ByteLevel()
    assert [Pieces(inner).token_bytes(token) for token in range(2)] == [b" the", b"\xc3"]


def test_a_text_of_broken_characters_takes_linear_time():
    """Each token decoded all before it: 4,000 tokens took 16,000,000."""

    class Counting(Bytes):
        decoded = 0

        def decode(self, tokens):
            self.decoded += len(tokens)
            return super().decode(tokens)

    tokenizer = Counting()
    stream = TextStream(tokenizer)
    text = "".join(stream.push(0x9F) for _ in range(4000)) + "".join(stream.push(byte) for byte in "🔥".encode())
    assert text + stream.finish() == "\ufffd" * 4000 + "🔥" and tokenizer.decoded < 200_000
