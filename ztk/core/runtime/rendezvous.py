"""The store over which ranks find each other. Rank 0 serves it, on an address that only the run's ranks can reach where possible.

Any process that reaches the store may write to it, and torch's own store listens on every interface of the machine. This one listens on the
address that the ranks connect to. It listens on all interfaces only if that address cannot be determined: `MASTER_ADDR` is a name with
several addresses, an address that this machine does not have itself (behind address translation), or a name that other machines resolve
differently (Debian gives a machine's own name the address 127.0.1.1). A numeric address avoids the last two.
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
        wait_for_workers=wait_for_workers,
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
