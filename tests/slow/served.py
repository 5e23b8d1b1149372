"""Processes of `task=serve` and of a run that they draw for, with proxies in between that can be slow, cut, or lead to another process."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.slow.test_kill_runs import processes_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
STEPS = 60
SHAPE = ("model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.hidden_dim=64")
RUN = (
    *("task=grpo", *SHAPE),
    *("rollout.prompts=8", "rollout.group_size=4", "rollout.max_tokens=6", "data.seq_len=12", f"train.steps={STEPS}"),
    *("train.global_batch_size=16", "train.micro_batch_size=4", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("warm_start.steps=100", "warm_start.batch_size=16", "warm_start.lr=0.01", "logger=disabled", "launch.threads=1"),
    *("launch.device=cpu", "launch.ranks=2", "zero=stage3", "rollout.stop_equal_steps=99", "rollout.show_every=0"),
    *("rollout.engine=generator", "rollout.identity=exact", "rollout.save_completions=true", "checkpoint.every=5"),
)
# Answers of an untrained model differ under it.
REWARD = "def score(prompt, answer, record):\n    return (sum(answer.encode()) % 7) / 7\n"
START_SECONDS = 300.0
_BYTES = 1 << 12
_ANSWERS = (b"POST /v1/completions", b"POST /classify")


def trainer_command(folder: Path, *words: str) -> list[str]:
    """A run with the reward of `REWARD`. words: options, which replace options of `RUN`."""
    reward = folder.parent / "mine.py"
    folder.parent.mkdir(parents=True, exist_ok=True)
    reward.write_text(REWARD)
    given = (*RUN, f"hydra.run.dir={folder}", f"reward.function={reward}:score", *words)
    return [sys.executable, str(ROOT / "run.py"), *{word.partition("=")[0]: word for word in given}.values()]


def server_command(folder: Path, *, model: Path, port: int, words: Sequence[str]) -> list[str]:
    given = (f"inference.model={model}", f"serve.port={port}", "launch.threads=1", f"hydra.run.dir={folder}")
    return [sys.executable, str(ROOT / "run.py"), "task=serve", *given, *words]


def started(command: Sequence[str], *, log: Path) -> subprocess.Popen:
    """A process whose output is appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def finished(folder: Path, *, seconds: float) -> Path:
    """Trains in `folder`, draws without servers, and returns the folder."""
    log = folder.with_suffix(".log")
    assert started(trainer_command(folder), log=log).wait(seconds) == 0, log.read_text()[-3000:]
    return folder


