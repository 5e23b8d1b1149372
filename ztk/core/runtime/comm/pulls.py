"""Tensors by name that processes of another run pull from this one's ranks, over gloo, in the parts and in the order in which they need them.

A rank offers the boxes of tensors that it holds. A process asks each of these ranks for the overlap of their boxes with the box that it
needs, in messages of at most `CHUNK_BYTES`, so that no process has a full tensor that it does not need. Each process that pulls meets each
rank in a group of two, so that one that ends or hangs breaks no other transfer.
"""

import datetime
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from ztk.core.runtime.boxes import Box

SCHEME = "gloo://"
CHUNK_BYTES = 4 << 20
_POLL_SECONDS = 0.1
_END, _VALUES, _LARGEST = range(3)  # kinds of messages
_COUNT = "pulls"  # key of the number of processes that have come
_MOST_AXES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The box of a tensor of `full_shape` that a rank holds. read: the values in the box's shape, on the CPU; called in several threads, one at
    a time."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    read: Callable[[], Tensor]


class Offer:
    """Offers tensors until it is closed. `publish` replaces them, and transfers that have begun go on with those before.

    secret, port: for `address_of`. largest_bytes: bytes of the largest message so far.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        """timeout_seconds: time after which a process that does not go on is left."""
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        options = {"is_master": True, "wait_for_workers": False, "timeout": self._timeout}
        self._store = dist.TCPStore("localhost", 0, **options)
        self.secret, self.port = secrets.token_hex(16), self._store.port
        self.largest_bytes = 0
        self._version, self.held = "", list[Held]()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="ztk-offer", daemon=True)
        self._accepting.start()

    def publish(self, version: str, *, held: Sequence[Held]) -> None:
        """Offers these boxes in place of earlier ones."""
        with self._lock:
            self._version, self.held = version, list(held)

    def close(self) -> None:
        """Ends the wait for further processes. A transfer that is under way ends at its next message, or by its timeout. Idempotent."""
        self._closed.set()
        self._accepting.join()

    def __enter__(self) -> "Offer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        store, begun = dist.PrefixStore(self.secret, self._store), 0
        while not self._closed.is_set():
            for number in range(begun, store.add(_COUNT, 0)):
                threading.Thread(target=self._serve, args=(number,), name="ztk-offered", daemon=True).start()
                begun = number + 1
            self._closed.wait(_POLL_SECONDS)

    def _serve(self, number: int) -> None:
        # A store of its own: one that waits would block the others.
        store = dist.TCPStore("localhost", self._store.port, is_master=False, timeout=self._timeout)
        try:
            group = _pair(store, secret=self.secret, number=number, rank=0, timeout=self._timeout)
            version = _received(group, of=1)
            with self._lock:
                held = self.held if version.decode() == self._version else None
            head = None if held is None else [_described(own) for own in held]
            _send(group, json.dumps(head).encode(), to=1)
            asked = torch.zeros(2 + 2 * _MOST_AXES + 1, dtype=torch.int64)
            while held is not None and not self._closed.is_set():
                group.recv([asked], 1, 0).wait()
                if int(asked[0]) == _END:
                    return
                with self._lock:
                    raw = _answer(asked.tolist(), held=held).flatten().view(torch.uint8)
                    self.largest_bytes = max(self.largest_bytes, len(raw))
                group.send([raw], 1, 0).wait()
        except RuntimeError:  # it is gone or late, and its own error tells why
            return


def address_of(secret: str, *, host: str, port: int, version: str) -> str:
    """The address of an `Offer` for `pulled`, which begins with `SCHEME`. secret, port: the offer's. host: its machine."""
    shown = f"[{host}]" if ":" in host else host
    return f"{SCHEME}{secret}@{shown}:{port}/{version}"


def _described(own: Held) -> tuple[str, list[int], list[int], list[int], str]:
    return own.name, list(own.full_shape), list(own.box.start), list(own.box.shape), str(own.dtype)


def _question(kind: int, number: int, *, box: Box, axis: int) -> Tensor:
    rest = [0] * (_MOST_AXES - len(box.shape))
    return torch.tensor([kind, number, *box.start, *rest, *box.shape, *rest, axis])


def _answer(asked: list[int], *, held: Sequence[Held]) -> Tensor:
    kind, number, *places, axis = asked
    own = held[number]
    axes = len(own.box.shape)
    box = Box(start=tuple(places[:axes]), shape=tuple(places[_MOST_AXES : _MOST_AXES + axes]))
    found = own.read()[box.moved(tuple(-first for first in own.box.start)).slices]
    return found.contiguous() if kind == _VALUES else found.abs().amax(axis).contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owned:
    """A box that the rank at the other end of `group` holds as its number `number`."""

    group: dist.ProcessGroup
    number: int
    box: Box


