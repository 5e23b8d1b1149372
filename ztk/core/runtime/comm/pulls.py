"""Tensors by name that other processes pull from this one, over gloo, in the order in which they need them.

No file and no process has all of them next to its own. Each process that pulls meets the owner in a group of two, so that one that ends or
hangs breaks no other transfer.
"""

import datetime
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

SCHEME = "gloo://"  # of an `Offer.address`
_POLL_SECONDS = 0.1
_END = -1
_COUNT = "pulls"  # key of the number of processes that have come


class Offer:
    """Offers tensors until it is closed. A context. address: for `pulled`, with a secret. sent_bytes: bytes of the tensors that were sent, over
    all processes.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        read: Callable[[str], Tensor],
        host: str,
        timeout_seconds: float,
    ) -> None:
        """shapes: and dtypes, by name. read: a tensor on the CPU, called in several threads, one at a time. host: this machine's address for
        the other processes. timeout_seconds: time after which a process that does not go on is left.
        """
        self._shapes, self._names, self._read = shapes, list(shapes), read
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._host, secret = host, secrets.token_hex(16)
        self._secret = secret
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{SCHEME}{secret}@{shown}:{self._store.port}"
        self.sent_bytes = 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="ztk-offer", daemon=True)
        self._accepting.start()

    def __enter__(self) -> "Offer":
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the wait for further processes. A transfer that is under way ends by itself, or by its timeout."""
        self._closed.set()
        self._accepting.join()

    def _accept(self) -> None:
        store, begun = dist.PrefixStore(self._secret, self._store), 0
        while not self._closed.is_set():
            for number in range(begun, store.add(_COUNT, 0)):
                threading.Thread(target=self._serve, args=(number,), name="ztk-offered", daemon=True).start()
                begun = number + 1
            self._closed.wait(_POLL_SECONDS)

    def _serve(self, number: int) -> None:
        # A store of its own: one that waits would block the others.
        store = dist.TCPStore(self._host, self._store.port, is_master=False, timeout=self._timeout)
        try:
            group = _pair(store, secret=self._secret, number=number, rank=0, timeout=self._timeout)
            kinds = [(name, list(shape), str(dtype)) for name, (shape, dtype) in self._shapes.items()]
            head = torch.frombuffer(bytearray(json.dumps(kinds).encode()), dtype=torch.uint8)
            group.send([torch.tensor([len(head)])], 1, 0).wait()
            group.send([head], 1, 0).wait()
            asked = torch.zeros(1, dtype=torch.int64)
            while not self._closed.is_set():
                group.recv([asked], 1, 0).wait()
                if int(asked) == _END:
                    return
                with self._lock:
                    raw = self._read(self._names[int(asked)]).contiguous().flatten().view(torch.uint8)
                    self.sent_bytes += len(raw)
                if len(raw):
                    group.send([raw], 1, 0).wait()
        except RuntimeError:  # it is gone or late, and its own error tells why
            return


class Pulled(Mapping[str, Tensor]):
    """Tensors of an `Offer`; each access pulls one. shapes: and dtypes, by name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        size = torch.zeros(1, dtype=torch.int64)
        self._moved(lambda: group.recv([size], 0, 0))
        head = torch.empty(int(size), dtype=torch.uint8)
        self._moved(lambda: group.recv([head], 0, 0))
        kinds = json.loads(bytes(head.tolist()))
        self.shapes = {name: (tuple(shape), _dtype(dtype)) for name, shape, dtype in kinds}
        self._numbers = {name: number for number, name in enumerate(self.shapes)}

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self.shapes[name]
        self._ask(self._numbers[name])
        found = torch.empty(shape, dtype=dtype)
        if found.numel():
            self._moved(lambda: self._group.recv([found.flatten().view(torch.uint8)], 0, 0))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def end(self) -> None:
        """Tells the owner that no further tensor is needed."""
        self._ask(_END)

    def _ask(self, number: int) -> None:
        self._moved(lambda: self._group.send([torch.tensor([number])], 0, 0))

    def _moved(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise ConnectionError(f"the process that offers tensors is gone or late: {error}") from error


@contextmanager
def pulled(address: str, *, timeout_seconds: float) -> Iterator[Pulled]:
    """The tensors at an `Offer.address`, while the context is open.

    Raises:
        ValueError: another address.
        ConnectionError: nothing is offered there, or the owner is gone, or does not go on for `timeout_seconds`.
    """
    place = urlsplit(address)
    if not address.startswith(SCHEME) or not place.username or place.hostname is None or place.port is None:
        raise ValueError(f"{address}: is no address of offered tensors")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = dist.TCPStore(place.hostname, place.port, is_master=False, timeout=timeout)
        number = dist.PrefixStore(place.username, store).add(_COUNT, 1) - 1
        group = _pair(store, secret=place.username, number=number, rank=1, timeout=timeout)
    except RuntimeError as error:
        raise ConnectionError(f"no tensors are offered at {place.hostname}:{place.port}: {error}") from error
    found = Pulled(group)
    yield found
    found.end()


def _pair(
    store: dist.Store, *, secret: str, number: int, rank: int, timeout: datetime.timedelta
) -> "dist.ProcessGroup":
    return dist.ProcessGroupGloo(dist.PrefixStore(f"{secret}/{number}", store), rank, 2, timeout)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConnectionError(f"offered tensors have the dtype {name}")
    return found
