"""Gloo collectives for several ranks that share one GPU, because NCCL allows one rank per GPU."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ztk.core.runtime.comm.gloo import GlooTransport
from ztk.core.runtime.comm.transport import SingleRankTransport, Transport


class HostedGloo(Transport):
    """Gloo collectives for tensors on any device, through copies in main memory."""

    blocking = True
    checks_labels = False

    def __init__(self, *, group: dist.ProcessGroup) -> None:
        self._gloo = GlooTransport(group=group)

    def all_gather(self, full: Tensor, *, label: str) -> None:
        here = full.cpu()
        self._gloo.all_gather(here, label=label)
        full.copy_(here)

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.reduce_scatter(full.cpu(), out=here, label=label)
        out.copy_(here)

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.all_to_all(source.cpu(), out=here, label=label)
        out.copy_(here)

    def all_to_all_uneven(
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.all_to_all_uneven(source.cpu(), out=here, send=send, receive=receive, label=label)
        out.copy_(here)

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> None:
        here = tensor.cpu()
        self._gloo.broadcast(here, source=source, label=label)
        tensor.copy_(here)

    def send(self, tensor: Tensor, *, to: int, label: str) -> None:
        self._gloo.send(tensor.cpu(), to=to, label=label)

    def recv(self, out: Tensor, *, source: int, label: str) -> None:
        here = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.recv(here, source=source, label=label)
        out.copy_(here)

    def close(self) -> None:
        self._gloo.close()


def hosted(group: dist.ProcessGroup, **_: object) -> Transport:
    """Replaces the choice of a transport by device."""
    return SingleRankTransport() if group.size() == 1 else HostedGloo(group=group)
