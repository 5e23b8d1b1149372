"""Ring attention equals one rank's results, at the formula's volume, with every other axis and memory strategy."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from tests.parallel.topology.runs import CONFIG, Outcome, Strategy, alone, arranged, make_engine, train, train_alone
from ztk.core.runtime import Mesh, Process, Topology
from ztk.kernels import attention, set_backend
from ztk.parallel.pipeline import PipelinePolicy
from ztk.parallel.recompute import RecomputeMode, RecomputePolicy, selective
from ztk.parallel.sequence import ring
from ztk.parallel.sequence.cut import Parts
from ztk.parallel.sequence.ring import ring_attention
from ztk.parallel.tensor import TensorPolicy

# Two blocks' results are merged with a handful of fp32 roundings of 6e-8 each, in another order than one kernel sums: a few units in outputs
# and gradients of size 1. The bound is a hundred of them; see tests/parallel/topology/test_layouts.py for losses.
ABSOLUTE = RELATIVE = 1e-5
FULL = {"recompute": RecomputePolicy(mode=RecomputeMode.full)}
SELECTIVE = {"recompute": RecomputePolicy(mode=RecomputeMode.selective)}
NORMS = {"tensor": TensorPolicy(sequence_parallel=True)}
STAGES = {"pipeline": PipelinePolicy(schedule="1f1b"), "accumulation_steps": 2}


def qkv(*, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query of 4 heads, key and value of 2, and a gradient of the output, [2, T, heads, 16]."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]


def parts_of(mesh: Mesh) -> Parts:
    return Parts(context=mesh.comm("cp"), heads=mesh.comm("sp"), further=1, has_experts=False, last_position=10**6)


def by_reference(process: Process, *, length: int) -> dict:
    """`around` by the definition in torch instead of kernels."""
    set_backend("reference")
    try:
        return around(process, length=length, window=0)
    finally:
        set_backend("auto")


def around(process: Process, *, length: int, window: int, dtype: torch.dtype = torch.float32) -> dict:
    """Output and gradients of this rank's tokens, their positions, and the number of sent bytes."""
    mesh = arranged(process, topology=Topology(context=process.world_size)).mesh
    comm, parts = mesh.comm("cp"), parts_of(mesh)
    places = parts.positions(parts.padded(length), device=process.device)
    padded = [
        torch.cat([x, torch.ones_like(x[:, :1]).expand(-1, parts.padded(length) - length, -1, -1)], 1)
        for x in qkv(length=length, dtype=dtype)
    ]
    query, key, value, d_out = (x[:, places].clone() for x in padded)
    d_out[:, places >= length] = 0  # padding's outputs have no loss
    for x in (query, key, value):
        x.requires_grad_()
    out = ring_attention(query, key=key, value=value, comm=comm, label="test", window=window)
    forward = dict(comm.counters.elements)
    out.backward(d_out)
    backward = {kind: count - forward.get(kind, 0) for kind, count in comm.counters.elements.items()}
    return {
        "places": places,
        "found": [x.detach() for x in (out, query.grad, key.grad, value.grad)],
        "sent": (forward, backward),
        "bytes": comm.counters.bytes["ring"],
    }


@pytest.mark.parametrize("world,length", [(2, 37), (3, 40), (4, 64)])
@pytest.mark.parametrize("window", [0, 1, 5, 11, 23, 1000])
def test_output_and_gradients_equal_one_rank(ranks, world, length, window):
    query, key, value, d_out = qkv(length=length, dtype=torch.float32)
    for x in (query, key, value):
        x.requires_grad_()
    out = attention(query, key, value, window=window)
    out.backward(d_out)
    expected = [out.detach(), query.grad, key.grad, value.grad]
    for rank in ranks(world).run(around, length=length, window=window):
        real = rank["places"] < length
        for found, full in zip(rank["found"], expected, strict=True):
            torch.testing.assert_close(found[:, real], full[:, rank["places"][real]], rtol=0, atol=ABSOLUTE)


