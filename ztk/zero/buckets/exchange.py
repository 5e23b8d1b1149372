"""How a bucket's shards are sent: as they are, or with fewer bytes (ZeRO++, Wang et al. 2023, https://arxiv.org/abs/2306.10209).

Per parameter of 2 bytes on N ranks, in groups of K that share a node's fast links: the forward's gather takes 1.02 bytes instead of 2 when
weights are sent as int8, and about 1 byte as float8 (`shard_formats`). The backward's gather stays inside the group, whose ranks together
keep a second copy, 2 / K bytes each. The gradient takes 0.52 bytes as int4, and with groups only 1 / K of that leaves the group, at the
price of a second rounding.
Buffers have the bucket's dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Comm, MemoryLedger, Tier
from ztk.core.runtime.pending import Handle, Pending, then
from ztk.kernels import dequantize_reduce, quantize
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.buckets.layout import BucketLayout
from ztk.zero.buckets.shard_formats import Float8Shards, Int8Shards, ShardFormat

GRADIENT_BITS = 4

Fetch = Callable[[], Handle]


class Exchange:
    """Gathers and reduces over `comm`. Buffers are a bucket's: flat, made of `comm.size` equal shards."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def gather(self, full: Tensor, *, label: str, fetch: Fetch, is_exact: bool = False) -> Pending:
        """All-gathers the shards of `full` [size] in place. fetch: starts to load the rank's own shard. Only called if the shard is
        needed. is_exact: the parameters arrive with the bits of their shards, if products read the same from these bits."""
        return self._comm.all_gather(full, label=label, after=fetch())

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> Pending:
        """`out` [shard_size] = the sum over ranks of this rank's shard of `full` [size]."""
        return self._comm.reduce_scatter(full, out=out, label=label)

    def invalidate(self) -> None:
        """Invalidates cached copies of the shards, because the shards have new values."""

    def rounds(self, *, is_exact: bool) -> bool:
        """Whether the parameters of `gather` have other bits than their shards."""
        return False


