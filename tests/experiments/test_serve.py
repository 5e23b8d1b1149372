"""`task=serve` as a process: answers to the `openai` package, and its end."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.experiments.test_faults import CHECKOUT
from tests.inference.models import save_llama
from ztk.inference import Generator, SamplingParams

TOKENS = 200


@contextmanager
def serving(tmp_path, *more: str):
    """A process that serves a new model, its address and the model."""
    folder = tmp_path / "model"
    model = save_llama(folder)
    words = (f"inference.model={folder}", "serve.port=0", f"hydra.run.dir={tmp_path / 'out'}", *more)
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
        yield process, found[1], model
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_a_running_answer_end(tmp_path):
    with serving(tmp_path) as (process, address, _):
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


def test_a_rank_that_dies_ends_streams_with_an_error_and_the_process(tmp_path):
    with serving(tmp_path, "topology=tp2") as (process, address, module):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        options = {"model": "model", "prompt": [3, 1, 4], "temperature": 0, "extra_body": {"ignore_eos": True}}
        found = client.completions.create(**options, max_tokens=8, logprobs=1).choices[0].logprobs
        [[alone]] = Generator(module).generate([[3, 1, 4]], sampling=SamplingParams(max_tokens=8, temperature=0))
        assert found.token_logprobs == pytest.approx(alone.logprobs.tolist(), rel=1e-4)
        with pytest.raises(openai.APIError, match="the engine has stopped|all_gather|broadcast|closed|lost"):
            for _ in client.completions.create(**options, max_tokens=TOKENS, stream=True):
                if process.poll() is None and (rank := rank_one(process.pid)) is not None:
                    os.kill(rank, signal.SIGKILL)
        assert process.wait(timeout=60) == 1


def rank_one(launcher: int) -> int | None:
    """The process of rank 1."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = folder.joinpath("stat").read_text().rpartition(")")[2].split()[1] == str(launcher)
            if is_child and b"\0RANK=1\0" in folder.joinpath("environ").read_bytes():
                return int(folder.name)
        except OSError:
            pass  # it has ended
    return None
