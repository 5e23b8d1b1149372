"""`task=serve` as a process: answers to the `openai` package, and its end."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.experiments.test_faults import CHECKOUT
from tests.inference.models import save_llama
from ztk.config import Machine, compose
from ztk.core.launch.processes import MOST_SECONDS_AFTER_FAILURE
from ztk.experiments.serve import main
from ztk.inference import Generator, SamplingParams

TOKENS = 200
PROMISED_SECONDS = 5.0  # from the end of a rank to the end of all streams and of the process


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
            if found := re.search(r"answers on (https?://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield process, found[1], model
    finally:
        process.kill()
        process.communicate()


def test_a_port_in_use_is_found_before_the_model_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("ztk.experiments.serve.answering", lambda config: pytest.fail("the model was opened"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("task=serve", f"inference.model={tmp_path}", f"serve.port={port}")
        (tmp_path / "config.json").write_text("{}")
        config = compose(*words, output_dir=tmp_path / "out", machine=Machine(gpus=0, cores=1))
        with pytest.raises(ValueError, match=f"serve.port={port} of serve.host=127.0.0.1: Address already in use"):
            main(config)


@pytest.fixture
def certificate(tmp_path):
    """Of 127.0.0.1, with its key."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "own.pem"]
    command += ["-days", "2", "-subj", "/CN=own", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "own.pem", tmp_path / "key.pem"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_certificate_makes_it_https(tmp_path, certificate):
    own, key = certificate
    with serving(tmp_path, f"serve.tls_certificate={own}", f"serve.tls_key={key}") as (_, url, _model):
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=own)
        assert httpx.get(f"{url}/health", verify=trusting).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve.tls_key=x.pem"], "goes with serve.tls_certificate"),
        (["serve.tls_certificate=none.pem"], "none.pem: .*name PEM files"),
    ],
)
def test_a_certificate_that_cannot_be_read_is_found_before_the_model_is_opened(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr("ztk.experiments.serve.answering", lambda config: pytest.fail("the model was opened"))
    (tmp_path / "config.json").write_text("{}")
    words = ("task=serve", f"inference.model={tmp_path}", "serve.port=0", *words)
    config = compose(*words, output_dir=tmp_path / "out", machine=Machine(gpus=0, cores=1))
    with pytest.raises(ValueError, match=message):
        main(config)


def test_sigterm_lets_a_running_answer_end(tmp_path):
    with serving(tmp_path, "serve.model_name=org/letters") as (process, address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list()
        assert model.id == "org/letters" == client.models.retrieve(model.id).id
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
        assert (
            "leaked" not in process.stdout.read()
        )  # triton's bindings, of objects that the last collection did not find


def test_a_rank_that_dies_ends_streams_with_an_error_and_the_process(tmp_path):
    with serving(tmp_path, "topology=tp2") as (process, address, module):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        options = {"model": "model", "prompt": [3, 1, 4], "temperature": 0, "extra_body": {"ignore_eos": True}}
        found = client.completions.create(**options, max_tokens=8, logprobs=1).choices[0].logprobs
        [[alone]] = Generator(module).generate([[3, 1, 4]], sampling=SamplingParams(max_tokens=8, temperature=0))
        assert found.token_logprobs == pytest.approx(alone.logprobs.tolist(), rel=1e-4)
        died = None
        with pytest.raises(openai.APIError, match="the engine has stopped|all_gather|broadcast|closed|lost"):
            for _ in client.completions.create(**options, max_tokens=TOKENS, stream=True):
                if died is None:
                    os.kill(rank_of(1, launcher=process.pid), signal.SIGKILL)
                    died = time.monotonic()
        assert time.monotonic() - died < PROMISED_SECONDS  # the next sum of the step that runs
        assert seconds_until_end(process) < PROMISED_SECONDS and process.returncode == 1


@pytest.mark.parametrize("stopped", [False, True], ids=["idle", "the other one hangs"])
def test_a_rank_that_dies_ends_the_process_in_time_whatever_the_other_does(stopped, tmp_path):
    """The launcher's part of the promise: it notices, lets the other rank write its error, ends it, and kills it if it stays."""
    assert MOST_SECONDS_AFTER_FAILURE < PROMISED_SECONDS
    with serving(tmp_path, "topology=tp2") as (process, _, _):
        if stopped:
            os.kill(rank_of(0, launcher=process.pid), signal.SIGSTOP)
        os.kill(rank_of(1, launcher=process.pid), signal.SIGKILL)
        assert seconds_until_end(process) < PROMISED_SECONDS and process.returncode == 1


def seconds_until_end(process: subprocess.Popen) -> float:
    """Seconds in which the process ran on. Where a machine stops all of its processes for a while, this one's pauses are not counted."""
    counted, last = 0.0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.01)
        now = time.monotonic()
        counted, last = counted + min(now - last, 0.5), now
        assert counted < 60
    return counted


def rank_of(rank: int, *, launcher: int) -> int:
    """The process of a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = folder.joinpath("stat").read_text().rpartition(")")[2].split()[1] == str(launcher)
            if is_child and b"\0RANK=%d\0" % rank in folder.joinpath("environ").read_bytes():
                return int(folder.name)
        except OSError:
            pass  # it has ended
    raise AssertionError(f"no rank {rank}")
