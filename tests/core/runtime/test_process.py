"""A launcher's environment that does not fit together is refused at once: the other ranks would wait for a minute and more."""

import datetime
import json
import os
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import forkserver
from ztk.core.runtime import Process, Topology, rendezvous


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5: must be a whole number, 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: must be a whole number, 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: must be"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be a whole number, 1 or more"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=-2: must be"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: must be"),
    ],
)
def test_odd_ranks_are_refused(variables, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Process.start(device="cpu")


def _listening(port: int) -> set[str]:
    """The addresses, in hex, on which this machine listens at `port`."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "address, found, is_one_machine, listening",
    [
        ("localhost", [], False, {"0100007F"}),
        ("127.0.0.2", [], False, {"0200007F"}),
        ("node", ["127.0.0.3"], True, {"0300007F"}),  # stands for any address of this machine
        ("node", ["127.0.1.1"], False, None),  # Debian's own name of a machine: others do not reach it there
        ("node", ["127.0.0.3", "127.0.0.4"], True, None),
        ("node", ["192.0.2.1"], False, None),  # not an address of this machine (RFC 5737): behind address translation
    ],
)
def test_the_store_listens_on_the_address_given_to_ranks(address, found, is_one_machine, listening, monkeypatch):
    """Without an address the store listens on all addresses, like torch's."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *rest, **options: (
            [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (entry, 0)) for entry in found]
            if name == "node"
            else real(name, *rest, **options)
        ),
    )
    port = _free_port()
    own = rendezvous._address(address, is_one_machine=is_one_machine)
    descriptor = own and rendezvous._listen(own, port=port)
    if listening is None:
        assert descriptor is None
        return
    assert _listening(port) == listening
    os.close(descriptor)


def test_the_store_of_one_machine_is_not_reached_from_others():
    port = _free_port()
    options = {"rank": 0, "world": 1, "is_one_machine": True, "timeout": datetime.timedelta(seconds=20)}
    store = rendezvous.open_store("localhost", port=port, **options)
    again = rendezvous.open_store("localhost", port=port, **options)  # after init_process_group was called before
    store.set("key", "value")
    assert again.get("key") == b"value"
    assert _listening(port) == {"0100007F"}  # 127.0.0.1


def _met(rank: int, port: int, places, answers) -> None:
    """A rank of a start. places: seconds to wait before it starts, and its host."""
    seconds, host = places[rank]
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "ZTK_STORE"):
        os.environ.pop(name, None)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the test serves the store, as torchrun's agent does
    socket.gethostname = lambda: host
    time.sleep(seconds)
    timeout = datetime.timedelta(seconds=60)
    met = rendezvous.meet("config", rank=rank, world=len(places), timeout=timeout, text=f"text of {rank}")
    rendezvous.set_places(met.hosts, rank=rank)
    answers.put((rank, met.generation, met.text, met.hosts, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]))


@pytest.fixture
def agent_store():
    """The port of a store that outlives every start of the ranks, as torchrun's does."""
    port = _free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    yield port, store


def _start(places, *, port: int) -> list[tuple]:
    context = forkserver()
    answers = context.Queue()
    ranks = [context.Process(target=_met, args=(rank, port, places, answers)) for rank in range(len(places))]
    for rank in ranks:
        rank.start()
    try:
        return sorted(answers.get(timeout=60) for _ in ranks)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.join()


def test_ranks_of_every_start_agree_over_a_store_that_holds_keys_of_dead_ranks(agent_store):
    """Whichever rank comes first, and whatever the agents' numbers of restarts are: the ranks read none."""
    port, store = agent_store
    seen = set()
    for places in ([(0, "a"), (1, "b"), (0, "a")], [(1, "a"), (0, "b"), (0, "b")], [(0, "c"), (0, "b"), (1, "c")]):
        found = _start(places, port=port)
        hosts = [host for _, host in places]
        assert [row[2] for row in found] == ["text of 0"] * 3 and all(list(row[3]) == hosts for row in found)
        ((generation),) = {row[1] for row in found}
        assert generation not in seen
        seen.add(generation)
        assert [row[4:] for row in found] == [
            (str(hosts[:rank].count(host)), str(hosts.count(host))) for rank, host in enumerate(hosts)
        ]
        # A rank that ended between its nonce and its acknowledgement.
        store.set("ztk/config/hello/1", json.dumps({"nonce": "dead", "host": "b"}))


def test_missing_ranks_are_named(agent_store, monkeypatch):
    port, _ = agent_store
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    timeout = datetime.timedelta(seconds=1)
    with pytest.raises(TimeoutError, match="2 of 3 ranks did not join within 1 s: 1, 2; .* raise launch.start_seconds"):
        rendezvous.meet("config", rank=0, world=3, timeout=timeout)
    with pytest.raises(TimeoutError, match=f"rank 1 on .* got no answer from rank 0 at 127.0.0.1:{port} within 1 s"):
        rendezvous.meet("config", rank=1, world=3, timeout=timeout)


def test_the_limit_of_a_start_is_not_the_limit_of_collectives(agent_store, monkeypatch):
    port, _ = agent_store
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        dist, "is_initialized", lambda: False
    )  # a test before may have started this process as a rank of its own
    with pytest.raises(TimeoutError, match="1 of 2 ranks did not join within 1 s"):
        Process.start(device="cpu", timeout_seconds=600, start_seconds=1)


def test_ranks_that_srun_started_meet_over_such_a_store(monkeypatch):
    """`meet` opens the port first, so the run listens on the same address."""
    port = _free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    met = rendezvous.meet("config", rank=0, world=1, timeout=datetime.timedelta(seconds=20), text="text")
    assert met.text == "text" and _listening(port) == {"0100007F"}


def _joined_for_gpus_alone(rank: int, store: str, answers) -> None:
    """A script that has joined with a backend without host memory, such as nccl alone."""
    dist.init_process_group("cuda:gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    process = Process.start(device="cpu", timeout_seconds=30)
    arranged = process.arrange(Topology(pipeline=2))
    numbers = [comm.gather_numbers([rank], label="ranks") for comm in (process.comm, arranged.mesh.comm("pp"))]
    answers.put((rank, numbers))
    arranged.stop()


def test_a_script_may_have_joined_for_gpus_alone(tmp_path):
    context = forkserver()
    answers = context.Queue()
    ranks = [
        context.Process(target=_joined_for_gpus_alone, args=(rank, str(tmp_path / "store"), answers))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = dict(answers.get(timeout=60) for _ in ranks)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.join()
    assert found == dict.fromkeys(range(2), [[[0.0], [1.0]]] * 2)
