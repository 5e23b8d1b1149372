"""Failures on two nodes with own networks, names and disks: `pytest tests/cluster/test_two_nodes.py --slow`.

ZTK_CASES names a file that gets one line of JSON per case: the figures of the table in docs/cluster.md.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import network
from tests.cluster.network import ADDRESSES, NAMES, Network, wait_until
from tests.cluster.slurm import ROOT
from ztk.checkpoint.verify import verify

pytestmark = pytest.mark.slow
STEPS, EVERY, START_SECONDS, TIMEOUT_SECONDS = 40, 5, 300, 200
RAY_PORT = 6379
RUN = (
    *("model=nano", "data=synthetic", "data.seq_len=32", "precision=fp32", "logger=disabled", "launch.threads=1"),
    *(
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "launch.device=cpu",
        f"launch.timeout_seconds={TIMEOUT_SECONDS}",
    ),
    *(f"train.steps={STEPS}", f"checkpoint.every={EVERY}", f"launch.start_seconds={START_SECONDS}", "train.quick=true"),
)
PAUSE = """
import time


class Pause:
    def __init__(self, seconds):
        self.seconds = seconds

    def after_step(self, loop, *, loss):
        time.sleep(self.seconds)
"""


@pytest.fixture(scope="module", autouse=True)
def _permitted():
    if reason := network.missing():
        pytest.skip(reason)


@pytest.fixture
def nodes(tmp_path) -> Iterator[Network]:
    (tmp_path / "pause.py").write_text(PAUSE)
    with Network(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> str:
    return undisturbed(tmp_path_factory.mktemp("local") / "run", "zero=stage1")


def undisturbed(folder: Path, *words: str) -> str:
    """The digest of a run on two local ranks."""
    words = (*(word for word in RUN if not word.startswith("launch.start_seconds")), *words)
    command = [sys.executable, str(ROOT / "run.py"), *words, "launch.ranks=2", f"hydra.run.dir={folder}"]
    done = subprocess.run(command, env=environment(), cwd=folder.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return summary(folder)["loss_digest"]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | {
        "PYTHONPATH": str(ROOT)
    }


def words_of(
    nodes: Network, *words: str, pause: float = 0.0, zero: str = "stage1", folder: Path | None = None
) -> list[str]:
    own = ["callbacks.pause._target_=pause.Pause", f"callbacks.pause.seconds={pause}"] if pause else []
    return [*RUN, f"zero={zero}", *own, *words, f"hydra.run.dir={folder or nodes.folder / 'run'}"]


def torchrun(
    nodes: Network, words: list[str], *, port: int = 29500, count: str = "2", restarts: int = 3
) -> list[subprocess.Popen]:
    """An agent of torchrun with one rank on each node."""
    agents = []
    for node, address in enumerate(ADDRESSES):
        options = (f"--nnodes={count}", "--nproc-per-node=1", f"--max-restarts={restarts}", "--rdzv-backend=c10d")
        where = (f"--rdzv-endpoint={ADDRESSES[0]}:{port}", f"--rdzv-id=job{port}", f"--local-addr={address}")
        command = [sys.executable, "-m", "torch.distributed.run", *options, *where, str(ROOT / "run.py"), *words]
        agents.append(nodes.start(node, command, environment=environment(), log=log(nodes, node)))
    return agents


def log(nodes: Network, node: int) -> Path:
    return nodes.folder / f"{NAMES[node]}.log"


def text_of(nodes: Network) -> str:
    return "".join(log(nodes, node).read_text(errors="replace") for node in range(2) if log(nodes, node).exists())


def run_folder(nodes: Network) -> Path:
    return nodes.folder / "run"


def steps_in(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def wait_for_steps(nodes: Network, steps: int, *, agents: list[subprocess.Popen]) -> None:
    def is_far() -> bool:
        assert any(agent.poll() is None for agent in agents) or steps_in(run_folder(nodes)) >= steps, text_of(nodes)[
            -4000:
        ]
        return steps_in(run_folder(nodes)) >= steps

    wait_until(is_far, seconds=START_SECONDS, text=lambda: text_of(nodes)[-4000:])


def codes(agents: list[subprocess.Popen], *, nodes: Network, seconds: float = 600) -> list[int]:
    end = time.monotonic() + seconds
    for agent in agents:
        try:
            agent.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(text_of(nodes)[-6000:]) from None
    return [agent.returncode for agent in agents]


def resumed_after(nodes: Network) -> int:
    """The step after which the last start went on."""
    lines = [line for line in text_of(nodes).splitlines() if "continues after step" in line]
    assert lines, text_of(nodes)[-4000:]
    return int(lines[-1].partition("continues after step")[2].split()[0].rstrip(":;,."))


def record(case: str, **figures) -> None:
    if path := os.environ.get("ZTK_CASES"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"case": case} | figures) + "\n")


def check_rows(nodes: Network, digest: str) -> None:
    rows = [json.loads(line) for line in (run_folder(nodes) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert summary(run_folder(nodes))["status"] == "done"
    assert summary(run_folder(nodes))["loss_digest"] == digest


def test_stage_3_with_local_disks(nodes, digest):
    words = words_of(nodes, "offload=nvme", f"offload.nvme_path={nodes.own}/nvme", zero="stage3")
    agents = torchrun(nodes, words)
    assert codes(agents, nodes=nodes) == [0, 0], text_of(nodes)[-4000:]
    check_rows(nodes, digest)
    assert json.loads((run_folder(nodes) / "env.json").read_text())["hosts"] == list(NAMES)
    record("stage 3 with NVMe on the nodes' own disks", outcome="done", digest="equal")


def test_killed_ranks_are_restarted(nodes, digest):
    """The rank of node 0, then of node 1, then both, in one run."""
    agents = torchrun(nodes, words_of(nodes, pause=0.3))
    for number, killed in enumerate([(0,), (1,), (0, 1)]):
        wait_for_steps(nodes, 8 + 10 * number, agents=agents)
        dead = [nodes.rank(node) for node in range(2)]
        before = steps_in(run_folder(nodes))
        for node in killed:
            os.kill(dead[node], signal.SIGKILL)
        gone = partial(is_gone, dead)
        noticed = wait_until(gone, seconds=120, text=lambda: text_of(nodes)[-4000:])
        wait_until(partial(has_resumed, nodes, number + 1), seconds=START_SECONDS, text=lambda: text_of(nodes)[-4000:])
        lost = before - resumed_after(nodes)
        assert 0 <= lost <= EVERY
        name = "both nodes" if len(killed) == 2 else f"node {killed[0]}"
        record(f"SIGKILL of the rank of {name}", seconds=round(noticed, 1), lost=lost)
    assert codes(agents, nodes=nodes) == [0, 0], text_of(nodes)[-4000:]
    check_rows(nodes, digest)
    record("all three in one run", outcome="restarted, done", digest="equal")


def is_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def has_resumed(nodes: Network, times: int) -> bool:
    return text_of(nodes).count("continues after step") >= times


def test_a_stopped_rank_is_named_and_restarted(nodes, digest):
    agents = torchrun(nodes, words_of(nodes, "launch.step_seconds=30", pause=0.3))
    wait_for_steps(nodes, 12, agents=agents)
    stopped, other = nodes.rank(1), nodes.rank(0)
    before = steps_in(run_folder(nodes))
    os.kill(stopped, signal.SIGSTOP)
    noticed = wait_until(lambda: not Path(f"/proc/{other}").exists(), seconds=120, text=lambda: text_of(nodes)[-4000:])
    assert codes(agents, nodes=nodes) == [0, 0], text_of(nodes)[-4000:]
    assert "took longer than launch.step_seconds=30: rank 1 on ztk-b does not answer" in text_of(nodes)
    check_rows(nodes, digest)
    record(
        "SIGSTOP of a rank, launch.step_seconds=30",
        outcome="named, restarted, done",
        seconds=round(noticed, 1),
        lost=before - resumed_after(nodes),
        digest="equal",
    )


def test_a_short_cut_of_the_network(nodes, digest):
    agents = torchrun(nodes, words_of(nodes, pause=0.3))
    wait_for_steps(nodes, 12, agents=agents)
    ranks = [nodes.rank(node) for node in range(2)]
    before = steps_in(run_folder(nodes))
    nodes.unplug(1)
    time.sleep(20)
    nodes.plug(1)
    assert codes(agents, nodes=nodes) == [0, 0], text_of(nodes)[-6000:]
    check_rows(nodes, digest)
    restarted = "continues after step" in text_of(nodes)
    lost = before - resumed_after(nodes) if restarted else 0
    outcome = "restarted, done" if restarted else "waited, done"
    record("network cut for 20 s", outcome=outcome, lost=lost, digest="equal", ranks=ranks)


def test_a_long_cut_of_the_network(nodes, digest):
    agents = torchrun(nodes, words_of(nodes, "launch.step_seconds=30", pause=0.3))
    wait_for_steps(nodes, 12, agents=agents)
    ranks = [nodes.rank(node) for node in range(2)]
    before, started = steps_in(run_folder(nodes)), time.monotonic()
    nodes.unplug(1)
    noticed = wait_until(
        lambda: not Path(f"/proc/{ranks[0]}").exists(), seconds=120, text=lambda: text_of(nodes)[-4000:]
    )
    time.sleep(max(0.0, 120 - (time.monotonic() - started)))
    nodes.plug(1)
    ended = codes(agents, nodes=nodes)
    if ended != [0, 0]:  # torchrun gives a node up that it has not reached for its own time
        torchrun_again = torchrun(nodes, words_of(nodes), port=29600)
        assert codes(torchrun_again, nodes=nodes) == [0, 0], text_of(nodes)[-6000:]
    check_rows(nodes, digest)
    outcome = "restarted, done" if ended == [0, 0] else "torchrun ends; the next command is done"
    record(
        "network cut for 120 s, launch.step_seconds=30",
        outcome=outcome,
        seconds=round(noticed, 1),
        lost=before - resumed_after(nodes),
        digest="equal",
    )


def test_a_lost_node_leaves_the_other_one(nodes):
    agents = torchrun(nodes, words_of(nodes, "launch.step_seconds=30", pause=0.3), count="1:2")
    wait_for_steps(nodes, 12, agents=agents)
    rank, before = nodes.rank(0), steps_in(run_folder(nodes))
    nodes.unplug(1)
    nodes.kill(1)
    noticed = wait_until(lambda: not Path(f"/proc/{rank}").exists(), seconds=120, text=lambda: text_of(nodes)[-4000:])
    assert codes(agents[:1], nodes=nodes) == [0], text_of(nodes)[-6000:]
    assert summary(run_folder(nodes))["status"] == "done"
    assert steps_in(run_folder(nodes)) == STEPS
    record(
        "a node is lost, --nnodes=1:2",
        outcome="goes on with one rank, done",
        seconds=round(noticed, 1),
        lost=before - resumed_after(nodes),
        digest="of two sizes",
    )


def test_a_full_disk_of_one_node_is_named(nodes):
    fill(nodes.disk(1), but=64 << 10)
    words = words_of(nodes, "offload=nvme", f"offload.nvme_path={nodes.own}/nvme", zero="stage3")
    started = time.monotonic()
    agents = torchrun(nodes, words, restarts=0)
    assert all(codes(agents, nodes=nodes)), text_of(nodes)[-4000:]
    assert "No space left on device" in text_of(nodes) or "free" in text_of(nodes), text_of(nodes)[-4000:]
    assert "rank 1 on ztk-b" in summary(run_folder(nodes))["error"], summary(run_folder(nodes))
    record(
        "full disk on one node",
        outcome=summary(run_folder(nodes))["error"],
        seconds=round(time.monotonic() - started, 1),
    )


def fill(folder: Path, *, but: int) -> None:
    """Leaves about `but` bytes of a disk free, with the blocks that a file system reserves for root, as the ranks of this test are."""
    with (folder / "filler").open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        os.fsync(file.fileno())
        file.truncate(file.tell() - but)


def test_folders_that_are_not_shared_are_refused(nodes):
    started = time.monotonic()
    agents = torchrun(nodes, words_of(nodes, folder=nodes.own / "run"), restarts=0)
    assert all(codes(agents, nodes=nodes)), text_of(nodes)[-4000:]
    assert "rank 1 on ztk-b does not see the run folder of rank 0" in text_of(nodes)
    record("no shared folder", outcome="refused at the start", seconds=round(time.monotonic() - started, 1))


@pytest.mark.parametrize(
    ("zero", "words"), [("stage3", ()), ("stage1", ("topology.pipeline=2",))], ids=["stage 3", "pipeline"]
)
def test_a_folder_per_node(zero, words, nodes, tmp_path):
    """SIGKILL of a rank, then the loss of the newest checkpoint on node 1 before the next command. Both folders in one are a checkpoint."""
    folder, places = nodes.own / "run", [nodes.disk(node) / "run" for node in range(2)]
    words = (*words, "checkpoint.local=true", f"zero={zero}")
    given = words_of(nodes, *words[:-1], pause=0.3, zero=zero, folder=folder)
    agents = torchrun(nodes, given)
    wait_until(lambda: steps_in(places[0]) >= 12, seconds=START_SECONDS, text=lambda: text_of(nodes)[-4000:])
    before = steps_in(places[0])
    os.kill(nodes.rank(1), signal.SIGKILL)
    assert codes(agents, nodes=nodes) == [0, 0], text_of(nodes)[-4000:]
    lost = before - resumed_after(nodes)
    assert 0 <= lost <= EVERY
    expected = undisturbed(tmp_path / "local", *(word for word in words if "local" not in word))
    assert summary(places[0])["loss_digest"] == expected
    assert not (places[1] / "summary.json").exists() and not (places[1] / "metrics.jsonl").exists()
    for number, place in enumerate(places):
        step = place / "checkpoints" / f"step-{STEPS:06d}"
        assert sorted(path.name for path in step.glob("rank-*")) == [f"rank-0000{number}.safetensors"]
        shutil.copytree(step, tmp_path / "merged", dirs_exist_ok=True)
    assert verify(tmp_path / "merged").faults == ()
    shutil.rmtree(places[1] / "checkpoints" / f"step-{STEPS:06d}")
    (places[0] / "summary.json").unlink()
    agents = torchrun(nodes, given, port=29600)
    assert codes(agents, nodes=nodes) == [0, 0], text_of(nodes)[-4000:]
    assert resumed_after(nodes) == STEPS - EVERY
    assert "ztk-b has no such checkpoint" in text_of(nodes)
    assert summary(places[0])["loss_digest"] == expected
    figures = {"lost": lost, "digest": "equal"}
    record(f"folders per node, {zero}, SIGKILL, a lost checkpoint", outcome="restarted, done", **figures)


@pytest.mark.parametrize("launcher", ["Kubeflow", "mpirun"])
def test_variables_of_other_launchers(launcher, nodes, digest):
    tasks = []
    for node in range(2):
        given = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        if launcher == "Kubeflow":
            given |= {"RANK": str(node), "WORLD_SIZE": "2"}
        else:
            given |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(node)}
            given |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        command = [sys.executable, str(ROOT / "run.py"), *words_of(nodes)]
        tasks.append(nodes.start(node, command, environment=environment() | given, log=log(nodes, node)))
    assert codes(tasks, nodes=nodes) == [0, 0], text_of(nodes)[-4000:]
    check_rows(nodes, digest)
    assert summary(run_folder(nodes))["world_size"] == 2
    record(f"{launcher}'s variables on both nodes", outcome="done", lost=0, digest="equal")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun (Debian: openmpi-bin)")
def test_mpirun(nodes, digest):
    passed = [word for name in ("MASTER_ADDR", "MASTER_PORT", "PYTHONPATH") for word in ("-x", name)]
    network = ("--mca", "oob_tcp_if_include", "eth0", "--mca", "plm_rsh_agent", str(nodes.shell()))
    options = ("--allow-run-as-root", "-H", ",".join(f"{name}:1" for name in NAMES), "-np", "2", *network, *passed)
    command = [shutil.which("mpirun"), *options, sys.executable, str(ROOT / "run.py"), *words_of(nodes)]
    given = environment() | {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    task = nodes.start(0, command, environment=given, log=log(nodes, 0))
    assert codes([task], nodes=nodes) == [0], text_of(nodes)[-4000:]
    check_rows(nodes, digest)
    assert json.loads((run_folder(nodes) / "env.json").read_text())["hosts"] == list(NAMES)
    record("mpirun over both nodes", outcome="done", lost=0, digest="equal")


def test_a_folder_has_one_job(nodes, digest):
    first = torchrun(nodes, words_of(nodes, pause=1.0))
    wait_for_steps(nodes, 3, agents=first)
    started = time.monotonic()
    second = torchrun(nodes, words_of(nodes, pause=1.0), port=29600, restarts=0)
    assert all(codes(second, nodes=nodes)), text_of(nodes)[-4000:]
    refused = round(time.monotonic() - started, 1)
    assert "writes into this folder" in text_of(nodes), text_of(nodes)[-4000:]
    assert codes(first, nodes=nodes) == [0, 0], text_of(nodes)[-4000:]
    check_rows(nodes, digest)
    record("two jobs in one folder", outcome="the second one is refused", seconds=refused, lost=0, digest="equal")


def test_other_code_on_a_node_is_named(nodes):
    for node in range(2):
        (nodes.disk(node) / "mine.py").write_text(PAUSE.replace("Pause", "Mine") + f"\nVERSION = {node}\n")
    words = ["callbacks.mine._target_=mine.Mine", "callbacks.mine.seconds=0.0"]
    started = time.monotonic()
    agents = []
    for node, address in enumerate(ADDRESSES):
        options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500")
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-id=code", f"--local-addr={address}"]
        command += [str(ROOT / "run.py"), *words_of(nodes, *words)]
        own = environment() | {"PYTHONPATH": f"{ROOT}:{nodes.own}"}
        agents.append(nodes.start(node, command, environment=own, log=log(nodes, node)))
    assert all(codes(agents, nodes=nodes)), text_of(nodes)[-4000:]
    seconds = time.monotonic() - started
    assert seconds < TIMEOUT_SECONDS, text_of(nodes)[-4000:]
    assert "mine" in summary(run_folder(nodes))["error"], summary(run_folder(nodes))
    assert steps_in(run_folder(nodes)) == 0
    record(
        "other code on a node",
        outcome=summary(run_folder(nodes))["error"],
        seconds=round(seconds, 1),
    )


@pytest.fixture
def ray_variables() -> Iterator[dict[str, str]]:
    """For commands of Ray. Its sockets need a short path, and no other machine reaches these nodes, so they need no token."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}


