"""The tutorials in docs/tutorials: files and commands of a page, in its order, in one folder.

Steps are fewer, and large models are small. Pages whose commands take most of a minute of CPU are slow tests.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.hf import small

CHECKOUT = Path(__file__).parents[2]
FOLDER = CHECKOUT / "docs" / "tutorials"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MODEL = "python scripts/get_model.py smollm2 smollm2"  # tests/real has the real one
STEPS, WAITING_SECONDS = 3, 60
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}a {{ message.content }} b {% else %}{{ message.content }}<eos>"
    "{% endif %}{% endfor %}"
)


def parts(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, title and text of the fences of a page."""
    yield from FENCE.findall(page.read_text(encoding="utf-8"))


def commands(text: str) -> list[str]:
    """The commands of a fence, each on one line."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


class Reader:
    """Someone who follows a tutorial in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: list[subprocess.Popen] = []
        self._ports = {port: free_port() for port in ("8000", "8001")}  # of a page -> of this machine
        (folder / "docs").symlink_to(CHECKOUT / "docs")

    def follow(self, page: Path) -> None:
        """Writes the files, runs the commands, and ends the servers. Machines of the page are this one."""
        fences = [(language, title, self._here(text)) for language, title, text in parts(page)]
        for _, title, text in fences:
            if title:
                (self._folder / title).write_text(text)
        try:
            for language, title, text in fences:
                for command in commands(text) if language == "bash" and not title else []:
                    self._run(command)
        finally:
            for server in self._servers:
                server.terminate()
            for server in self._servers:
                server.wait(WAITING_SECONDS)

    def _here(self, text: str) -> str:
        for port, own in self._ports.items():
            text = re.sub(rf"http://[ab]:{port}", f"http://127.0.0.1:{own}", text).replace(port, own)
        return text

    def _run(self, command: str) -> None:
        if command == MODEL:
            small.save_model(self._folder / "smollm2")
            tokenizer = small.tokenizer()
            tokenizer.chat_template = TEMPLATE
            tokenizer.save_pretrained(self._folder / "smollm2")
            return
        words = shlex.split(command, comments=True)
        if words[0] == "curl":
            done = subprocess.run([*words, "--fail"], cwd=self._folder, capture_output=True, text=True)
        elif words[:2] != ["python", "run.py"]:
            done = subprocess.run(
                [sys.executable, *words[1:]],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
                capture_output=True,
                text=True,
            )
        elif words[-1] == "&":
            self._serve(words[2:-1])
            return
        else:
            fewer = []
            if "plan.search=true" in words:
                words[words.index("launch.ranks=8")] = "launch.ranks=2"
                fewer.append("plan.traced=2")
            if "task=grpo" in words and "warm_start.steps=0" not in words:
                fewer.append("warm_start.steps=120")
            done = run_command(*map(shortened, words[2:]), *fewer, cwd=self._folder)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    def _serve(self, words: list[str]) -> None:
        server = subprocess.Popen(
            [sys.executable, str(CHECKOUT / "run.py"), *words],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._servers.append(server)
        [port] = [word.partition("=")[2] for word in words if word.startswith("serve.port=")]
        until = time.monotonic() + WAITING_SECONDS
        while time.monotonic() < until and server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return
        raise AssertionError(f"the server did not answer (exit code {server.poll()})")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def shortened(word: str) -> str:
    """`train.steps=300` -> `train.steps=3`, one more for the resumed run; the planned 7b -> nano, short sequences."""
    if found := re.fullmatch(r"train\.steps=(\d+)", word):
        return f"train.steps={STEPS + (found[1] == '400')}"
    sizes = {"model=7b": "model=nano", "data.seq_len=4096": "data.seq_len=64"}
    return sizes.get(word, word)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "reader"
    folder.mkdir()
    return Reader(folder)


@pytest.mark.slow
def test_train(reader, tmp_path):
    reader.follow(FOLDER / "train.md")
    rows = [json.loads(file.read_text()) for file in (tmp_path / "reader" / "stages").glob("*/summary.json")]
    assert len(rows) == 4 and len({row["loss_digest"] for row in rows}) == 1
    assert (tmp_path / "reader" / "exported" / "model.safetensors").exists()
    lines = (tmp_path / "reader" / "runs" / "model-answers" / "completions.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(json.loads(line)["answers"] for line in lines)


@pytest.mark.slow
def test_fine_tune(reader, tmp_path):
    pytest.importorskip("peft")
    reader.follow(FOLDER / "fine_tune.md")
    assert (tmp_path / "reader" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_align(reader, tmp_path):
    reader.follow(FOLDER / "align.md")
    for name in ("sorting", "dapo", "mine"):
        rows = (tmp_path / "reader" / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["rollout_differing"] == 0


def test_serve(reader, tmp_path):
    pytest.importorskip("uvicorn")
    reader.follow(FOLDER / "serve.md")
    lines = (tmp_path / "reader" / "runs" / "model-answers" / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_servers(reader, tmp_path):
    pytest.importorskip("uvicorn")
    reader.follow(FOLDER / "servers.md")
    lines = (tmp_path / "reader" / "runs" / "served" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["rollout_staleness"] for row in rows] == [0, 1, 1] and all(row["rollout_k3"] >= 0 for row in rows)


@pytest.mark.slow
def test_plan(reader, tmp_path):
    reader.follow(FOLDER / "plan.md")
    first, third = (
        json.loads((tmp_path / "reader" / "runs" / name / "plan.json").read_text()) for name in ("plan", "plan3")
    )
    assert first["peak_memory.device_bytes"] > third["peak_memory.device_bytes"]
    assert (tmp_path / "reader" / "runs" / "search" / "search.csv").exists()


def test_every_tutorial_is_followed():
    assert sorted(path.stem for path in FOLDER.glob("*.md")) == [
        "align",
        "fine_tune",
        "plan",
        "serve",
        "servers",
        "train",
    ]
