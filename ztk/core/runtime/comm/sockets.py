"""Point-to-point messages between the ranks of one machine: one socket per pair.

These are separate from the sockets of the barriers, because a message concerns two ranks and may pass while all are in a collective. When a
process dies the kernel closes its sockets, so a rank that sends to it or waits for it gets an error at once.
"""

import contextlib
import socket
import struct
from collections.abc import Mapping, Sequence

from torch import Tensor

from ztk.core.policies.machine import place_of
from ztk.core.runtime.comm.errors import CommMismatch, PeerLost
from ztk.core.runtime.host_memory import view_bytes

_HEADER = struct.Struct("<Q88s")  # bytes that follow, label


class PeerSockets:
    """`send` returns when the kernel or the receiver has the bytes, `recv` when they are in `out`.

    One thread may send to a peer and another receive from it at the same time.
    """

    def __init__(
        self, introductions: Mapping[int, socket.socket], *, rank: int, ranks: Sequence[int], timeout_seconds: float
    ) -> None:
        """introductions: an open idle connection to every peer; both ends construct this object at the same time. ranks: numbers of the group's
        ranks in the run, for messages.

        Raises:
            PeerLost: a rank died or did not answer in time.
        """
        self._rank, self._ranks, self._timeout = rank, ranks, timeout_seconds
        self._sockets: dict[int, socket.socket] = {}
        for peer, connection in introductions.items():
            if rank < peer:
                self._sockets[peer], theirs = socket.socketpair()
                self._guard(peer, lambda c=connection, t=theirs: socket.send_fds(c, [b"l"], [t.fileno()]))
                theirs.close()
        for peer, connection in introductions.items():
            if rank > peer:
                _, found, _, _ = self._guard(peer, lambda c=connection: socket.recv_fds(c, 1, 1))
                if not found:
                    raise PeerLost(f"{self._place(peer)} is gone (connecting): its connection closed")
                self._sockets[peer] = socket.socket(fileno=found[0])
        for connection in self._sockets.values():
            connection.settimeout(timeout_seconds)

    def send(self, tensor: Tensor, *, to: int, label: str) -> None:
        """Sends the bytes of `tensor` (contiguous, of any shape, on the CPU)."""
        connection, payload = self._sockets[to], view_bytes(tensor)
        header = _HEADER.pack(payload.nbytes, label.encode()[:88])
        self._guard(to, lambda: (connection.sendall(header), connection.sendall(payload)), label=label)

    def recv(self, out: Tensor, *, source: int, label: str) -> None:
        """Fills `out` (contiguous, of any shape, on the CPU) with the next message of rank `source`, which must have the same size and
        label.

        Raises:
            CommMismatch: the message has another size or label.
            PeerLost: the rank is gone or late.
        """
        connection, payload = self._sockets[source], view_bytes(out)
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header), connection=connection, peer=source, label=label)
        nbytes, theirs = _HEADER.unpack(header)
        theirs = theirs.rstrip(b"\0").decode(errors="replace")
        if (nbytes, theirs) != (payload.nbytes, label[:88]):
            raise CommMismatch(
                f"{self._place(self._rank)} waits for '{label}' of {payload.nbytes} bytes, {self._place(source)} sent '{theirs}' of "
                f"{nbytes}: the ranks ran different schedules or shapes"
            )
        self._fill(payload, connection=connection, peer=source, label=label)

    def _fill(self, view: memoryview, *, connection: socket.socket, peer: int, label: str) -> None:
        while view.nbytes:
            received = self._guard(peer, lambda v=view: connection.recv_into(v), label=label)
            if not received:
                raise PeerLost(f"{self._place(peer)} is gone: connection closed while waiting for {label}")
            view = view[received:]

    def _guard(self, peer: int, call, *, label: str = "connecting"):
        try:
            return call()
        except TimeoutError as error:
            raise PeerLost(f"{self._place(peer)} did not move at {label} within {self._timeout:g} s") from error
        except OSError as error:
            raise PeerLost(f"{self._place(peer)} is gone ({label}): {error}") from error

    def _place(self, peer: int) -> str:
        return place_of(self._ranks[peer])

    def close(self) -> None:
        """Closes all sockets. May be called from another thread; threads that wait then raise PeerLost."""
        for connection in self._sockets.values():
            hang_up(connection)


def hang_up(connection: socket.socket) -> None:
    """Shuts the socket down, which wakes threads that wait on it (`close` alone does not). Idempotent."""
    with contextlib.suppress(OSError):  # the other end is gone already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