class Pulled(Mapping[str, Tensor]):
    """Tensors of several ranks' offers; each access pulls one, or a part of it. shapes: and dtypes, by name.

    read_bytes: bytes that came so far. largest_bytes: bytes of the largest message.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Raises ConnectionError if a rank has other tensors by now, or an element has no owner or several."""
        self._owned: dict[str, list[_Owned]] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._groups, self.read_bytes, self.largest_bytes = groups, 0, 0
        for group in groups:
            with _moving():
                head = json.loads(_received(group, of=0))
            if head is None:
                raise ConnectionError("the process that offers tensors has newer ones")
            for number, (name, full, start, shape, dtype) in enumerate(head):
                kind = tuple(full), _dtype(dtype)
                if self.shapes.setdefault(name, kind) != kind:
                    raise ConnectionError(f"ranks offer {name} in different shapes or dtypes")
                box = Box(start=tuple(start), shape=tuple(shape))
                self._owned.setdefault(name, []).append(_Owned(group=group, number=number, box=box))
        for name, owned in self._owned.items():
            if sum(one.box.numel for one in owned) != _everything(self.shapes[name][0]).numel:
                raise ConnectionError(f"ranks offer a part of {name}, or some of it twice")

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, box=_everything(self.shapes[name][0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.shapes[name][0]

    def part(self, name: str, *, box: Box) -> Tensor:
        """The values of a box, in its shape."""
        found = torch.empty(box.shape, dtype=self.shapes[name][1])
        for owned, piece in self._pieces(name, box=box):
            own = found[piece.moved(tuple(-first for first in box.start)).slices]
            direct = own if own.is_contiguous() else torch.empty(piece.shape, dtype=found.dtype)
            self._pull(owned, _question(_VALUES, owned.number, box=piece, axis=0), into=direct)
            if direct is not own:
                own.copy_(direct)
        return found

    def largest(self, name: str, *, box: Box, axis: int) -> Tensor:
        """The largest absolute values of a box along `axis`, without that axis. The owners find them, and no other value is sent."""
        outer = box.without(axis)
        found = torch.zeros(outer.shape, dtype=self.shapes[name][1])
        for owned, piece in self._pieces(name, box=box):
            rows = piece.without(axis)
            theirs = torch.empty(rows.shape, dtype=found.dtype)
            self._pull(owned, _question(_LARGEST, owned.number, box=piece, axis=axis), into=theirs)
            own = found[rows.moved(tuple(-first for first in outer.start)).slices]
            torch.maximum(own, theirs, out=own)
        return found

    def end(self) -> None:
        """Tells the owners that no further tensor is needed."""
        for group in self._groups:
            with _moving():
                group.send([_question(_END, 0, box=Box(start=(), shape=()), axis=0)], 0, 0).wait()

    def _pieces(self, name: str, *, box: Box) -> Iterator[tuple[_Owned, Box]]:
        limit = CHUNK_BYTES // self.shapes[name][1].itemsize
        for owned in self._owned[name]:
            if box.numel and (common := owned.box.overlap(box)) is not None:
                yield from ((owned, piece) for piece in common.rows(outer=owned.box, limit=limit))

    def _pull(self, owned: _Owned, question: Tensor, *, into: Tensor) -> None:
        with _moving():
            owned.group.send([question], 0, 0).wait()
            owned.group.recv([into.flatten().view(torch.uint8)], 0, 0).wait()
        self.read_bytes += into.nbytes
        self.largest_bytes = max(self.largest_bytes, into.nbytes)


@contextmanager
def _moving() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the process that offers tensors is gone or late: {error}") from error


@contextmanager
def pulled(addresses: str, *, timeout_seconds: float) -> Iterator[Pulled]:
    """The tensors at the addresses of several ranks' offers, joined by commas, while the context is open.

    Raises:
        ValueError: another address.
        ConnectionError: nothing is offered there, or an owner is gone, or does not go on for `timeout_seconds`.
    """
    timeout, groups = datetime.timedelta(seconds=timeout_seconds), []
    for address in addresses.split(","):
        place = urlsplit(address)
        if not address.startswith(SCHEME) or not place.username or place.hostname is None or place.port is None:
            raise ValueError(f"{address}: is no address of offered tensors")
        try:
            store = dist.TCPStore(place.hostname, place.port, is_master=False, timeout=timeout)
            number = dist.PrefixStore(place.username, store).add(_COUNT, 1) - 1
            group = _pair(store, secret=place.username, number=number, rank=1, timeout=timeout)
            _send(group, place.path[1:].encode(), to=0)
        except RuntimeError as error:
            raise ConnectionError(f"no tensors are offered at {place.hostname}:{place.port}: {error}") from error
        groups.append(group)
    found = Pulled(groups)
    yield found
    found.end()


def _everything(shape: tuple[int, ...]) -> Box:
    return Box(start=(0,) * len(shape), shape=shape)


def _send(group: dist.ProcessGroup, data: bytes, *, to: int) -> None:
    """Never empty."""
    group.send([torch.tensor([len(data)])], to, 0).wait()
    group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], to, 0).wait()


def _received(group: dist.ProcessGroup, *, of: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], of, 0).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    group.recv([data], of, 0).wait()
    return data.numpy().tobytes()


def _pair(
    store: dist.Store, *, secret: str, number: int, rank: int, timeout: datetime.timedelta
) -> "dist.ProcessGroup":
    return dist.ProcessGroupGloo(dist.PrefixStore(f"{secret}/{number}", store), rank, 2, timeout)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConnectionError(f"offered tensors have the dtype {name}")
    return found
