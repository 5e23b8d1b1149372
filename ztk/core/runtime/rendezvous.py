"""How the ranks of a start find each other: the store that rank 0 serves, and the handshake over it.

The store listens on an address that only the run's ranks can reach where possible.

Any process that reaches the store may write to it, and torch's own store listens on every interface of the machine. This one listens on the
address that the ranks connect to. It listens on all interfaces only if that address cannot be determined: `MASTER_ADDR` is a name with
several addresses, an address that this machine does not have itself (behind address translation), or a name that other machines resolve
differently (Debian gives a machine's own name the address 127.0.1.1). A numeric address avoids the last two.
"""

import datetime
import ipaddress
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from ztk.core.policies.machine import set_hosts

_STORE_SECONDS = 5.0  # for an answer of the store after a failure
_LONGEST_PAUSE_SECONDS = 0.2  # between two looks of rank 0 for ranks that have not arrived


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """One start of the ranks.

    generation: a name that no other start has. text: the text that rank 0 sent. hosts: the host name of each rank. store: must live as long
    as the process group, because rank 0 may serve it.
    """

    generation: str
    text: str
    hosts: tuple[str, ...]
    store: dist.Store


def meet(purpose: str, *, rank: int, world: int, timeout: datetime.timedelta, text: str = "") -> Meeting:
    """Joins the ranks of this start at `MASTER_ADDR` and `MASTER_PORT`. A collective call: every rank makes it for the same `purpose`.

    [Note: Starts]
    torchrun's store outlives a start of the ranks, so it may hold keys of ranks that are dead. The number of restarts does not separate
    them, because each of torchrun's agents counts its own (pytorch issues 108158 and 135712). So every rank posts a nonce. Rank 0 answers
    each nonce with a name for this start, its generation, and a rank whose nonce is answered acknowledges it. The nonce of a dead rank may
    be answered too, which nobody reads. Rank 0 looks for new nonces until all ranks have acknowledged.

    Raises:
        TimeoutError: a rank did not arrive.
    """
    server = _connect(rank=rank, world=world, timeout=timeout)
    store, host = dist.PrefixStore(f"ztk/{purpose}", server), socket.gethostname()
    if rank == 0:
        generation = uuid.uuid4().hex
        hosts = [host, *_answer(store, world=world, generation=generation, timeout=timeout)]
        store.set(f"{generation}/meeting", json.dumps({"text": text, "hosts": hosts}))
    else:
        nonce = uuid.uuid4().hex
        store.set(f"hello/{rank}", json.dumps({"nonce": nonce, "host": host}))
        generation = _read(store, key=f"answer/{nonce}", rank=rank, timeout=timeout)
        store.set(f"{generation}/rank/{rank}", "")
        store.add(f"{generation}/arrived", 1)
    meeting = json.loads(_read(store, key=f"{generation}/meeting", rank=rank, timeout=timeout))
    _await_readers(store, key=f"{generation}/read", rank=rank, world=world)
    return Meeting(generation=generation, text=meeting["text"], hosts=tuple(meeting["hosts"]), store=server)


def first_fault(meeting: Meeting, *, rank: int, own: str) -> str:
    """Returns a fault of any rank, the same on all, or "". own: this rank's. A collective call of all ranks of the meeting."""
    store = dist.PrefixStore(f"ztk/{meeting.generation}", meeting.store)
    if own:
        store.set("fault", own)
        store.add("faults", 1)
    if store.add("voters", 1) == len(meeting.hosts):
        store.set("voted", "")
    store.wait(["voted"])
    fault = store.get("fault").decode() if store.add("faults", 0) else ""
    _await_readers(store, key="read", rank=rank, world=len(meeting.hosts))
    return fault


def best_text(meeting: Meeting, *, own: str, choose: Callable[[str, str], str]) -> str | None:
    """Stores `own` unless the stored text is the better one, and returns the better one. Not a collective call: any rank makes it at any time.

    choose: returns the better of two texts, whatever their order. None is returned if the store does not answer within a few seconds: the
    rank that serves it may have ended.
    """
    found: list[str] = []

    def settle() -> None:
        store, known = dist.PrefixStore(f"ztk/{meeting.generation}", meeting.store), ""
        with suppress(RuntimeError):  # torch's errors of a store that is gone
            while not found:
                best = choose(known, own) if known else own
                stored = store.compare_set("best", known, best).decode()
                if stored == best:
                    found.append(best)
                known = stored

    thread = threading.Thread(
        target=settle, name="ztk-failure", daemon=True
    )  # a request to a lost host has no time limit
    thread.start()
    thread.join(_STORE_SECONDS)
    return found[0] if found else None


