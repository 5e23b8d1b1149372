"""Enumerates all layouts of a run, and ranks them by arithmetic to choose the ones to plan.

The arithmetic only decides which layouts are planned and in which order: every number of a result comes from a plan. Bytes of state are a
lower bound, so layouts dropped for memory cannot fit; seconds are rough.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ztk.core.policies.hardware import Hardware
from ztk.core.policies.topology import Degrees, heads_of_ranks

STAGES = (0, 1, 2, 3)
# (tier, offloaded part of the optimizer states): each takes more off the device than the one before
PLACES = (("none", 1.0), ("cpu", 0.25), ("cpu", 0.5), ("cpu", 0.75), ("cpu", 1.0), ("nvme", 1.0))
RECOMPUTES = ("none", "selective", "full")  # each keeps less than the one before
DEGREES = ("pipeline", "tensor", "sequence", "context", "expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(Degrees):
    """One way to run. Degrees as in `Topology`. fraction: the offloaded part of the optimizer states."""

    stage: int
    offload: str
    fraction: float = 1.0
    recompute: str
    pipeline: int
    tensor: int
    sequence: int
    context: int
    expert: int

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for the command line, without defaults."""
        degrees = {name: getattr(self, name) for name in DEGREES}
        return (
            f"zero=stage{self.stage}",
            *([f"offload={self.offload}"] if self.offload != "none" else []),
            *([f"offload.optimizer_fraction={self.fraction}"] if self.fraction < 1 else []),
            *([f"recompute={self.recompute}"] if self.recompute != "none" else []),
            *(f"topology.{name}={degree}" for name, degree in degrees.items() if degree > 1),
        )

    def keeps_more(self, other: "Layout") -> bool:
        """Whether it keeps more than `other` and differs only by weaker recomputation and less offloading."""
        weaker = RECOMPUTES.index(self.recompute) <= RECOMPUTES.index(other.recompute)
        nearer = PLACES.index(self._place) <= PLACES.index(other._place)
        same = replace(self, offload=other.offload, fraction=other.fraction, recompute=other.recompute) == other
        return same and weaker and nearer

    @property
    def _place(self) -> tuple[str, float]:
        return self.offload, self.fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The model, the data and the hardware of a search. parameters: number in the full model; expert_parameters: the part of them in experts.

    expert_choices: choices of a token, over all layers. flops: operations for a token, forward and backward. global_batch: sequences. Bytes per
    parameter: parameter_bytes of its values in the forward, gradient_bytes of its gradient, accumulated_bytes of a gradient that several
    micro-batches add up, optimizer_bytes of its optimizer states. dtype: dtype of products; linear_dtype: dtype of products in linear layers.
    """

    ranks: int
    hardware: Hardware
    parameters: int
    expert_parameters: int
    expert_choices: int
    experts: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    vocabulary: int
    flops: int
    seq_len: int
    micro_batch: int
    global_batch: int
    parameter_bytes: int
    gradient_bytes: float
    accumulated_bytes: float
    optimizer_bytes: float
    dtype: str
    linear_dtype: str

    @property
    def attention_flops(self) -> int:
        """Operations of a token in attention, as `flops` counts them."""
        return 12 * self.dim * self.seq_len * self.layers

    @property
    def linear_flops(self) -> int:
        """Operations of a token in products with parameters."""
        return self.flops - self.attention_flops

    def replicas(self, layout: Layout) -> int:
        """Number of ranks with different sequences."""
        return self.ranks // layout.model_ranks

    def tokens(self, layout: Layout) -> float:
        """Tokens of a rank's micro-batch."""
        return self.micro_batch * self.seq_len / layout.sequence_ranks

    def forwards(self, layout: Layout) -> int:
        """Micro-batches of a step."""
        return self.global_batch // (self.replicas(layout) * self.micro_batch)

    def gradient(self, layout: Layout) -> float:
        """Bytes of a parameter's gradient, as it is reduced and kept."""
        return self.gradient_bytes if self.forwards(layout) == 1 else self.accumulated_bytes

    def own(self, layout: Layout) -> float:
        """Parameters of a rank before ZeRO shards them: the mean over stages."""
        experts = self.expert_parameters / layout.expert
        return (self.parameters - self.expert_parameters + experts) / (layout.pipeline * layout.tensor)

    def shard(self, layout: Layout) -> float:
        """Parameters of a rank when ZeRO has sharded them. Experts are sharded over the ranks that have the same ones."""
        return self.parameters / self.ranks


def legal(work: Workload) -> tuple[list[Layout], dict[str, int]]:
    """Every layout that `work` can run with, and the number of impossible ones by reason. Degrees that do not divide the ranks are
    skipped."""
    found, refused = [], Counter[str]()
    for degrees in _degrees(work):
        for stage in STAGES:
            for offload, fraction in PLACES:
                for recompute in RECOMPUTES:
                    layout = Layout(stage=stage, offload=offload, fraction=fraction, recompute=recompute, **degrees)
                    if reason := _illegal(layout, work=work):
                        refused[reason] += 1
                    else:
                        found.append(layout)
    return found, dict(refused)


def parts_of(layout: Layout) -> list[Layout]:
    """The same layout with each smaller part of its optimizer states offloaded."""
    fractions = [fraction for offload, fraction in PLACES if offload == layout.offload and fraction < layout.fraction]
    return [replace(layout, fraction=fraction) for fraction in fractions]


