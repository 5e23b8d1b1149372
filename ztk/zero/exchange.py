"""How a bucket's shards travel: as they are, or with fewer and shorter bytes (ZeRO++, Wang et al. 2023, https://arxiv.org/abs/2306.10209).

Per parameter of 2 bytes on N ranks in neighbourhoods of K (a node's GPUs): the forward's gather takes 1.02 bytes instead of 2 when weights
travel as int8; the backward's gather stays among neighbours, who together keep a second copy, 2 / K bytes each; the gradient takes
0.52 bytes as int4, and with neighbourhoods only 1 / K of that leaves them, at the price of a second rounding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ztk.kernels import dequantize, dequantize_reduce, quantize, quantized_bytes
from ztk.runtime import Comm, MemoryLedger, Mesh, Tier
from ztk.zero.policy import ZeroPolicy
from ztk.zero.store import Pending

WEIGHT_BITS, GRADIENT_BITS = 8, 4


class Exchange:
    """Gathers and reduces over `comm`. The buffers are a bucket's, flat, of `comm.size` equal shards."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def gather(self, full: Tensor, *, label: str, after: Pending) -> Pending:
        """In place, once `after` has brought the own shard."""
        return self._comm.all_gather(full, label=label, after=after)

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> Pending:
        """`out` = the sum of the ranks' parts of `full` for this rank."""
        return self._comm.reduce_scatter(full, out=out, label=label)

    def forget(self) -> None:
        """The shards have new values."""


class QuantizedCollectives(Exchange):
    """With the savings that `policy` asks for."""

    def __init__(self, comm: Comm, *, policy: ZeroPolicy, hops: tuple[Comm, Comm] | None, ledger: MemoryLedger) -> None:
        """hops: the neighbourhood, and the ranks at the same place in the others; None: there are no neighbourhoods."""
        super().__init__(comm)
        self._policy, self._ledger = policy, ledger
        self._intra_node, self._inter_node = hops or (None, None)
        self._keeps_second = hops is not None and policy.hpz_partition_size > 1
        self._second: Tensor | None = None  # this rank's part of the neighbourhood's copy
        self._second_is_current = False

    def gather(self, full: Tensor, *, label: str, after: Pending) -> Pending:
        if self._second_is_current:
            full.chunk(self._intra_node.size)[self._intra_node.rank].copy_(self._second)
            return self._intra_node.all_gather(full, label=f"{label} among neighbours")
        if self._policy.quantized_weights:
            work = self._gather_short(full, label=label, after=after)
        else:
            work = super().gather(full, label=label, after=after)
        return _Then(work, lambda: self._keep(full)) if self._keeps_second else work

    def _gather_short(self, full: Tensor, *, label: str, after: Pending) -> Pending:
        shards = full.view(self._comm.size, -1)
        numel = shards.shape[1]
        packed = full.new_empty(self._comm.size, quantized_bytes(numel, bits=WEIGHT_BITS), dtype=torch.int8)

        def pack() -> None:
            packed[self._comm.rank].copy_(quantize(shards[self._comm.rank], bits=WEIGHT_BITS)[0])

        def unpack() -> None:
            shards.copy_(
                dequantize(packed, numel=numel, bits=WEIGHT_BITS, dtype=full.dtype)
            )  # the own one too: all agree

        before = _Then(after, pack, is_immediate=after.is_immediate)
        return _Then(self._comm.all_gather(packed.view(-1), label=f"{label} as int8", after=before), unpack)

    def _keep(self, full: Tensor) -> None:
        part = full.chunk(self._intra_node.size)[self._intra_node.rank]
        if self._second is None:
            self._second = torch.empty_like(part)
            self._ledger.add(tier=Tier.device, category="second shards", nbytes=part.nbytes)
        self._second.copy_(part)
        self._second_is_current = True

    def forget(self) -> None:
        self._second_is_current = False

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> Pending:
        if not self._policy.quantized_gradients:
            return super().reduce_scatter(full, out=out, label=label)
        label = f"{label} as int4"
        if self._intra_node is None or self._inter_node.size == 1:
            shards = full.view(self._comm.size, -1)
            return _sum_short(shards, out=out, comm=self._comm, label=label)
        return self._reduce_twice(full, out=out, label=label)

    def _reduce_twice(self, full: Tensor, *, out: Tensor, label: str) -> Pending:
        """Neighbours first: neighbour n collects the shards of all ranks that stand at place n; then those exchange what is theirs."""
        intra, inter = self._intra_node.size, self._inter_node.size
        shards = full.view(inter, intra, -1).transpose(0, 1).reshape(intra, -1)  # [intra, inter * shard]
        partial = torch.empty(shards.shape[1], dtype=torch.float32, device=full.device)
        first = _sum_short(shards, out=partial, comm=self._intra_node, label=f"{label} among neighbours")

        def second() -> None:
            _sum_short(partial.view(inter, -1), out=out, comm=self._inter_node, label=label).wait()

        return _Then(first, second)


class _Then:
    """Something to do when something else is done."""

    def __init__(self, work: Pending, action: Callable[[], None], *, is_immediate: bool = False) -> None:
        self._work, self._action, self.is_immediate = work, action, is_immediate

    def wait(self) -> None:
        """Idempotent."""
        action, self._action = self._action, None
        self._work.wait()
        if action is not None:
            action()


def _sum_short(shards: Tensor, *, out: Tensor, comm: Comm, label: str) -> Pending:
    """out [n] = the sum over ranks of their row for this rank of `shards` [comm.size, n], which travel as int4."""
    numel = shards.shape[1]
    packed = quantize(shards, bits=GRADIENT_BITS)
    received = torch.empty_like(packed)
    work = comm.all_to_all(packed.view(-1), out=received.view(-1), label=label)
    return _Then(work, lambda: out.copy_(dequantize_reduce(received, numel=numel, bits=GRADIENT_BITS, dtype=out.dtype)))


def exchange_of(axis: str, *, policy: ZeroPolicy, mesh: Mesh, ledger: MemoryLedger) -> Exchange:
    """For a bucket that is sharded over `axis`. Neighbourhoods are of data-parallel ranks, so experts have none."""
    comm = mesh.comm(axis)
    has_groups = axis == "data" and mesh.comm("intra_node").size > 1
    if comm.size == 1 or not (policy.quantized_weights or policy.quantized_gradients or has_groups):
        return Exchange(comm)
    hops = (mesh.comm("intra_node"), mesh.comm("inter_node")) if has_groups else None
    return QuantizedCollectives(comm, policy=policy, hops=hops, ledger=ledger)