def test_the_reference_backend_computes_the_same(ranks):
    kernels, reference = ranks(2).run(around, length=37, window=0), ranks(2).run(by_reference, length=37)
    for one, other in zip(kernels, reference, strict=True):
        real = one["places"] < 37
        for found, expected in zip(one["found"], other["found"], strict=True):
            torch.testing.assert_close(found[:, real], expected[:, real], rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize("world", [2, 4])
def test_the_volume_is_that_of_the_formula(ranks, world):
    n = 2 * (64 // world) * 2 * 16  # B (T / N) K D
    for rank in ranks(world).run(around, length=64, window=0, dtype=torch.bfloat16):
        assert rank["sent"] == ({"ring": 2 * n * (world - 1)}, {"ring": 4 * n * (world - 1)})
        assert rank["bytes"] == 24 * n * (world - 1)  # in fp32 on the CPU, 16 with 16-bit keys on a GPU


def test_results_have_the_same_bits_every_time(ranks):
    first, second = (ranks(3).run(around, length=40, window=11) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["found"], other["found"], strict=True))


def order_of(process: Process) -> list[str]:
    """A rank's sends and computations in a forward and a backward, one word each."""
    comm, events = arranged(process, topology=Topology(context=process.world_size)).mesh.comm("cp"), []

    def noted(name, function):
        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("attention_block", "attention_block_backward"):
            stack.enter_context(mock.patch.object(ring, name, noted("computes", getattr(ring, name))))
        stack.enter_context(mock.patch.object(comm, "pass_on", noted("posts", comm.pass_on)))
        query, key, value, d_out = (x[:, :8] for x in qkv(length=8 * process.world_size, dtype=torch.float32))
        for x in (query, key, value):
            x.requires_grad_()
        ring_attention(query, key=key, value=value, comm=comm, label="order").backward(d_out)
    return events


def test_exchanges_are_posted_before_the_rank_computes_and_all_ranks_compute_equally_much(ranks):
    own, other = ["computes"] * 3, ["computes"] * 2
    forward = ["posts", *own, "posts", *other, "posts", *other, *other]
    backward = [
        "posts",
        *own,
        "posts",
        *other,
        "posts",
        "posts",
        *other,
        "posts",
        *other,
        "posts",
    ]  # each block's gradients behind it
    assert ranks(4).run(order_of) == [forward + backward] * 4


@pytest.fixture(scope="module")
def reference(ranks) -> Outcome:
    return ranks(1).run(train_alone, strategy=Strategy(), steps=6)[0]


@pytest.mark.parametrize(
    ("world", "topology", "options"),
    [
        (2, Topology(context=2), FULL),
        (2, Topology(context=2), SELECTIVE),
        (4, Topology(context=4), {}),
        (4, Topology(context=2, sequence=2), {}),
        (4, Topology(context=2, tensor=2), NORMS),
        (4, Topology(context=2, pipeline=2), STAGES),
    ],
    ids=["cp2 full", "cp2 selective", "cp4", "cp2 sp2", "tp2 cp2 sequence parallel", "pp2 cp2"],
)
def test_losses_and_norms_equal_one_rank(ranks, reference, world, topology, options):
    strategy = Strategy(topology=topology, stage=2, options=options)
    for outcome in ranks(world).run(train, strategy=strategy, steps=6):
        assert outcome.losses == pytest.approx(reference.losses, rel=RELATIVE)
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=RELATIVE)
    assert reference.losses[-1] < reference.losses[0]


def test_no_stage_and_no_tier_changes_a_bit(ranks):
    digests = set()
    for stage, offload in ((0, "none"), (2, "cpu"), (3, "nvme")):
        strategy = Strategy(topology=Topology(context=2), stage=stage, offload=offload, dtype="bf16")
        digests.add(tuple(outcome.digest for outcome in ranks(2).run(train, strategy=strategy, steps=3)))
    assert len(digests) == 1