def state_bytes(layout: Layout, *, work: Workload) -> float:
    """Lower bound of the bytes on the device between two steps. A fraction keeps whole buckets there, perhaps none."""
    parameters = work.parameter_bytes * (work.shard(layout) if layout.stage == 3 else work.own(layout))
    if layout.offload == "none":
        return parameters + _gradient_bytes(layout, work=work) + _optimizer_bytes(layout, work=work)
    return parameters * (layout.stage < 3) + _gradient_bytes(layout, work=work) * (layout.stage < 2)


def host_state_bytes(layout: Layout, *, work: Workload) -> float:
    """Lower bound of the bytes in a node's main memory between two steps: the optimizer states of its ranks that offload=cpu keeps there."""
    if layout.offload != "cpu":
        return 0.0
    return min(work.ranks, work.hardware.ranks_per_node) * layout.fraction * _optimizer_bytes(layout, work=work)


def rough_bytes(layout: Layout, *, work: Workload) -> float:
    """Rough peak of a device."""
    size = state_bytes(layout, work=work) + _resident_bytes(layout, work=work)
    return size + _activation_bytes(layout, work=work) + _moving_bytes(layout, work=work)


def _resident_bytes(layout: Layout, *, work: Workload) -> float:
    """Rough size of the states that `fraction` keeps on the device, with their gradients."""
    gradients = _gradient_bytes(layout, work=work) * (layout.stage >= 2)
    kept = 0.0 if layout.offload == "none" else 1 - layout.fraction
    return kept * (gradients + _optimizer_bytes(layout, work=work))


def _gradient_bytes(layout: Layout, *, work: Workload) -> float:
    """Bytes of a rank's gradients, which stay on the device at stages 0 and 1."""
    return work.gradient(layout) * (work.shard(layout) if layout.stage >= 2 else work.own(layout))


def _optimizer_bytes(layout: Layout, *, work: Workload) -> float:
    """Bytes of a rank's optimizer states."""
    return work.optimizer_bytes * (work.shard(layout) if layout.stage >= 1 else work.own(layout))


def _activation_bytes(layout: Layout, *, work: Workload) -> float:
    """Rough size of a micro-batch's saved activations: 2 bytes of some values per element of the residual stream and layer.

    Without recomputation these are the inputs of both norms, of the projections and of attention, and the gate's operands. recompute=selective
    keeps the results of products and attention, recompute=full the input of a layer.
    """
    tokens = work.tokens(layout)
    layers = work.layers / layout.pipeline
    waiting = min(layout.pipeline, work.forwards(layout))  # micro-batches of a stage at one time, with 1F1B
    attention = 2 + 2 * work.kv_heads / work.heads
    weights = work.linear_flops / (6 * work.layers * work.dim**2)  # of a layer and token
    gate = max(0.0, (weights - attention) / 3)
    every = 4 + (attention + 3 * gate) / layout.tensor
    kept = {"none": every, "selective": 3 + (attention + 2 * gate) / layout.tensor, "full": 1.0}[layout.recompute]
    again = every if layout.recompute != "none" else 0.0
    return 2.0 * tokens * work.dim * (kept * layers * waiting + again)


def _moving_bytes(layout: Layout, *, work: Workload) -> float:
    """Rough size of the parameters and gradients of two layers, which are gathered and reduced while others compute."""
    layer = work.own(layout) * layout.pipeline / work.layers
    gathered = work.parameter_bytes * (layout.stage == 3)
    return 2 * layer * (gathered + work.gradient(layout) * (layout.stage >= 2))


def _degrees(work: Workload) -> Iterator[dict[str, int]]:
    """All degrees, by their names."""
    for pipeline in divisors(work.ranks):
        for tensor in divisors(work.ranks // pipeline):
            data = work.ranks // pipeline // tensor
            for sequence in divisors(data):
                for context in divisors(data // sequence):
                    for expert in divisors(math.gcd(data, work.experts)) if work.experts else (1,):
                        yield dict(zip(DEGREES, (pipeline, tensor, sequence, context, expert), strict=True))


def _illegal(layout: Layout, *, work: Workload) -> str:
    """Why the layout is refused, or "" if no rule here applies. The rules of `ztk.config` are decisive."""
    heads = heads_of_ranks(work.heads, kv_heads=work.kv_heads, ranks=layout.tensor)
    is_ring, ring = layout.context > 1, 2 * layout.sequence_ranks
    rules = (
        (layout.pipeline > work.layers + 2, "more stages than layers, embedding and head"),
        (layout.tensor > work.kv_heads, "more tensor ranks than key heads"),
        (any(own % layout.sequence for own in heads), "sequence ranks do not divide a rank's heads"),
        (not is_ring and work.seq_len % layout.sequence, "sequence ranks do not divide the sequence"),
        (is_ring and work.experts and work.seq_len % ring, "padding of a ring would be routed to experts"),
        (
            layout.stage == 1 and layout.pipeline * layout.tensor == work.ranks,
            "the same as stage 0: one data-parallel rank",
        ),
        (
            work.global_batch % (work.replicas(layout) * work.micro_batch),
            "the global batch is no multiple of a micro-batch on every replica",
        ),
    )
    return next((reason for is_broken, reason in rules if is_broken), "")


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
