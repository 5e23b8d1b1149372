"""Servers that are killed, stopped, slowed and restarted with old weights change no bit of a run whose answers they draw."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
RUN = (
    *("task=grpo", "model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=64"),
    *("rollout.prompts=8", "rollout.group_size=4", "rollout.max_tokens=6", "data.seq_len=12", "train.steps=60"),
    *("train.global_batch_size=16", "train.micro_batch_size=4", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("warm_start.steps=100", "warm_start.batch_size=16", "warm_start.lr=0.01", "logger=disabled", "launch.threads=1"),
    *(
        "launch.device=cpu",
        "launch.ranks=2",
        "zero=stage3",
        "rollout.stop_equal_steps=99",
        "rollout.engine=generator",
        "rollout.identity=exact",
    ),
)
RUN_SECONDS = 1200.0


class Server:
    """A process of `task=serve` on one port, started again after each kill with the weights of its folder."""

    def __init__(self, *, model: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = (f"inference.model={model}", f"serve.port={self.port}", f"serve.weights_path={folder}")
        self._command = [sys.executable, str(ROOT / "run.py"), "task=serve", *words, "launch.threads=1"]
        self._folder, self._number = folder, 0
        self.start()
        for line in self.process.stdout:
            if re.search(r"answers on http", line):
                break
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._number += 1
        command = [*self._command, f"hydra.run.dir={self._folder}/{self.port}-{self._number}"]
        out = {"stdout": subprocess.PIPE if self._number == 1 else subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, env=ENVIRONMENT, text=True, **out)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def killed(server: Server, *, draw: random.Random) -> None:
    server.kill()
    server.start()
    time.sleep(draw.uniform(5, 20))


def stopped(server: Server, *, draw: random.Random) -> None:
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(1, 6))
    server.process.send_signal(signal.SIGCONT)
    time.sleep(draw.uniform(0, 2))


def slowed(server: Server, *, draw: random.Random) -> None:
    for _ in range(20):
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(draw.uniform(0, 0.3))
        server.process.send_signal(signal.SIGCONT)
        time.sleep(draw.uniform(0, 0.05))


def run(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "run.py"), *RUN, f"hydra.run.dir={folder}", *words]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)


def digest_of(folder: Path, *, process: subprocess.Popen) -> str:
    code, text = process.wait(RUN_SECONDS), Path(f"{folder}.log").read_text()
    assert code == 0, text[-3000:]
    return re.search(r"digest ([0-9a-f]+)", text)[1]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run that draws by itself, its reward, and its digest."""
    folder = tmp_path_factory.mktemp("runs") / "own"
    reward = folder.parent / "mine.py"  # under which answers of an untrained model differ
    reward.write_text("def score(prompt, answer, record):\n    return (sum(answer.encode()) % 7) / 7\n")
    words = (f"reward.function={reward}:score",)
    return folder, words, digest_of(folder, process=run(folder, *words))


@contextmanager
def servers(*, model: Path, folder: Path, count: int = 2):
    with ExitStack() as stack:
        found = []
        for number in range(count):
            (folder / str(number)).mkdir()
            found.append(Server(model=model, folder=folder / str(number)))
            stack.callback(found[-1].kill)
        yield found


@pytest.mark.parametrize("fault", [None, killed, stopped, slowed])
def test_the_digest_is_the_undisturbed_one(own, tmp_path, fault):
    model, words, expected = own
    draw, done = random.Random(7), 0
    with servers(model=model, folder=tmp_path) as found:
        urls = ",".join(server.url for server in found)
        process = run(tmp_path / "run", *words, f"rollout.servers=[{urls}]", "rollout.servers_wait=300")
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None:
            if fault is None or not metrics.exists():
                time.sleep(0.2)
                continue
            fault(draw.choice(found), draw=draw)
            done += 1
        assert digest_of(tmp_path / "run", process=process) == expected
    assert fault is None or done > 0
    print(f"{fault and fault.__name__}: {done} faults")
