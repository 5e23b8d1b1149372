"""Rough seconds of a layout's step, by arithmetic, to choose the layouts that are planned.

Products take as long as in plans (`ztk.planner.reached`). The other operations of a block are counted by their bytes, collectives by their
bytes and starts. A pipeline is as slow as its slowest stage, plus the bubble and the messages that 1F1B cannot hide.
"""

import functools

from ztk.core.policies.hardware import Hardware
from ztk.core.policies.peers import Peer
from ztk.core.policies.pipeline import PipelinePolicy
from ztk.core.policies.zero import MAX_LIVE_PARAMETERS
from ztk.parallel.pipeline.partition import balanced
from ztk.planner.kinds import GROUPED_PRODUCT, PRODUCT
from ztk.planner.layouts import Layout, Workload
from ztk.planner.reached import device_seconds

# Overlapped updates and copies slow the forward down, and copies from disk slow it more: offload only if the states do not fit.
_OFFLOAD_COST = {"none": 1.0, "cpu": 1.1, "nvme": 1.2}
_LOCAL_GRADIENTS = PipelinePolicy().max_local_gradients
# Elements that the forward and the backward of a block read and write per element of the residual stream: two norms, two additions to the
# stream, and in the backward five additions of gradients; rotary positions, per element of queries and keys; the gate, per element of the
# hidden width.
_NORMS, _ROTARY, _GATE = (10, 21), (2, 2), (3, 6)
_LOSS = 3  # the same per logit


def rough_seconds(layout: Layout, *, work: Workload) -> float:
    """Rough seconds of a step."""
    hardware, forwards = work.hardware, work.forwards(layout)
    shard = work.shard(layout) if layout.stage else work.own(layout)
    pcie = host = disk = 0.0
    offloaded = 0.0 if layout.offload == "none" else shard * layout.fraction
    if offloaded:
        gathers, reduces = _passes(layout, work=work)
        copied = offloaded * (work.gradient(layout) * reduces + work.parameter_bytes * gathers)
        pcie = copied / (hardware.pcie_bandwidth * hardware.pcie_share)
        host = offloaded * _updated(layout, work=work) / (hardware.host_bandwidth * hardware.host_share)
    if layout.offload == "nvme":
        disk = offloaded * work.optimizer_bytes
        disk = disk / hardware.disk_read_bandwidth + disk / hardware.disk_write_bandwidth
    wire, in_node = _wire_of_data(layout, work=work)
    computed = _products(layout, work=work) + _rows(layout, work=work) + _accumulated(layout, work=work)
    compute = _attention(layout, work=work) + forwards * computed + hardware.overlap_cost * in_node
    compute += _exposed(layout, work=work)
    # during the first forward; else the step waits for the update
    hidden = compute / forwards / 3 if layout.stage == 3 else 0.0
    compute = compute * _bubble(layout, work=work) + _messages(layout, work=work)
    compute += shard * _updated(layout, work=work) / (hardware.memory_bandwidth * hardware.memory_share)
    return max(compute + max(0.0, host - hidden), wire, pcie, disk) * _OFFLOAD_COST[layout.offload]


def _updated(layout: Layout, *, work: Workload) -> float:
    """Bytes that an update reads and writes per parameter."""
    return 2 * work.optimizer_bytes + work.gradient(layout)


def _bubble(layout: Layout, *, work: Workload) -> float:
    """Seconds of a pipeline with 1F1B, relative to those in which a mean stage computes.

    The slowest stage computes all micro-batches, and the first one passes the other stages before and after it.
    """
    if layout.pipeline == 1:
        return 1.0
    forwards = work.forwards(layout)
    head = work.vocabulary * work.dim
    block = max(1.0, (work.parameters - 2 * head) / work.layers)  # of parameters, by which stages are balanced
    multiplied = max(1.0, (work.linear_flops / 6 - head) / work.layers)
    slowest = _slowest(
        work.layers, stages=layout.pipeline, outer=round(head / block, 3), head=round(head / multiplied, 3)
    )
    return ((forwards - 1) * slowest + layout.pipeline) / forwards


@functools.cache
def _slowest(layers: int, *, stages: int, outer: float, head: float) -> float:
    """Work of the slowest stage, relative to the mean. outer: size of the embedding and of the head in blocks, by which stages are
    balanced. head: its work in blocks."""
    sizes = [outer, *[1.0] * layers, outer]
    work = [0.0, *[1.0] * layers, head]
    stage = max(sum(work[index] for index in one) for one in balanced(sizes, num_stages=stages))
    return stage * stages / sum(work)


