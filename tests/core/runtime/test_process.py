"""A launcher's environment that does not fit together is refused at once: the other ranks would wait for a minute and more."""

import datetime
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import forkserver
from ztk.core.launch import ExternalRank
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


def test_ranks_that_srun_started_agree_over_such_a_store(monkeypatch):
    """`agree` opens the port first, so the run listens on the same address."""
    port = _free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    rank = ExternalRank(rank=0, world_size=1, local_world_size=1, starter="srun")
    agreement = rank.agree("text", timeout_seconds=20, open_store=rendezvous.open_store)
    assert agreement.text == "text" and _listening(port) == {"0100007F"}


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
