"""`task=serve` as a process: answers to the `openai` package, and its end."""

import re
import signal
import subprocess
import sys

import openai
import pytest

from tests.experiments.test_faults import CHECKOUT
from tests.inference.models import save_llama

TOKENS = 200


@pytest.fixture
def serving(tmp_path):
    """A process that serves a new model, and its address."""
    folder = tmp_path / "model"
    save_llama(folder)
    words = (f"inference.model={folder}", "serve.port=0", f"hydra.run.dir={tmp_path / 'out'}")
    command = [sys.executable, str(CHECKOUT / "run.py"), "task=serve", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"answers on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_a_running_answer_end(serving):
    process, address = serving
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list()
    options = {"model": model.id, "prompt": "ABC", "max_tokens": TOKENS, "temperature": 0}
    full = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0]
    assert full.finish_reason == "length"
    parts = []
    for part in client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}):
        if not parts:
            process.send_signal(signal.SIGTERM)
        parts.append(part.choices[0])
    assert "".join(part.text for part in parts) == full.text and parts[-1].finish_reason == "length"
    assert process.wait(timeout=60) == 0