def _messages(layout: Layout, *, work: Workload) -> float:
    """Seconds of messages between stages that 1F1B does not hide.

    The last k stages have k micro-batches under way, which wait for 2 (k - 1) messages in each of their turns.
    """
    stages, hardware = layout.pipeline, work.hardware
    if stages == 1:
        return 0.0
    in_node = max(1, hardware.ranks_per_node * stages // work.ranks)
    nbytes = work.tokens(layout) * work.dim * work.parameter_bytes
    span = work.ranks - work.ranks // stages + 1
    message = nbytes / _bandwidth(span, in_node=in_node, hardware=hardware) + _latency(span, hardware=hardware)
    return 2 * (stages - 1) * message * (1 + work.forwards(layout) / stages)


def _products(layout: Layout, *, work: Workload) -> float:
    """Seconds of products with parameters in a micro-batch, of a mean stage."""
    tensor, dim, tokens = layout.tensor, work.dim, work.tokens(layout)
    keys = dim * work.kv_heads // work.heads
    hidden = _gate(work) * dim
    kind = GROUPED_PRODUCT if work.experts else PRODUCT
    again = 1 if layout.recompute == "full" else 0
    block = sum(
        count
        * _product(rows=tokens, columns=columns, inner=inner, kind=one, dtype=work.linear_dtype, again=again, work=work)
        for count, columns, inner, one in (
            (1, dim / tensor, dim, PRODUCT),
            (2, keys / tensor, dim, PRODUCT),
            (1, dim, dim / tensor, PRODUCT),
            (2, hidden / tensor, dim, kind),
            (1, dim, hidden / tensor, kind),
        )
    )
    head = _product(
        rows=tokens, columns=work.vocabulary / tensor, inner=dim, kind=PRODUCT, dtype=work.dtype, again=0, work=work
    )
    return (work.layers * block + head) / layout.pipeline


def _product(*, rows: float, columns: float, inner: float, kind: str, dtype: str, again: int, work: Workload) -> float:
    """Seconds of a product of a forward and of its two in the backward, with `again` more forwards."""
    shapes = [(rows, columns, inner)] * (1 + again) + [(rows, inner, columns), (columns, inner, rows)]
    flops = round(2 * rows * columns * inner)
    return sum(
        device_seconds(
            kind,
            flops=flops,
            nbytes=0,
            dtype=dtype,
            shape=(max(1, round(one)), max(1, round(other)), max(1, round(third))),
            hardware=work.hardware,
            peer=_OWN,
        )
        for one, other, third in shapes
    )


_OWN = Peer()


def _gate(work: Workload) -> float:
    """Hidden width of a block relative to its width, of the experts that a token uses."""
    weights = (work.linear_flops / 6 - work.vocabulary * work.dim) / (work.layers * work.dim**2)
    return max(0.0, (weights - 2 - 2 * work.kv_heads / work.heads) / 3)


def _rows(layout: Layout, *, work: Workload) -> float:
    """Seconds of a block's other operations in a micro-batch, which move bytes, of a mean stage."""
    hardware = work.hardware
    forward, backward = (
        norms + (rotary * (1 + work.kv_heads / work.heads) + gate * _gate(work)) / layout.tensor
        for norms, rotary, gate in zip(_NORMS, _ROTARY, _GATE, strict=True)
    )
    moved = forward * (1 if layout.recompute == "none" else 2) + backward
    elements = (
        moved * work.dim * work.layers / layout.pipeline + _LOSS * work.vocabulary / layout.tensor / layout.pipeline
    )
    nbytes = elements * work.tokens(layout) * work.parameter_bytes
    return nbytes / (hardware.memory_bandwidth * hardware.memory_share)


def _accumulated(layout: Layout, *, work: Workload) -> float:
    """Seconds in which a micro-batch adds its gradients to the sum of the others."""
    forwards, gradient, own = work.forwards(layout), work.gradient(layout), work.own(layout)
    if forwards == 1:
        return 0.0
    _, reduces = _passes(layout, work=work)
    if reduces == 1:  # all of them, on every rank
        nbytes = own * (work.parameter_bytes + 2 * gradient)
    else:  # into the buffer that is reduced; then its shard
        nbytes = own * (work.parameter_bytes + gradient) + 3 * gradient * work.shard(layout)
    return nbytes / (work.hardware.memory_bandwidth * work.hardware.memory_share)


def _wire_of_data(layout: Layout, *, work: Workload) -> tuple[float, float]:
    """Seconds of ZeRO's collectives, which overlap with computing, and of the same bytes inside a node, by which they delay it."""
    data = work.ranks // (layout.pipeline * layout.tensor)
    gathers, reduces = _passes(layout, work=work)
    nbytes = work.own(layout) * (work.parameter_bytes * gathers + work.gradient(layout) * reduces)
    wire, in_node = (
        _seconds(nbytes, size=data, span=span, layout=layout, hardware=work.hardware)
        for span in (data * layout.tensor, 1)
    )
    return wire, in_node


def _passes(layout: Layout, *, work: Workload) -> tuple[int, int]:
    """How often ZeRO gathers the parameters and reduces the gradients of a step. A pipeline does so once, if memory allows it."""
    forwards, own, is_pipeline = work.forwards(layout), work.own(layout), layout.pipeline > 1
    gathers = 1 if layout.stage < 3 else 2 * (1 if is_pipeline and own <= MAX_LIVE_PARAMETERS else forwards)
    reduces = 1 if layout.stage < 2 or (is_pipeline and own <= _LOCAL_GRADIENTS) else forwards
    return gathers, reduces


def _exposed(layout: Layout, *, work: Workload) -> float:
    """Seconds of collectives inside layers, which block computing."""
    forwards, hardware = work.forwards(layout), work.hardware
    activations = work.tokens(layout) * work.dim * work.parameter_bytes * forwards
    layers, passes = work.layers / layout.pipeline, 3 if layout.recompute == "full" else 2
    starts = passes * layers * forwards
    blocks = activations * passes * layers
    chosen = activations * passes * work.expert_choices / layout.pipeline
    collectives = (  # bytes, ranks, neighbours among which they are, starts
        (4 * blocks, layout.tensor, layout.tensor, 2 * starts),
        (4 * blocks, layout.sequence, layout.sequence * layout.tensor, 4 * starts),
        (2 * chosen, layout.expert, layout.expert * layout.tensor, 2 * starts),
    )
    seconds = sum(
        _seconds(nbytes, size=size, span=span, starts=count, layout=layout, hardware=hardware)
        for nbytes, size, span, count in collectives
    )
    return seconds + max(0.0, _ring(layout, work=work) - _attention(layout, work=work))


def _ring(layout: Layout, *, work: Workload) -> float:
    """Seconds of ring attention's transfers: keys and values once in the forward and twice in the backward, where their gradients travel
    along."""
    if layout.context == 1:
        return 0.0
    tokens = work.micro_batch * work.seq_len / layout.sequence  # of the ring
    width = work.dim / work.heads * work.kv_heads / layout.tensor
    passes = 4 if layout.recompute == "full" else 3
    nbytes = 2 * tokens * width * work.parameter_bytes * passes * work.forwards(layout) * work.layers / layout.pipeline
    span = layout.context * layout.sequence * layout.tensor
    return _seconds(nbytes, size=layout.context, span=span, layout=layout, hardware=work.hardware)


def _attention(layout: Layout, *, work: Workload) -> float:
    """Seconds of the products of queries, keys and values, with which the ring's transfers overlap. As `reached.device_seconds`."""
    hardware, length = work.hardware, work.seq_len / layout.context
    again = (
        4.5 / 3 if layout.recompute == "full" else 3.5 / 3
    )  # the backward has five products to the two of the forward
    flops = work.attention_flops * work.global_batch * work.seq_len / work.ranks * again
    causal = 0.5 if hardware.attention_share < 1 else 1.0
    share = hardware.attention_share * length / (length + hardware.attention_length)
    return flops * causal / (hardware.rate(work.dtype) * share)


def _seconds(nbytes: float, *, size: int, span: int, layout: Layout, hardware: Hardware, starts: float = 0.0) -> float:
    """Seconds of collectives among `size` ranks within `span` neighbours. starts: their number, if each delays computing."""
    if size == 1:
        return 0.0
    in_node = max(1, hardware.ranks_per_node // layout.tensor)
    moved = nbytes * (size - 1) / size / _bandwidth(span, in_node=in_node, hardware=hardware)
    return moved + starts * _latency(span, hardware=hardware)


def _bandwidth(span: int, *, in_node: int, hardware: Hardware) -> float:
    """Bytes per second of a group within `span` neighbours, `in_node` of them in each node."""
    bandwidth = hardware.link_bandwidth * hardware.link_share
    if span > hardware.ranks_per_node and hardware.network_bandwidth is not None:
        bandwidth = min(bandwidth, in_node * hardware.network_bandwidth * hardware.network_share)
    return bandwidth


def _latency(span: int, *, hardware: Hardware) -> float:
    """Seconds before a collective moves."""
    if span > hardware.ranks_per_node and hardware.network_latency is not None:
        return hardware.network_latency
    return hardware.link_latency