class QuantizedCollectives(Exchange):
    """An exchange with the compression chosen in `policy`."""

    def __init__(
        self,
        comm: Comm,
        *,
        policy: ZeroPolicy,
        weights: ShardFormat | None,
        hops: tuple[Comm, Comm] | None,
        ledger: MemoryLedger,
    ) -> None:
        """weights: the format in which parameters are gathered. If omitted, their own. hops: the ranks of this rank's group, and the ranks at
        the same position of the other groups. If omitted, there are no groups."""
        super().__init__(comm)
        self._policy, self._weights, self._ledger = policy, weights, ledger
        self._intra_node, self._inter_node = hops or (None, None)
        self._keeps_copy = hops is not None and policy.hpz_partition_size > 1
        self._copy: Tensor | None = None  # this rank's part of the group's copy
        self._copy_is_current = False

    def gather(self, full: Tensor, *, label: str, fetch: Fetch, is_exact: bool = False) -> Pending:
        if self._weights is not None and not self.rounds(is_exact=is_exact):
            return super().gather(full, label=label, fetch=fetch)
        if self._copy_is_current:  # no fetch: nothing would wait for it, and it would overwrite `full` later
            assert self._intra_node is not None
            full.chunk(self._intra_node.size)[self._intra_node.rank].copy_(self._copy)
            return self._intra_node.all_gather(full, label=f"{label} inside the node")
        if self._weights is not None:
            work = self._gather_quantized(full, label=label, after=fetch(), weights=self._weights)
        else:
            work = super().gather(full, label=label, fetch=fetch)
        return then(work, action=lambda: self._keep_copy(full)) if self._keeps_copy else work

    def _gather_quantized(self, full: Tensor, *, label: str, after: Handle, weights: ShardFormat) -> Pending:
        packed = full.new_empty(self._comm.size, weights.nbytes, dtype=torch.int8)

        def pack() -> None:
            weights.pack(full, rank=self._comm.rank, out=packed[self._comm.rank])

        def unpack() -> None:  # including the own shard, so that all ranks compute with the same values
            weights.unpack(packed, full=full)

        before = then(after, action=pack, is_immediate=after.is_immediate)
        return then(
            self._comm.all_gather(packed.view(-1), label=f"{label} as {weights.name}", after=before), action=unpack
        )

    def _keep_copy(self, full: Tensor) -> None:
        assert self._intra_node is not None
        part = full.chunk(self._intra_node.size)[self._intra_node.rank]
        if self._copy is None:
            self._copy = torch.empty_like(part)
            self._ledger.add(tier=Tier.device, category="second shards", nbytes=part.nbytes)
        self._copy.copy_(part)
        self._copy_is_current = True

    def invalidate(self) -> None:
        self._copy_is_current = False

    def rounds(self, *, is_exact: bool) -> bool:
        return self._weights is not None and not (is_exact and self._weights.is_repeated)

    def reduce_scatter(self, full: Tensor, *, out: Tensor, label: str) -> Pending:
        if not self._policy.quantized_gradients:
            return super().reduce_scatter(full, out=out, label=label)
        label = f"{label} as int4"
        if self._intra_node is None or self._inter_node is None or self._inter_node.size == 1:
            return _sum_quantized(full.view(self._comm.size, -1), out=out, comm=self._comm, label=label)
        return self._reduce_in_two_hops(full, out=out, label=label)

    def _reduce_in_two_hops(self, full: Tensor, *, out: Tensor, label: str) -> Pending:
        """Reduces inside the node, where rank n collects the shards of all ranks at position n of their nodes, then between those ranks."""
        assert self._intra_node is not None and self._inter_node is not None
        intra, inter = self._intra_node.size, self._inter_node.size
        shards = full.view(inter, intra, -1).transpose(0, 1).reshape(intra, -1)  # [intra, inter * shard]
        partial = torch.empty(shards.shape[1], dtype=torch.float32, device=full.device)
        first = _sum_quantized(shards, out=partial, comm=self._intra_node, label=f"{label} inside the node")

        def second() -> None:
            _sum_quantized(partial.view(inter, -1), out=out, comm=self._inter_node, label=label).wait()

        return then(first, action=second)


def _sum_quantized(shards: Tensor, *, out: Tensor, comm: Comm, label: str) -> Pending:
    """out [n] = the sum over ranks of their row for this rank of `shards` [comm.size, n]. Rows are sent as int4."""
    numel = shards.shape[1]
    packed = quantize(shards, bits=GRADIENT_BITS)
    received = torch.empty_like(packed)
    work = comm.all_to_all(packed.view(-1), out=received.view(-1), label=label)
    return then(
        work, action=lambda: out.copy_(dequantize_reduce(received, numel=numel, bits=GRADIENT_BITS, dtype=out.dtype))
    )


def exchange_of(
    axis: str, *, is_trained: bool, is_float8: bool, layout: BucketLayout, context: ZeroContext
) -> Exchange:
    """The exchange of buckets that are sharded over `axis`. Experts have no groups inside a node: the groups are data-parallel ranks.

    is_float8: products read the parameters in float8 only.
    """
    policy, mesh, comm = context.policy, context.mesh, context.mesh.comm(axis)
    has_groups = axis == "data" and mesh.comm("intra_node").size > 1
    sends_int8 = policy.quantized_weights or (policy.quantized_nontrainable_weights and not is_trained)
    if comm.size == 1 or not (is_float8 or sends_int8 or policy.quantized_gradients or has_groups):
        return Exchange(comm)
    weights = Float8Shards(layout) if is_float8 else Int8Shards(layout) if sends_int8 else None
    hops = (mesh.comm("intra_node"), mesh.comm("inter_node")) if has_groups else None
    return QuantizedCollectives(comm, policy=policy, weights=weights, hops=hops, ledger=context.ledger)
