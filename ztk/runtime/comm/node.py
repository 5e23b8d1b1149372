"""Ranks of one machine meet: a socket between each pair, and one shared memory segment per rank.

Nothing is left in any filesystem: segments are memfds handed over the sockets, sockets have abstract names. When a
process dies the kernel closes its sockets, and every peer that waits for it knows within milliseconds.
"""

import mmap
import os
import secrets
import socket
import struct

import torch
import torch.distributed as dist
from torch import Tensor

from ztk.runtime.comm.errors import CommMismatch, PeerLost

_MESSAGE = struct.Struct("<Q88s")  # running number of the meeting, label


class NodeMeeting:
    """`slabs[r]` is rank r's segment as uint8 [slab_bytes]; `meet` is a barrier that checks what everybody is doing."""

    def __init__(self, *, group: dist.ProcessGroup, slab_bytes: int, timeout_seconds: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._timeout = timeout_seconds
        self._number = 0
        token = [secrets.token_hex(8)]
        dist.broadcast_object_list(token, group_src=0, group=group)
        own_fd = os.memfd_create("ztk-slab")
        os.ftruncate(own_fd, slab_bytes)
        self._sockets = self._connect(f"\0ztk-{token[0]}-", group=group)
        self.slabs = self._exchange(own_fd, slab_bytes=slab_bytes)

    def _connect(self, name: str, *, group: dist.ProcessGroup) -> dict[int, socket.socket]:
        """Every rank listens, then connects to all lower ranks."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name + str(self.rank))
        listener.listen(self.size)
        listener.settimeout(self._timeout)
        dist.barrier(group=group)
        sockets: dict[int, socket.socket] = {}
        for lower in range(self.rank):
            sockets[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[lower].connect(name + str(lower))
            sockets[lower].sendall(struct.pack("<I", self.rank))
        for _ in range(self.rank + 1, self.size):
            connection, _ = listener.accept()
            (peer,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
            sockets[peer] = connection
        listener.close()
        for connection in sockets.values():
            connection.settimeout(self._timeout)
        return dict(sorted(sockets.items()))

    def _exchange(self, own_fd: int, *, slab_bytes: int) -> list[Tensor]:
        descriptors = {self.rank: own_fd}
        for connection in self._sockets.values():
            socket.send_fds(connection, [b"f"], [own_fd])
        for peer, connection in self._sockets.items():
            _, (descriptors[peer],), _, _ = socket.recv_fds(connection, 1, 1)
        slabs = []
        for peer in range(self.size):
            slabs.append(torch.frombuffer(mmap.mmap(descriptors[peer], slab_bytes), dtype=torch.uint8))
            os.close(descriptors[peer])  # the mapping keeps the memory
        return slabs

    def meet(self, label: str) -> None:
        """Returns when every rank of the node has called `meet`; raises if one is lost, late or doing something else."""
        self._number += 1
        message = _MESSAGE.pack(self._number, label.encode()[:88])
        for peer, connection in self._sockets.items():
            try:
                connection.sendall(message)
            except OSError as error:
                raise PeerLost(f"rank {peer} is gone ({label}): {error}") from error
        for peer, connection in self._sockets.items():
            self._hear(peer, connection=connection, expected=message, label=label)

    def _hear(self, peer: int, *, connection: socket.socket, expected: bytes, label: str) -> None:
        try:
            heard = connection.recv(_MESSAGE.size, socket.MSG_WAITALL)
        except TimeoutError as error:
            raise PeerLost(f"rank {peer} did not arrive at {label} within {self._timeout:g} s") from error
        except OSError as error:
            raise PeerLost(f"rank {peer} is gone ({label}): {error}") from error
        if len(heard) < _MESSAGE.size:
            raise PeerLost(f"rank {peer} is gone: connection closed while waiting at {label}")
        if heard != expected:
            theirs = _MESSAGE.unpack(heard)[1].rstrip(b"\0").decode(errors="replace")
            raise CommMismatch(
                f"rank {self.rank} is at '{label}', rank {peer} at '{theirs}': the ranks ran different modules or shapes"
            )

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
