"""Checks the server's page in a real browser: answers, token colours by probability, and errors.

python scripts/check_page.py [--shots FOLDER]

Needs Chromium or Chrome on the PATH, or its path in CHROMIUM; Debian: apt-get install chromium. A small decoder with an API key serves on
127.0.0.1. The page is opened at 1400 and 400 pixels, light and dark. Checks: a wrong key shows the refusal; with the key the answer equals
/v1/completions, token by token; the colour and the numbers of each token match its log-probability; a prompt that is too long shows the
server's two numbers; Stop ends the answer and frees its place on the server; text of the model never becomes markup; the page is no wider
than the window, logs no message to the console and sends no request elsewhere.
"""

import argparse
import itertools
import json
import math
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import torch
import uvicorn
from browser import Browser, find_browser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.nn import Decoder, DecoderConfig
from ztk.serve.app import ServePolicy, Server
from ztk.serve.models import Opened, _Bytes

KEY, MAX_LEN, PROMPT, TOKENS = "let me in", 4096, "<b>def main():</b>", 24
STRONGEST = 0.6  # opacity of the colour at probability 0
WAIT_SECONDS = 60.0
SPANS = """[...document.querySelectorAll('#answer span')].map((one) => [one.textContent,
  getComputedStyle(one).backgroundColor, one.title, one.childElementCount])"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=Path, help="folder for screenshots")
    given = parser.parse_args()
    browser = find_browser()
    if browser is None:
        return 2
    origin, faults = serve(), []
    with tempfile.TemporaryDirectory() as scratch:
        for width, dark in itertools.product((1400, 400), (False, True)):
            tab = Browser(browser, profile=Path(scratch, f"{width}{dark}"), origin=origin)
            found = list(check_page(tab, origin=origin, width=width, dark=dark))
            faults += [f"{width} pixels, {'dark' if dark else 'light'}: {fault}" for fault in found]
            if given.shots:
                given.shots.mkdir(parents=True, exist_ok=True)
                tab.shoot(given.shots / f"{width}_{'dark' if dark else 'light'}.png")
            tab.close()
    print("\n".join(faults) or "4 pages without a fault")
    return int(bool(faults))


def serve() -> str:
    """Serves a randomly initialised decoder on a free port until the process ends. Returns its origin."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 300, "dim": 64, "layers": 4, "heads": 2, "kv_heads": 1, "hidden_dim": 128}
    module = Decoder(DecoderConfig(**sizes, max_seq_len=MAX_LEN)).eval()
    with torch.no_grad():
        module.head.weight.mul_(4)  # tokens of all probabilities
    opened = Opened(name="tiny & <small>", module=module, tokenizer=_Bytes(), ends=(), vocabulary=128)
    server = Server(
        Generator(module, policy=InferencePolicy(max_sequences=4)),
        opened=opened,
        policy=ServePolicy(api_key=KEY),
        sampling=SamplingParams(),
    )
    listening = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(server.app, log_level="error"))
    threading.Thread(target=http.run, kwargs={"sockets": [listening]}, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def check_page(tab: Browser, *, origin: str, width: int, dark: bool) -> Iterator[str]:
    tab.open(f"{origin}/", width=width, dark=dark)
    tab.evaluate(
        "new Promise((done) => setTimeout(done, 300))"
    )  # the page has requested the model's name without a key
    yield from check_refusal(tab)
    tab.complaints = [
        one for one in tab.complaints if "401" not in one
    ]  # the browser's message about the refused request
    yield from check_answer(tab, origin=origin)
    yield from check_too_long(tab)
    tab.complaints = [one for one in tab.complaints if "400" not in one]
    yield from check_stop(tab, origin=origin)
    if (wide := tab.evaluate("document.documentElement.scrollWidth")) > width:
        yield f"the page is {wide} pixels wide"
    yield from tab.complaints


def check_refusal(tab: Browser) -> Iterator[str]:
    shown = _generate(tab, prompt=PROMPT, tokens=TOKENS, key="wrong")
    if "Incorrect API key" not in shown or tab.evaluate("at('status').className") != "error":
        yield f"a wrong key shows {shown!r}"


def check_answer(tab: Browser, *, origin: str) -> Iterator[str]:
    """Compares text, colours and numbers with /v1/completions."""
    shown = _generate(tab, prompt=PROMPT, tokens=TOKENS, key=KEY)
    if f"{TOKENS} tokens" not in shown:
        yield f"after the answer the page shows {shown!r}"
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 5}
    answer = httpx.post(f"{origin}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    choice = answer.json()["choices"][0]
    spans = tab.evaluate(SPANS)
    if "".join(text for text, *_ in spans) != choice["text"]:
        yield "the text differs from /v1/completions"
    numbers = choice["logprobs"]
    for (text, colour, title, children), value, top in zip(
        spans, numbers["token_logprobs"], numbers["top_logprobs"], strict=True
    ):
        p = math.exp(value)
        alpha = float(colour.strip("rgba()").split(",")[3]) if colour.startswith("rgba(") else 1.0
        if (
            abs(alpha - STRONGEST * (1 - p)) > 1 / 255
        ):  # a colour has 8 bits; the browser writes two digits if they are exact
            yield f"{text!r} of probability {p:.3f} has the colour {colour}"
        expected = [f"{100 * p:.1f} %"] + [f"{100 * math.exp(v):.1f} %" for v in top.values()]
        if [line.rpartition(" ")[0].rpartition(" ")[2] + " %" for line in title.split("\n")] != expected:
            yield f"{text!r} has the title {title!r}, not {expected}"
        if children:
            yield f"{text!r} became markup"
    if tab.evaluate("document.querySelectorAll('#answer b, #answer img, #answer script').length"):
        yield "a text of the model became markup"


def check_too_long(tab: Browser) -> Iterator[str]:
    shown = _generate(tab, prompt=PROMPT, tokens=MAX_LEN, key=KEY)
    if str(MAX_LEN) not in shown or str(len(PROMPT)) not in shown:
        yield f"a prompt that is too long shows {shown!r}"


def check_stop(tab: Browser, *, origin: str) -> Iterator[str]:
    """Stops an answer of thousands of tokens."""
    before = _counters(origin)["ztk_cancelled_total"]
    _fill(tab, prompt=PROMPT, tokens=MAX_LEN - len(PROMPT), key=KEY)
    tab.evaluate("at('go').click()")
    if not _until(lambda: tab.evaluate("document.querySelectorAll('#answer span').length > 3")):
        yield "tokens do not come one by one"
    tab.evaluate("at('stop').click()")
    if not _until(lambda: tab.evaluate("at('status').textContent") == "stopped"):
        yield "Stop does not stop"
    if not _until(lambda: _counters(origin)["vllm:num_requests_running"] == 0):
        yield "a stopped answer still runs on the server"
    if _counters(origin)["ztk_cancelled_total"] != before + 1:
        yield "the server did not count the answer that was stopped"
    if tab.evaluate("at('go').disabled"):
        yield "the form stays disabled after Stop"


def _fill(tab: Browser, *, prompt: str, tokens: int, key: str) -> None:
    for name, value in {"prompt": prompt, "max_tokens": str(tokens), "temperature": "0", "key": key}.items():
        tab.evaluate(f"at({json.dumps(name)}).value = {json.dumps(value)}")


def _generate(tab: Browser, *, prompt: str, tokens: int, key: str) -> str:
    """Submits a prompt and returns the page's status at its end."""
    _fill(tab, prompt=prompt, tokens=tokens, key=key)
    tab.evaluate("at('go').click()")
    _until(lambda: not tab.evaluate("at('go').disabled"))
    return tab.evaluate("at('status').textContent")


def _until(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if is_true():
            return True
        time.sleep(0.1)
    return False


def _counters(origin: str) -> dict[str, float]:
    lines = [line for line in httpx.get(f"{origin}/metrics").text.splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


if __name__ == "__main__":
    sys.exit(main())