def _await_readers(store: dist.Store, *, key: str, rank: int, world: int) -> None:
    """Waits on rank 0, which may serve the store and end next, for the last read of all ranks."""
    if store.add(f"{key}ers", 1) == world:
        store.set(key, "")
    if rank == 0:
        store.wait([key])


def set_places(hosts: Sequence[str], *, rank: int) -> None:
    """Stores the hosts of all ranks, for messages and the record. Sets `LOCAL_RANK` and `LOCAL_WORLD_SIZE` from them, for launchers that set
    neither, such as Kubeflow's."""
    set_hosts(hosts)
    if "LOCAL_RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
        same = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        os.environ.setdefault("LOCAL_RANK", str(same.index(rank)))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(same)))


def _connect(*, rank: int, world: int, timeout: datetime.timedelta) -> dist.TCPStore:
    under_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return open_store(
        os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        rank=1 if under_agent else rank,  # torchrun's agent serves the store
        world=world,
        is_one_machine=os.environ.get("LOCAL_WORLD_SIZE") == str(world),
        timeout=timeout,
    )


def _answer(store: dist.Store, *, world: int, generation: str, timeout: datetime.timedelta) -> list[str]:
    """Rank 0's part: answers nonces until all other ranks have acknowledged. Returns the hosts of these ranks."""
    keys, answered = [f"hello/{rank}" for rank in range(1, world)], set()
    end, pause = time.monotonic() + timeout.total_seconds(), 0.01
    while store.add(f"{generation}/arrived", 0) < world - 1:
        for key in keys:
            nonce = json.loads(store.get(key))["nonce"] if store.check([key]) else None
            if nonce is not None and nonce not in answered:
                store.set(f"answer/{nonce}", generation)
                answered.add(nonce)
        if time.monotonic() > end:
            missing = [rank for rank in range(1, world) if not store.check([f"{generation}/rank/{rank}"])]
            raise TimeoutError(
                f"{len(missing)} of {world} ranks did not join within {timeout.total_seconds():.0f} s: "
                f"{', '.join(map(str, missing[:20]))}{', ...' if len(missing) > 20 else ''}; their logs show why, or raise launch.start_seconds"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return [json.loads(store.get(key))["host"] for key in keys]


def _read(store: dist.Store, *, key: str, rank: int, timeout: datetime.timedelta) -> str:
    try:
        return store.get(key).decode()
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"rank {rank} on {socket.gethostname()} got no answer from rank 0 at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {timeout.total_seconds():.0f} s: rank 0 or one of the other ranks has not started; "
            "its log shows why, or raise launch.start_seconds"
        ) from error


def open_store(
    address: str,
    *,
    port: int,
    rank: int,
    world: int,
    is_one_machine: bool,
    timeout: datetime.timedelta,
) -> dist.TCPStore:
    """The store at `address`, which rank 0 serves. A second call in the same process for the same port joins that store.

    is_one_machine: all ranks are on one machine.
    """
    own = _address(address, is_one_machine=is_one_machine)
    return dist.TCPStore(
        own if rank == 0 and own is not None else address,
        port,
        world,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # `meet` waits, and its errors name the ranks that are missing
        multi_tenant=True,
        master_listen_fd=_listen(own, port=port) if rank == 0 and own is not None else None,
    )


def _address(name: str, *, is_one_machine: bool) -> str | None:
    """The only address of `name`, if other ranks resolve it the same way."""
    if name == "localhost":
        return "127.0.0.1"
    if name.startswith("127."):  # the other ranks connect to this one, not to 127.0.0.1
        return name
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:  # torch's error names it
        return None
    if len(found) != 1:
        return None
    (address,) = found
    return address if is_one_machine or not ipaddress.ip_address(address.partition("%")[0]).is_loopback else None


def _listen(address: str, *, port: int) -> int | None:
    """File descriptor of a listening socket. None if this process already serves the port, or to let torch report the error."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        return None
    return listener.detach()
