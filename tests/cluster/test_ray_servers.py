"""`rollout.servers=[ray,ray]` on a real Ray: `pytest tests/cluster/test_ray_servers.py --slow`."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slow.served import STEPS, outcome, started, trainer_command

pytest.importorskip("ray", reason="needs ray: pip install 'ztk[ray]'")
pytestmark = pytest.mark.slow
PORT, SECONDS = 26479, 400.0
WORDS = ("rollout.servers=[ray,ray]", "rollout.servers_wait=200", "launch.ranks=1", "checkpoint.resume=auto")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray with two cores, which commands of this process join."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        own = {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": folder}
        command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", f"--port={PORT}", "--num-cpus=2"]
        given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with (
            subprocess.Popen([*command, "--include-dashboard=false"], env=os.environ | own, **given) as head,
            pytest.MonkeyPatch.context() as patch,
        ):
            for name, value in (own | {"RAY_ADDRESS": f"127.0.0.1:{PORT}"}).items():
                patch.setitem(os.environ, name, value)
            yield
            head.terminate()


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> dict:
    """The outcome of a run that draws by itself."""
    folder = tmp_path_factory.mktemp("own") / "run"
    process = started(trainer_command(folder, "launch.ranks=1"), log=folder.with_suffix(".log"))
    assert process.wait(SECONDS) == 0, folder.with_suffix(".log").read_text()
    return outcome(folder)


def servers_of(folder: Path) -> list[int]:
    """Process ids of the servers of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # it has ended
            continue
        if b"task=serve" in line and f"{folder}/ray_servers/".encode() in line:
            found.append(int(path.parent.name))
    return sorted(found)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until(condition, *, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.05)


def steps_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.parametrize("transfer", ["http", "gloo"])
def test_servers_that_ray_restarts_change_no_bit(cluster, own, tmp_path, transfer):
    """SIGKILL of a server, of an actor above one, and of the trainer, whose servers end with it."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    command = trainer_command(folder, *WORDS, f"rollout.servers_transfer={transfer}")
    process = started(command, log=log)
    wait_until(lambda: steps_of(folder) >= 3, process=process, log=log)
    before = servers_of(folder)
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(set(servers_of(folder)) - {before[0]}) == 2, process=process, log=log)
    os.kill(parent_of(before[1]), signal.SIGKILL)
    wait_until(lambda: len(set(servers_of(folder)) - set(before)) == 2, process=process, log=log)
    reached = steps_of(folder)
    wait_until(lambda: steps_of(folder) > reached, process=process, log=log)
    process.kill()
    process.wait()
    until = time.monotonic() + SECONDS
    while servers_of(folder):
        assert time.monotonic() < until
        time.sleep(0.1)
    process = started(command, log=log)
    assert process.wait(SECONDS) == 0, log.read_text()[-3000:]
    assert outcome(folder) == own and reached < STEPS
    assert not servers_of(folder)
