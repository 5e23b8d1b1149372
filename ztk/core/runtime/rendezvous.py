"""The store over which ranks find each other: rank 0 serves it, where only the other ranks of the run can reach it as far as possible.

Whoever reaches the store may write into it, and torch's own listens on every interface of the machine. Here it listens on the one address that
the ranks were told. It listens on all of them only where that address cannot be known: `MASTER_ADDR` is a name with several addresses, it
stands for an address that this machine does not have itself (behind address translation), or it is a name that other machines resolve
differently (Debian gives a machine's own name the address 127.0.1.1). A number in place of the name avoids the last two.
"""

import datetime
import ipaddress
import socket

import torch.distributed as dist


def open_store(
    address: str,
    *,
    port: int,
    rank: int,
    world: int,
    is_one_machine: bool,
    timeout: datetime.timedelta,
    wait_for_workers: bool = True,
) -> dist.TCPStore:
    """The store at `address`, which rank 0 serves. A second call of this process for the same port joins the store that it serves.

    is_one_machine: all ranks are on it.
    """
    own = _address(address, is_one_machine=is_one_machine)
    return dist.TCPStore(
        own if rank == 0 and own is not None else address,
        port,
        world,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        multi_tenant=True,
        master_listen_fd=_listen(own, port=port) if rank == 0 and own is not None else None,
    )


def _address(name: str, *, is_one_machine: bool) -> str | None:
    """The only address of `name`, if other ranks have it from that name, too."""
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
    """A descriptor of a socket that listens there. None: this process serves the store already, or torch's error says who has the port."""
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