def odd(process: Process, *, length: int, topology: Topology, options: dict) -> tuple[float, float]:
    """Loss and gradient norm of one step on sequences of any length."""
    placed = arranged(process, topology=topology) if process.world_size > 1 else alone(process)
    engine = make_engine(placed, strategy=Strategy(topology=topology, options=options))
    tokens = (torch.arange(4)[:, None] * 7 + 5 * torch.arange(length + 1)) % CONFIG.vocab_size
    targets = tokens[:, 1:].clone()
    targets[1, : length // 2] = -100  # unevenly, too
    batches = zip(
        tokens[:, :-1].chunk(engine.accumulation_steps), targets.chunk(engine.accumulation_steps), strict=True
    )
    loss = engine.train_batch(list(batches))
    mean = float(engine.comm.gather_scalars(loss.detach().view(1), label="loss").mean())
    norm = engine.read_metrics().grad_norm
    engine.close()
    return mean, norm


@pytest.mark.parametrize(
    "length", [1, 21, 32]
)  # 32: the longest that the tables of positions have; padding lies behind
def test_a_sequence_may_have_any_length(ranks, length):
    [expected] = ranks(1).run(odd, length=length, topology=Topology(), options={})
    for found in ranks(3).run(odd, length=length, topology=Topology(context=3), options={}):
        assert found == pytest.approx(expected, rel=RELATIVE)


def refusal(process: Process, *, topology: Topology) -> str:
    """The error of a sequence that is longer than the tables of positions, whose parts are not."""
    engine = make_engine(arranged(process, topology=topology), strategy=Strategy(topology=topology))
    tokens = torch.zeros(4, CONFIG.max_seq_len + 2, dtype=torch.int64)
    try:
        engine(tokens, tokens)
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("topology", [Topology(context=2), Topology(sequence=2)], ids=["cp2", "sp2"])
def test_a_sequence_longer_than_the_positions_is_refused(ranks, topology):
    for message in ranks(2).run(refusal, topology=topology):
        assert "34 tokens in a sequence, model.max_seq_len=32" in message


def saved_bytes(process: Process) -> int:
    """Bytes that a forward keeps for the backward, parameters aside."""
    topology = Topology(context=process.world_size)
    placed = arranged(process, topology=topology) if process.world_size > 1 else alone(process)
    engine = make_engine(placed, strategy=Strategy(topology=topology))
    tokens = torch.arange(96).view(1, 96)[:, :32] % CONFIG.vocab_size
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(tokens, tokens)
    del loss
    engine.close()
    return sum(kept.values())


def kept_selectively(process: Process) -> list[int]:
    """Elements that were exchanged by a step, and results of attention that selective recomputation keeps of its forward."""
    placed = arranged(process, topology=Topology(context=process.world_size))
    engine = make_engine(placed, strategy=Strategy(topology=placed.mesh.topology, options=SELECTIVE))
    chosen = []

    def noted(ctx, operator, *args, **kwargs):
        chosen.append(str(operator))
        return choose(ctx, operator, *args, **kwargs)

    choose = selective.choose
    tokens = torch.arange(64).view(2, 32) % CONFIG.vocab_size
    with mock.patch.object(selective, "choose", noted):
        engine.train_batch([(tokens, tokens)])
    engine.close()
    return [placed.mesh.comm("cp").counters.elements["ring"], sum("attention" in name for name in chosen), len(chosen)]


def test_selective_recomputation_repeats_the_ring_and_keeps_products_alone(ranks):
    n = 2 * (32 // 2) * 2 * 8 * CONFIG.layers  # B (T / N) K D
    for exchanged, attentions, others in ranks(2).run(kept_selectively):
        assert exchanged == (2 + 2 + 4) * n  # forward, its repetition, backward
        assert attentions == 0 and others > 0


def test_what_a_forward_keeps_falls_with_the_ranks(ranks):
    one, two, four = (ranks(world).run(saved_bytes)[0] for world in (1, 2, 4))
    assert two < 0.6 * one and four < 0.35 * one  # the tables of positions and numbers per step stay
