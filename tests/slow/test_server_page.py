"""The server's page in a real browser, at 1400 and 400 pixels, light and dark: answers, token colours by probability, and errors.

A small decoder with an API key serves on 127.0.0.1. A wrong key shows the refusal; with the key the answer equals /v1/completions, token by
token; the colour and the numbers of each token match its log-probability; a prompt that is too long shows the server's two numbers; Stop ends
the answer and frees its place on the server; text of the model never becomes markup; the page is no wider than the window, logs no message to
the console and sends no request elsewhere.
"""

import json
import math

import httpx
import pytest
import torch

from tests.serve.test_server import start
from tests.slow.browser import Browser, until
from ztk.nn import Decoder, DecoderConfig
from ztk.serve.app import ServePolicy
from ztk.serve.models import Opened
from ztk.serve.tokenizers import Bytes

KEY, MAX_LEN, PROMPT, TOKENS = "let me in", 4096, "<b>def main():</b>", 24
STRONGEST = 0.6  # opacity of the colour at probability 0
SPANS = """[...document.querySelectorAll('#answer span')].map((one) => [one.textContent,
  getComputedStyle(one).backgroundColor, one.title, one.childElementCount])"""


@pytest.fixture(scope="module")
def origin():
    torch.manual_seed(3)
    sizes = {"vocab_size": 300, "dim": 64, "layers": 4, "heads": 2, "kv_heads": 1, "hidden_dim": 128}
    module = Decoder(DecoderConfig(**sizes, max_seq_len=MAX_LEN)).eval()
    with torch.no_grad():
        module.head.weight.mul_(4)  # tokens of all probabilities
    opened = Opened(name="tiny & <small>", module=module, tokenizer=Bytes(), ends=(), vocabulary=128)
    found = start(opened=opened, policy=ServePolicy(api_key=KEY))
    yield found.url
    found.stop()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_of_the_server(browser, origin, tmp_path, width, dark):
    tab = browser(origin=origin)
    tab.open(f"{origin}/", width=width, dark=dark)
    tab.evaluate(
        "new Promise((done) => setTimeout(done, 300))"
    )  # the page has requested the model's name without a key
    shown = generate(tab, tokens=TOKENS, key="wrong")
    assert "Incorrect API key" in shown and tab.evaluate("at('status').className") == "error"
    check_answer(tab, origin=origin)
    shown = generate(tab, tokens=MAX_LEN)
    assert str(MAX_LEN) in shown and str(len(PROMPT)) in shown
    check_stop(tab, origin=origin)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    # Without the browser's own messages about the two refused requests.
    assert not [one for one in tab.complaints if "401" not in one and "400" not in one]
    tab.shoot(tmp_path / "page.png")


def check_answer(tab: Browser, *, origin: str) -> None:
    """Compares text, colours and numbers with /v1/completions."""
    assert f"{TOKENS} tokens" in generate(tab, tokens=TOKENS)
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 5}
    answer = httpx.post(f"{origin}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    choice, spans = answer.json()["choices"][0], tab.evaluate(SPANS)
    assert "".join(text for text, *_ in spans) == choice["text"]
    numbers = choice["logprobs"]
    for (text, colour, title, children), value, top in zip(
        spans, numbers["token_logprobs"], numbers["top_logprobs"], strict=True
    ):
        p = math.exp(value)
        alpha = float(colour.strip("rgba()").split(",")[3]) if colour.startswith("rgba(") else 1.0
        # A colour has 8 bits; the browser writes two digits if they are exact.
        assert abs(alpha - STRONGEST * (1 - p)) <= 1 / 255, f"{text!r} of probability {p:.3f} has the colour {colour}"
        expected = [f"{100 * p:.1f} %"] + [f"{100 * math.exp(v):.1f} %" for v in top.values()]
        assert [line.rpartition(" ")[0].rpartition(" ")[2] + " %" for line in title.split("\n")] == expected
        assert not children, f"{text!r} became markup"
    assert not tab.evaluate("document.querySelectorAll('#answer b, #answer img, #answer script').length")


def check_stop(tab: Browser, *, origin: str) -> None:
    """Stops an answer of thousands of tokens."""
    before = counters(origin)["ztk_cancelled_total"]
    fill(tab, tokens=MAX_LEN - len(PROMPT))
    tab.evaluate("at('go').click()")
    assert until(lambda: tab.evaluate("document.querySelectorAll('#answer span').length > 3")), "no tokens one by one"
    tab.evaluate("at('stop').click()")
    assert until(lambda: tab.evaluate("at('status').textContent") == "stopped")
    assert until(lambda: counters(origin)["vllm:num_requests_running"] == 0), "it still runs on the server"
    assert counters(origin)["ztk_cancelled_total"] == before + 1
    assert not tab.evaluate("at('go').disabled")


def fill(tab: Browser, *, tokens: int, key: str = KEY) -> None:
    for name, value in {"prompt": PROMPT, "max_tokens": str(tokens), "temperature": "0", "key": key}.items():
        tab.evaluate(f"at({json.dumps(name)}).value = {json.dumps(value)}")


def generate(tab: Browser, *, tokens: int, key: str = KEY) -> str:
    """Submits the prompt and returns the page's status at its end."""
    fill(tab, tokens=tokens, key=key)
    tab.evaluate("at('go').click()")
    until(lambda: not tab.evaluate("at('go').disabled"))
    return tab.evaluate("at('status').textContent")


def counters(origin: str) -> dict[str, float]:
    lines = [line for line in httpx.get(f"{origin}/metrics").text.splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
