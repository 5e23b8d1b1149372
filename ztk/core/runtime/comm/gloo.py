"""Collectives over gloo, expressed by the operations that gloo runs fastest.

Measured on 2 cores with 64 MB: a reduce-scatter as an all-to-all plus a local sum is up to three times as fast as gloo's own, and it sums
in rank order; an all-gather as one broadcast per slice is up to four times as fast as gloo's `all_gather_into_tensor`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ztk.core.policies.machine import place_of, ranks_text
from ztk.core.runtime.comm.errors import peer_errors
from ztk.core.runtime.comm.transport import Transport, sum_in_rank_order


class GlooTransport(Transport):
    """CPU tensors between machines (inside one machine `SharedMemoryTransport` is faster)."""

    blocking = True
    checks_labels = False

    def __init__(self, *, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._ranks = dist.get_process_group_ranks(group)

    def all_gather(self, full: Tensor, *, label: str) -> None:
        with self._errors(label):
            works = [
                dist.broadcast(part, group_src=source, group=self._group, async_op=True)
                for source, part in enumerate(full.chunk(self._size))
            ]
            for work in works:
                assert work is not None
                work.wait()

    def maximum(self, rows: Tensor, *, own: Tensor, label: str) -> None:
        with self._errors(label):  # one all-reduce: a gather of N ranks is N broadcasts, 90 ms of CPU at 1,024
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._group)

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> None:
        received = torch.empty_like(full)
        self.all_to_all(full, out=received, label=label)
        sum_in_rank_order(received.chunk(self._size), out=out)

    def all_to_all(self, source: Tensor, *, out: Tensor, label: str) -> None:
        with self._errors(label):
            dist.all_to_all_single(out, source, group=self._group)

    def all_to_all_uneven(
        self, source: Tensor, *, out: Tensor, send: Sequence[int], receive: Sequence[int], label: str
    ) -> None:
        with self._errors(label):
            dist.all_to_all_single(out, source, list(receive), list(send), group=self._group)

    def broadcast(self, tensor: Tensor, *, source: int, label: str) -> None:
        with self._errors(label):
            dist.broadcast(tensor, group_src=source, group=self._group)

    def send(self, tensor: Tensor, *, to: int, label: str) -> None:
        with self._errors(label, peer=to):
            dist.send(tensor.view(torch.uint8), group_dst=to, group=self._group)

    def recv(self, out: Tensor, *, source: int, label: str) -> None:
        with self._errors(label, peer=source):
            dist.recv(out.view(torch.uint8), group_src=source, group=self._group)

    def _errors(self, label: str, *, peer: int | None = None) -> peer_errors:
        """Context that names the ranks of the call: gloo's errors have only an address."""
        return peer_errors(f"{label}, with {ranks_text(self._ranks) if peer is None else place_of(self._ranks[peer])}")
