"""A launcher's environment that does not fit together is refused at once: the other ranks would wait for a minute and more."""

import datetime
import socket
from pathlib import Path

import pytest

from ztk.runtime import Process
from ztk.runtime.process import local_store


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


def test_the_store_of_one_machine_is_not_reached_from_others():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    timeout = datetime.timedelta(seconds=20)
    store = local_store(port, rank=0, world=1, timeout=timeout)
    again = local_store(port, rank=0, world=1, timeout=timeout)  # after init_process_group was called before
    store.set("key", "value")
    assert again.get("key") == b"value"
    assert _listening(port) == {"0100007F"}  # 127.0.0.1