def start_ray(node: int, *, nodes: Network, variables: dict[str, str]) -> None:
    """Adds a node with one core to a Ray cluster."""
    head = (f"--port={RAY_PORT}", "--head", "--include-dashboard=false")
    place = head if node == 0 else (f"--address={ADDRESSES[0]}:{RAY_PORT}",)
    command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", *place]
    own = f"--node-ip-address={ADDRESSES[node]}"
    nodes.start(node, [*command, own], environment=environment() | variables, log=nodes.folder / f"ray{node}.log")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'ztk[ray]'")
def test_ray_replaces_a_lost_node(nodes, ray_variables, digest):
    """The node of one rank loses its power, and another node joins the cluster later."""
    start_ray(0, nodes=nodes, variables=ray_variables)
    ready = f"{ADDRESSES[0]}:{RAY_PORT}"
    wait_until(lambda: ready in (nodes.folder / "ray0.log").read_text(), seconds=100, text=lambda: "no head")
    start_ray(1, nodes=nodes, variables=ray_variables)
    words = words_of(nodes, "launch=ray", "launch.ranks=2", "launch.max_failures=1", pause=0.3)
    given = environment() | ray_variables | {"RAY_ADDRESS": ready}
    driver = nodes.start(0, [sys.executable, str(ROOT / "run.py"), *words], environment=given, log=log(nodes, 0))
    wait_for_steps(nodes, 12, agents=[driver])
    assert json.loads((run_folder(nodes) / "env.json").read_text())["hosts"] == list(NAMES)
    before = steps_in(run_folder(nodes))
    nodes.kill(1)
    again = "all ranks start again"
    noticed = wait_until(lambda: again in text_of(nodes), seconds=200, text=lambda: text_of(nodes)[-4000:])
    start_ray(1, nodes=nodes, variables=ray_variables)
    assert codes([driver], nodes=nodes) == [0], text_of(nodes)[-4000:]
    check_rows(nodes, digest)
    assert len(summary(run_folder(nodes))["failures"]) == 1
    lost = before - resumed_after(nodes)
    assert 0 <= lost <= EVERY
    figures = {"seconds": round(noticed, 1), "lost": lost, "digest": "equal"}
    record("launch=ray, a node is lost and replaced", outcome="restarted, done", **figures)
