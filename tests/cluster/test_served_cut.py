"""The machine of the servers that draw for a run loses its network: `pytest tests/cluster/test_served_cut.py --slow`."""

import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import network
from tests.cluster.network import ADDRESSES, Network, wait_until
from tests.slow.served import ENVIRONMENT, finished, outcome, server_command, trainer_command
from ztk.rl.rollout.clients import PROBE_SECONDS

pytestmark = pytest.mark.slow
SECONDS, WAIT_SECONDS, CUT_SECONDS = 600, 300, 20


@pytest.fixture(scope="module", autouse=True)
def _permitted():
    if reason := network.missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The folder of a run that draws by itself."""
    return finished(tmp_path_factory.mktemp("own") / "run", seconds=SECONDS)


def serve(nodes: Network, *, model: Path, port: int) -> Path:
    """Starts a server on the second node. Returns its log."""
    log = nodes.folder / f"{port}.log"
    words = (
        f"serve.weights_path={nodes.folder}/weights{port}",
        "serve.host=0.0.0.0",
        f"serve.allowed_hosts=[{ADDRESSES[1]}]",
    )
    command = server_command(nodes.folder / f"server{port}", model=model, port=port, words=words)
    nodes.start(1, command, environment=ENVIRONMENT, log=log)
    return log


def answers(log: Path) -> bool:
    return "answers on http" in log.read_text()


def serve_all(nodes: Network, *, model: Path, ports: Sequence[int]) -> None:
    """Returns when all answer."""
    logs = [serve(nodes, model=model, port=port) for port in ports]
    wait_until(lambda: all(map(answers, logs)), seconds=SECONDS, text=logs[0].read_text)


class Run:
    """A run on the first node, after its first steps."""

    def __init__(self, nodes: Network, *, ports: Sequence[int], words: Sequence[str] = ()) -> None:
        self.folder, self.log = nodes.folder / "a" / "run", nodes.folder / "run.log"
        urls = ",".join(f"http://{ADDRESSES[1]}:{port}" for port in ports)
        command = trainer_command(
            self.folder, f"rollout.servers=[{urls}]", f"rollout.servers_wait={WAIT_SECONDS}", *words
        )
        self.process = nodes.start(0, command, environment=ENVIRONMENT, log=self.log)
        self.wait_for(5)

    @property
    def steps(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for(self, steps: int, *, seconds: float = SECONDS) -> float:
        """Returns the seconds."""

        def is_far() -> bool:
            return self.steps >= steps or self.process.poll() is not None

        return wait_until(is_far, seconds=seconds, text=self.log.read_text)

    def outcome(self) -> dict:
        assert self.process.wait(SECONDS) == 0, self.log.read_text()[-3000:]
        return outcome(self.folder)


def signal_all(nodes: Network, number: signal.Signals) -> None:
    """To the processes of the servers' node."""
    for pid in nodes.pids(1):
        os.kill(pid, number)


def connections(nodes: Network) -> set[str]:
    """Addresses from which the first node is connected to the server."""
    lines = Path(f"/proc/{nodes.pids(0)[0]}/net/tcp").read_text().splitlines()[1:]
    return {
        own for own, other, state in (line.split()[1:4] for line in lines) if other.endswith(":1F40") and state == "01"
    }


@pytest.mark.parametrize("transfer", ["http", "gloo"])
def test_a_cut_changes_no_bit(own, tmp_path, transfer):
    with Network(tmp_path) as nodes:
        serve_all(nodes, model=own, ports=(8000, 8001))
        run = Run(nodes, ports=(8000, 8001), words=[f"rollout.servers_transfer={transfer}"])
        nodes.unplug(1)
        time.sleep(2)  # for a step whose answers have come
        before = run.steps
        time.sleep(CUT_SECONDS - 2)
        assert run.steps == before and run.process.poll() is None, run.log.read_text()[-3000:]
        nodes.plug(1)
        again = run.wait_for(before + 1)
        assert run.outcome() == outcome(own)
    print(
        f"{transfer}: cut after step {before} for {CUT_SECONDS} s, the next step {again:.1f} s after the cable is back"
    )


def test_the_only_server_is_started_again_during_a_cut_with_a_request_under_way(own, tmp_path):
    with Network(tmp_path) as nodes:
        serve_all(nodes, model=own, ports=(8000,))
        run = Run(nodes, ports=(8000,))
        draw = random.Random(0)
        while True:
            time.sleep(draw.uniform(0, 1))
            signal_all(nodes, signal.SIGSTOP)
            under_way = connections(nodes)
            time.sleep(PROBE_SECONDS + 2)
            if under_way & connections(nodes):  # not only a look at the server, which has ended by now
                break
            signal_all(nodes, signal.SIGCONT)
            run.wait_for(run.steps + 1)
            assert run.process.poll() is None, "no request was under way at any stop"
        nodes.unplug(1)
        nodes.kill(1)
        before = run.steps
        (nodes.folder / "8000.log").unlink()
        shutil.rmtree(nodes.folder / "server8000")
        serve_all(nodes, model=own, ports=(8000,))
        nodes.plug(1)
        again = run.wait_for(before + 1, seconds=WAIT_SECONDS / 2)
        assert run.outcome() == outcome(own)
    print(f"killed after step {before}, the next step {again:.1f} s after the server answers again")
