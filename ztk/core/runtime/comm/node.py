"""Connects the ranks of one machine: a socket between each pair, and one shared memory segment per rank.

Nothing is left in any filesystem: segments are memfds sent over the sockets, and sockets have abstract names. When a
process dies the kernel closes its sockets, and every peer that waits for it gets an error within milliseconds.

[Note: Connecting the ranks]
Every rank listens; after a barrier every rank calls every other rank and waits for their calls. While it waits for a call from a rank it
watches its own connection to that rank, which closes if that rank dies. (It also closes when that rank is done, but then its call has
arrived.) Of the two connections of a pair, the one that the higher rank made is kept.
"""

import logging
import mmap
import os
import secrets
import select
import socket
import struct
import time
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from ztk.core.policies.machine import place_of
from ztk.core.runtime.comm.errors import CommMismatch, PeerLost, peer_errors
from ztk.core.runtime.comm.sockets import PeerSockets, hang_up

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0  # a late rank is named after it
_MESSAGE = struct.Struct("<Q88s")  # running number of the barrier, label
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class NodeGroup:
    """`slabs[r]` is rank r's segment as uint8 [slab_bytes]; `barrier` also checks that all ranks call it with the same label."""

    def __init__(self, *, group: dist.ProcessGroup, slab_bytes: int, timeout_seconds: float) -> None:
        """A collective call.

        Raises:
            PeerLost: a rank dies meanwhile or does not arrive in time.
        """
        self.rank, self.size = group.rank(), group.size()
        self._timeout, self._ranks = timeout_seconds, dist.get_process_group_ranks(group)
        self._number = 0
        token = [secrets.token_hex(8)]
        with peer_errors("connecting"):
            dist.broadcast_object_list(token, group_src=0, group=group)
        self._sockets = self._connect(f"\0ztk-{token[0]}-", group=group)
        self.slabs = [torch.frombuffer(segment, dtype=torch.uint8) for segment in self._exchange(slab_bytes)]

    def _connect(self, name: str, *, group: dist.ProcessGroup) -> dict[int, socket.socket]:
        """A connection to every other rank. See [Note: Connecting the ranks]."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name + str(self.rank))
        listener.listen(self.size)
        listener.setblocking(False)
        with peer_errors("connecting"):
            dist.barrier(group=group)
        made = {peer: self._call(peer, name=name) for peer in range(self.size) if peer != self.rank}
        heard = self._await_calls(listener, made=made)
        listener.close()
        for peer in made:
            (heard if peer < self.rank else made)[peer].close()
        return {peer: (made if peer < self.rank else heard)[peer] for peer in made}

    def _call(self, peer: int, *, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._timeout)
        try:
            connection.connect(name + str(peer))
            connection.sendall(_RANK.pack(self.rank))
        except OSError as error:  # the peer listens from before the barrier until all have connected
            raise PeerLost(f"{self._place(peer)} is gone (connecting): {error}") from error
        if not _is_ours(connection):
            raise PeerLost(
                f"{self._place(peer)} does not belong to this user (connecting): start all ranks as one user"
            )
        return connection

    def _await_calls(self, listener: socket.socket, *, made: dict[int, socket.socket]) -> dict[int, socket.socket]:
        """Accepts the connections of the other ranks. made: this rank's connections to them."""
        deadline = time.monotonic() + self._timeout
        heard: dict[int, socket.socket] = {}
        while missing := made.keys() - heard.keys():
            ready = wait([listener, *(made[peer] for peer in missing)], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerLost(f"{self._place(min(missing))} did not connect within {self._timeout:g} s")
            ended = {peer for peer in missing if made[peer] in ready}
            heard |= self._accept(listener)
            if lost := ended - heard.keys():
                raise PeerLost(f"{self._place(min(lost))} is gone (connecting): its connection closed")
        return heard

    def _accept(self, listener: socket.socket) -> dict[int, socket.socket]:
        """The calls that have arrived so far, without waiting."""
        heard = {}
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return heard
            if not _is_ours(connection):  # any user of the machine may connect to an abstract name and send nothing
                connection.close()
                continue
            connection.settimeout(self._timeout)
            said = connection.recv(_RANK.size, socket.MSG_WAITALL)
            if len(said) == _RANK.size:  # else it died between its two calls, and its other connection closes
                heard[_RANK.unpack(said)[0]] = connection

    def _exchange(self, nbytes: int) -> list[mmap.mmap]:
        """Zero-filled memory of each rank, in rank order, mapped here."""
        own_fd = os.memfd_create("ztk-slab")
        os.ftruncate(own_fd, nbytes)
        descriptors = {self.rank: own_fd}
        for peer, connection in self._sockets.items():
            try:
                socket.send_fds(connection, [b"f"], [own_fd])
            except OSError as error:
                raise PeerLost(f"{self._place(peer)} is gone (sharing memory): {error}") from error
        for peer, connection in self._sockets.items():
            try:
                _, found, _, _ = socket.recv_fds(connection, 1, 1)
            except OSError as error:
                raise PeerLost(f"{self._place(peer)} is gone (sharing memory): {error}") from error
            if not found:
                raise PeerLost(f"{self._place(peer)} is gone (sharing memory): its connection closed")
            (descriptors[peer],) = found
        segments = []
        for peer in range(self.size):
            segments.append(mmap.mmap(descriptors[peer], nbytes))
            os.close(descriptors[peer])  # the mapping keeps the memory
        return segments

    def share(self, nbytes: int, *, label: str) -> list[mmap.mmap]:
        """Maps a new zero-filled segment of each rank, in rank order, shared by all. A collective call; raises as `barrier` does."""
        self.barrier(label)
        return self._exchange(nbytes)

    def peer_sockets(self) -> PeerSockets:
        """Connections for messages between two ranks. A collective call."""
        return PeerSockets(self._sockets, rank=self.rank, ranks=self._ranks, timeout_seconds=self._timeout)

    def barrier(self, label: str) -> None:
        """Returns when every rank of the node has called `barrier`.

        Raises:
            PeerLost: a rank is gone or late.
            CommMismatch: a rank called it with another label.
        """
        self._number += 1
        message = _MESSAGE.pack(self._number, label.encode()[:88])
        for peer, connection in self._sockets.items():
            try:
                connection.sendall(message)
            except OSError as error:
                raise PeerLost(f"{self._place(peer)} is gone ({label}): {error}") from error
        for peer, connection in self._sockets.items():
            self._hear(peer, connection=connection, expected=message, label=label)

    def _hear(self, peer: int, *, connection: socket.socket, expected: bytes, label: str) -> None:
        try:
            self._wait_for(peer, connection=connection, label=label)
            heard = connection.recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError as error:
            raise PeerLost(f"{self._place(peer)} is gone ({label}): {error}") from error
        if len(heard) < _MESSAGE.size:
            raise PeerLost(f"{self._place(peer)} is gone: connection closed while waiting at {label}")
        if heard != expected:
            theirs = _MESSAGE.unpack(heard)[1].rstrip(b"\0").decode(errors="replace")
            raise CommMismatch(
                f"{self._place(self.rank)} is at '{label}', {self._place(peer)} at '{theirs}': the ranks ran different modules or shapes"
            )

    def _wait_for(self, peer: int, *, connection: socket.socket, label: str) -> None:
        """Returns when the peer has sent data. Logs one warning if the peer is late."""
        patience = min(PATIENCE_SECONDS, self._timeout / 4)
        if _has_news(connection, seconds=patience):
            return
        logger.warning(
            "%s waits at '%s': %s has not arrived for %.3g s; it may be stopped or slow, and ends this run after %.4g s",
            *(self._place(self.rank), label, self._place(peer), patience, self._timeout),
        )
        if not _has_news(connection, seconds=self._timeout - patience):
            raise PeerLost(f"{self._place(peer)} did not arrive at {label} within {self._timeout:g} s")

    def _place(self, peer: int) -> str:
        return place_of(self._ranks[peer])

    def close(self) -> None:
        """Closes all sockets. May be called from another thread; a thread that waits in `barrier` then raises PeerLost."""
        for connection in self._sockets.values():
            hang_up(connection)


def _has_news(connection: socket.socket, *, seconds: float) -> bool:
    """Whether the connection has data to read or was closed by the peer."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
    except ValueError as error:
        raise OSError("closed by another thread of this rank") from error
    return bool(poll.poll(seconds * 1000))


def _is_ours(connection: socket.socket) -> bool:
    """Whether the peer process belongs to this user. Memory is never handed to other users."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()
