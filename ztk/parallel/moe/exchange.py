"""Expert parallelism: an all-to-all sends tokens to their experts, and another returns the results. No token is dropped, no buffer padded.

Rank r of the expert axis has experts [r E/n, (r + 1) E/n). A rank's slots are sorted by expert, so the rows for one rank are contiguous.
Received rows are sorted by sender, then by expert; the grouped products read them through a permutation. First the ranks gather the number
of choices per expert. This small collective is the only time in a layer that the host waits for the device, which meanwhile sorts
the tokens to send. Counts have an integer dtype.

[Note: One read per layer]
An all-to-all of NCCL needs its sizes on the host. They depend on this layer's router, and so on the experts of the layer before: no earlier
exchange can have the sizes of several layers. Sizes that the host knows without a read cost more:

- Buffers with room for every case: all T k rows of a rank may go to one other, so n ranks send n times the bytes.
- A capacity per pair of ranks: rows beyond it are dropped, or the step is computed again.
- All tokens to all ranks: (n - 1) T rows in place of T k (n - 1) / n, and results that are summed over ranks, in another order of choices
  than on one rank.

So the host reads once per layer and micro-batch. The backward needs no read, and a repetition of the forward neither
(`ztk.core.runtime.repeated`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.core.runtime import Comm, Mesh
from ztk.core.runtime.planned import is_planned, note_read
from ztk.core.runtime.repeated import start_reading
from ztk.kernels import Routing, Slots, moe_slots
from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.ops.moe_combine import combine
from ztk.parallel.moe.all_to_all import AsyncAllToAll

_ROWS = "rows per rank of the experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """rows [S, C]: every slot's result. counts float64 [E]: choices per expert over all ranks of the data axis, each rank's multiplied by
    the weight of its micro-batch. meanwhile: the result of `meanwhile()`, which ran during the all-to-all."""

    rows: Tensor
    counts: Tensor
    meanwhile: Tensor | None


class ExpertExchange:
    """Dispatches a layer's tokens along the mesh's "ep" axis. With one rank on the axis it only sums the counts.

    cut_along: the axis whose ranks have different tokens of one data-parallel rank, or None.
    """

    def __init__(self, mesh: Mesh, *, label: str, cut_along: Comm | None = None) -> None:
        self._experts, self._data, self._label = mesh.comm("ep"), mesh.comm("data"), label
        self._cut_along = cut_along

    def __call__(
        self,
        tokens: Tensor,
        *,
        routing: Routing,
        experts: Callable[..., Tensor],
        meanwhile: Callable[[], Tensor] | None = None,
        weight: float = 1.0,
    ) -> Exchanged:
        """Runs tokens [T, C] through `experts(x, offsets=, order=, position=)` on the ranks that hold them. A collective call along "ep"
        and "data".

        experts: this rank's. meanwhile: work to do during the first all-to-all. weight: factor of this rank's tokens in `counts`; the ranks'
        weights have the mean 1.
        """
        own_weight = torch.full((1,), weight, device=tokens.device).view(torch.int32)  # its bits, sent with the counts
        gathered = self._data.gather_scalars(torch.cat([routing.counts, own_weight]), label=f"{self._label} counts")
        shared, weights = gathered[:, :-1], gathered[:, -1].contiguous().view(torch.float32)  # int32 [data, E], [data]
        counts = _weighed(shared, weights=weights)
        if self._cut_along is not None:
            counts = self._cut_along.gather_scalars(counts, label=f"{self._label} counts").sum(dim=0)
        if self._experts.size == 1:
            rows = experts(tokens, offsets=routing.offsets, order=routing.order, position=routing.position)
            return Exchanged(rows=rows, counts=counts, meanwhile=meanwhile() if meanwhile else None)
        reading = None
        if is_planned(tokens.device):
            note_read(_ROWS)
        else:
            reading = DispatchPlan.start(shared, experts=self._experts, data=self._data)
        outgoing = gather_rows(tokens, order=routing.order, position=routing.position)  # while the host reads
        if reading is None:
            plan = DispatchPlan.balanced(shared, rows=routing.order.numel(), experts=self._experts)
        else:
            plan = reading.finish()
        to_experts = AsyncAllToAll(
            self._experts, send=plan.send, receive=plan.receive, label=f"{self._label} to experts"
        )
        buffer = to_experts.start(outgoing)
        between = meanwhile() if meanwhile else None
        arrived = to_experts.wait(buffer)
        slots = plan.slots
        results = experts(arrived, offsets=slots.offsets, order=slots.order, position=slots.position)
        results = gather_rows(results, order=slots.position.view(-1), position=slots.order.unsqueeze(1))
        from_experts = AsyncAllToAll(
            self._experts, send=plan.receive, receive=plan.send, label=f"{self._label} from experts"
        )
        rows = from_experts.wait(from_experts.start(results, anchor=arrived))
        return Exchanged(rows=rows, counts=counts, meanwhile=between)


def _weighed(counts: Tensor, *, weights: Tensor) -> Tensor:
    """counts [ranks, E], weights [ranks] -> float64 [E] with the same sum: the weighted mean of the ranks' shares per expert."""
    own = counts.sum(dim=1)
    per_choice = weights.double() / own.clamp_min(1)
    per_choice = per_choice * (own.sum() / weights.double().sum().clamp_min(torch.finfo(torch.float32).tiny))
    return (counts * per_choice[:, None]).sum(dim=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchPlan:
    """Numbers of rows per rank, and the slots of the rows that this rank's experts receive."""

    send: list[int]  # rows to each rank of the expert axis
    receive: list[int]  # rows from each
    slots: Slots  # of the received rows, one choice each, among this rank's experts

    @staticmethod
    def balanced(counts: Tensor, *, rows: int, experts: Comm) -> "DispatchPlan":
        """A plan for counts [data, E] without values: each rank's `rows` are divided equally over the expert axis, with one more row for
        the first."""
        send = [rows // experts.size + (rank < rows % experts.size) for rank in range(experts.size)]
        receive = [send[experts.rank]] * experts.size
        own = counts.shape[1] // experts.size
        expert_of_row = torch.empty(sum(receive), dtype=torch.int64, device=counts.device)
        return DispatchPlan(send=send, receive=receive, slots=moe_slots(expert_of_row.unsqueeze(1), num_experts=own))

    @staticmethod
    def start(counts: Tensor, *, experts: Comm, data: Comm) -> "PlanUnderWay":
        """counts: integers [data, E], how many rows every rank of the data axis sends to each expert."""
        first = data.rank // experts.size * experts.size  # neighbours along the data axis hold different experts
        by_pair = counts[first : first + experts.size].view(experts.size, experts.size, -1)
        return PlanUnderWay(by_pair=by_pair, totals=start_reading(by_pair.sum(dim=2), name=_ROWS), experts=experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanUnderWay:
    """by_pair: integers [sender, holder, own experts]. totals: waits for their sums over experts, [sender, holder] on the host."""

    by_pair: Tensor
    totals: Callable[[], Tensor]
    experts: Comm

    def finish(self) -> DispatchPlan:
        """Waits until the totals are on the host: for work issued before `start`, but not for later work."""
        totals, rank = self.totals().tolist(), self.experts.rank
        send = totals[rank]
        receive = [row[rank] for row in totals]
        coming = self.by_pair[:, rank]  # [sender, own experts]
        numbers = torch.arange(coming.shape[1], device=coming.device).repeat(self.experts.size)
        expert_of_row = numbers.repeat_interleave(coming.flatten(), output_size=sum(receive))
        slots = moe_slots(expert_of_row.unsqueeze(1), num_experts=coming.shape[1])
        return DispatchPlan(send=send, receive=receive, slots=slots)


def gather_rows(x: Tensor, *, order: Tensor, position: Tensor) -> Tensor:
    """Rows in the order of slots, differentiable without atomics: x [T, C] -> [S, C].

    Slot s is row order[s] // k, with `order` [S] and `position` [T, k] of `ztk.kernels.Slots`. A row's gradient is the sum of its slots'
    gradients, in the order of choices.
    """
    return _GatherRows.apply(x, order, position)


class _GatherRows(OnceFunction):
    INSTEAD = "Use topology.expert=1"

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return x.index_select(0, order // position.shape[1])

    @staticmethod
    def backward(ctx, d_rows: Tensor) -> tuple[Tensor, None, None]:
        (position,) = ctx.saved_tensors
        return combine(d_rows.contiguous(), None, position), None, None