class Server:
    """A process that serves on one port, with the weights of `model` after each start. takes_weights: from a run."""

    def __init__(self, *, model: Path, folder: Path, takes_weights: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._model, self._folder, self._number = model, folder, 0
        self._words = (f"serve.weights_path={folder}/weights",) if takes_weights else ()
        self.start()

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._number}.log"

    def start(self) -> None:
        """Returns before the server answers."""
        self._number += 1
        given = {"model": self._model, "port": self.port, "words": self._words}
        self.process = started(server_command(self._folder / str(self._number), **given), log=self._log)

    @property
    def answers(self) -> bool:
        """Whether the process of the last start serves."""
        return self.process.poll() is None and re.search("(answers|scores) on http", self._log.read_text()) is not None

    def wait(self) -> None:
        """Waits until the server answers."""
        until = time.monotonic() + START_SECONDS
        while not self.answers:
            assert self.process.poll() is None and time.monotonic() < until, self._log.read_text()[-3000:]
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Cable:
    """A TCP proxy in front of a server. server: may be replaced. delay: seconds by which each answer of a model is late. is_cut: nothing goes
    through.

    at_request: called once, when a request for answers comes, before it goes to a server. at_weights: called once, when weights are on their
    way to the server: after a part of a file has passed, or while it pulls tensors. share: of that file, or of `PULL_SECONDS`.
    """

    PULL_SECONDS = 0.4

    def __init__(self, server: Server) -> None:
        self.server, self.delay, self.is_cut, self.share = server, 0.0, False, 0.0
        self.at_request: Callable[[], None] | None = None
        self.at_weights: Callable[[], None] | None = None
        self._open, self._lock = set[socket.socket](), threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Resets all connections, and refuses others until `is_cut` is False."""
        self.is_cut = True
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
            else:
                threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        """One connection has one request."""
        with ExitStack() as stack:
            stack.enter_context(client)
            try:
                head = client.recv(_BYTES)
                if self.at_request is not None and head.startswith(_ANSWERS):
                    call, self.at_request = self.at_request, None
                    call()
                server = stack.enter_context(socket.create_connection(("127.0.0.1", self.server.port)))
            except OSError:
                return
            both = {client, server}
            with self._lock:
                self._open |= both
            replied = threading.Event()
            with suppress(OSError):
                server.sendall(head)
                threading.Thread(target=self._up, args=(head, client, server, replied), daemon=True).start()
                while data := server.recv(_BYTES):
                    if not replied.is_set() and head.startswith(_ANSWERS):
                        time.sleep(self.delay)
                    replied.set()
                    client.sendall(data)
            for one in both:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open -= both

    def _up(self, head: bytes, client: socket.socket, server: socket.socket, replied: threading.Event) -> None:
        """The rest of a request, or a part of it if `at_weights` is to be called."""
        passed, size = len(head), 0
        if head.startswith(b"PUT /v1/weights/") and (found := re.search(rb"(?i)content-length: (\d+)", head)):
            size = int(found[1])
        with suppress(OSError):
            if head.startswith(b"POST /v1/weights HTTP"):
                threading.Thread(target=self._pulled, args=(replied,), daemon=True).start()
            while data := client.recv(_BYTES):
                if size and self.at_weights is not None and passed >= self.share * size:
                    self._call()
                server.sendall(data)
                passed += len(data)

    def _pulled(self, replied: threading.Event) -> None:
        """Without files the request is answered when the server has all tensors."""
        if self.at_weights is not None and not replied.wait(self.share * self.PULL_SECONDS):
            self._call()

    def _call(self) -> None:
        with self._lock:
            call, self.at_weights = self.at_weights, None
        if call is not None:
            call()


class Scene:
    """A run and two servers that it asks through cables. spare: a further server, which may take the place of another one."""

    def __init__(self, folder: Path, *, model: Path, key: str, words: Sequence[str]) -> None:
        """key: has the addresses of servers."""
        given = {"model": model, "takes_weights": key == "rollout.servers"}
        servers = [Server(folder=folder / f"server{number}", **given) for number in range(3)]
        for server in servers:
            server.wait()
        self._folder, self._key, self._words = folder, key, words
        self.cables, self.spare = [Cable(server) for server in servers[:-1]], servers[-1]
        self.runs = 0

    def start_run(self) -> None:
        """Starts another run. The servers keep the weights of the one before."""
        self.runs += 1
        self.start_trainer()

    def start_trainer(self) -> None:
        """Starts or resumes the trainer of the run."""
        urls = ",".join(cable.url for cable in self.cables)
        where = (f"{self._key}=[{urls}]", f"{self._key}_wait={START_SECONDS}", "checkpoint.resume=auto")
        self.trainer = started(trainer_command(self.run_folder, *where, *self._words), log=self.log)

    def kill_trainer(self) -> None:
        """Its ranks end with it."""
        self.trainer.kill()
        self.trainer.wait()
        assert not processes_of(self.run_folder, seconds=20)

    @property
    def run_folder(self) -> Path:
        return self._folder / f"run{self.runs}" / "run"

    @property
    def log(self) -> Path:
        return self.run_folder.with_suffix(".log")

    @property
    def is_running(self) -> bool:
        return self.trainer.poll() is None

    def steps(self) -> int:
        file = self.run_folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def close(self) -> None:
        if self.runs:
            self.trainer.kill()
            self.trainer.wait()
        for cable in self.cables:
            cable.close()
        for server in [*(cable.server for cable in self.cables), self.spare]:
            server.kill()


@contextmanager
def scene(folder: Path, *, model: Path, key: str = "rollout.servers", words: Sequence[str] = ()) -> Iterator[Scene]:
    made = Scene(folder, model=model, key=key, words=words)
    try:
        yield made
    finally:
        made.close()


# Faults. Each returns whether it happened while the run was running. draw: chances of this sequence of faults.


def killed(scene: Scene, *, draw: random.Random) -> bool:
    """While it draws. The server starts again with the weights of its folder."""
    cable, seconds = _chosen(scene, draw=draw), draw.uniform(0, 0.3)
    server = cable.server

    def kill() -> None:
        threading.Timer(seconds, server.process.kill).start()

    if not _happened(scene, cable, "at_request", kill):
        return False
    server.process.wait()
    server.start()
    return scene.is_running


def killed_in_a_transfer(scene: Scene, *, draw: random.Random) -> bool:
    cable = _chosen(scene, draw=draw)
    server, cable.share = cable.server, draw.random()
    if not _happened(scene, cable, "at_weights", server.kill):
        return False
    server.start()
    return scene.is_running


def stopped(scene: Scene, *, draw: random.Random) -> bool:
    process = _chosen(scene, draw=draw).server.process
    process.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(1, 6))
    process.send_signal(signal.SIGCONT)
    return scene.is_running


def slow(scene: Scene, *, draw: random.Random) -> bool:
    cable = _chosen(scene, draw=draw)
    cable.delay = draw.uniform(0.2, 4)
    time.sleep(draw.uniform(2, 6))
    cable.delay = 0.0
    return scene.is_running


def exchanged(scene: Scene, *, draw: random.Random) -> bool:
    """Without an error that the run could see, another process gets a request, whose weights are old or have not come from this run."""
    if not scene.spare.answers:
        scene.spare.wait()
    cable = _chosen(scene, draw=draw)

    def exchange() -> None:
        cable.server, scene.spare = scene.spare, cable.server

    return _happened(scene, cable, "at_request", exchange) and scene.is_running


def cut(scene: Scene, *, draw: random.Random) -> bool:
    cable = _chosen(scene, draw=draw)
    cable.cut()
    time.sleep(draw.uniform(0.5, 5))
    cable.is_cut = False
    return scene.is_running


def trainer_killed(scene: Scene, *, draw: random.Random) -> bool:
    """Returns after the first step of the resumed run that is new."""
    if not scene.is_running:
        return False
    scene.kill_trainer()
    before = scene.steps()
    scene.start_trainer()
    wait_for_steps(scene, before + 1)
    return scene.is_running


FAULTS = (killed, killed_in_a_transfer, stopped, slow, exchanged, cut, trainer_killed)


def _happened(scene: Scene, cable: Cable, moment: str, call: Callable[[], object]) -> bool:
    """Calls at a moment of the cable, unless the run ends before."""
    happened = threading.Event()

    def both() -> None:
        call()
        happened.set()

    setattr(cable, moment, both)
    while not happened.wait(0.1) and scene.is_running:
        pass
    setattr(cable, moment, None)
    return happened.is_set()


def _chosen(scene: Scene, *, draw: random.Random) -> Cable:
    """One whose server runs, after a wait for it if all have been killed."""
    until = time.monotonic() + START_SECONDS
    while not (alive := [cable for cable in scene.cables if cable.server.answers]):
        assert time.monotonic() < until, "no server starts"
        time.sleep(0.1)
    return draw.choice(alive)


def wait_for_steps(scene: Scene, steps: int) -> None:
    """Returns early if the run ends."""
    until = time.monotonic() + START_SECONDS
    while scene.steps() < steps and scene.is_running:
        assert time.monotonic() < until, scene.log.read_text()[-3000:]
        time.sleep(0.1)


def outcome(folder: Path) -> dict:
    """The digest of a finished run with all its prompts and answers, which servers must not change."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "done"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["rollout_differing"] == 0 and row.get("rollout_staleness_max", 0) == 0 for row in rows)
    return {
        "digest": summary["loss_digest"],
        "answers": sorted((folder / "completions.jsonl").read_text().splitlines()),
    }
