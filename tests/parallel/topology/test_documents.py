"""Packed documents give the results of separate documents on every layout; no stage and no tier changes a bit."""

import hashlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.topology.runs import CONFIG, Strategy, alone, arranged, make_engine
from ztk.core.runtime import Process, Topology
from ztk.data import Share, TokenStream
from ztk.data.borders import IGNORED
from ztk.experiments.streams import model_call
from ztk.nn import Decoder, Documents, initialise
from ztk.parallel.pipeline import MicroBatch, PipelinePolicy
from ztk.parallel.recompute import RecomputeMode, RecomputePolicy
from ztk.parallel.tensor import TensorPolicy

END = 0
LENGTH, SEQUENCES, STEPS = 16, 8, 3
# fp32 sums in another order: attention over a document alone has other block sizes than over a packed row, about 10 units of 6e-8 in a
# loss, which a few steps of training amplify; see tests/parallel/topology/test_layouts.py.
RELATIVE = 1e-5
EXPERTS = replace(
    CONFIG, experts=4, experts_per_token=2, expert_hidden_dim=24, balance_loss_weight=0.0, router_z_loss_weight=0.0
)
FULL = {"recompute": RecomputePolicy(mode=RecomputeMode.full)}
STAGES = {"pipeline": PipelinePolicy(schedule="1f1b"), "accumulation_steps": 2}


def tokens() -> torch.Tensor:
    """Something that can be learnt, a document of 7 tokens on average."""
    generator = torch.Generator().manual_seed(5)
    counted = 1 + 5 * torch.arange(2000) % (CONFIG.vocab_size - 1)
    return torch.where(torch.rand(2000, generator=generator) < 1 / 7, END, counted).to(torch.int32)


def stream(*, rank: int, world_size: int, parts: int) -> TokenStream:
    most = -(-SEQUENCES // (world_size * parts))
    share = Share(micro_batch=most, accumulation_steps=parts, rank=rank, world_size=world_size, global_batch=SEQUENCES)
    return TokenStream(tokens(), seq_len=LENGTH, share=share, seed=1, end=END)


def train(process: Process, *, strategy: Strategy, config=CONFIG) -> tuple[list[float], list[float], str]:
    """Losses over all ranks, gradient norms, and a digest of both and of this rank's weights."""
    placed = arranged(process, topology=strategy.topology)
    engine = make_engine(placed, strategy=strategy, config=config)
    mesh, parts = placed.mesh, engine.accumulation_steps
    read = stream(rank=mesh.replica, world_size=mesh.replicas, parts=parts)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = engine.train_batch(
            model_call(read.next_batch(), takes_batches=False, device=process.device) for _ in range(parts)
        )
        losses.append(float(engine.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
        norms.append(engine.read_metrics().grad_norm)
    bits = hashlib.sha256(torch.tensor(losses + norms).numpy().tobytes())
    for _, value in engine.zero.full_parameters():
        bits.update(value.float().contiguous().numpy().tobytes())
    engine.close()
    return losses, norms, bits.hexdigest()


def train_alone(process: Process, *, config=CONFIG) -> tuple[list[float], list[float], str]:
    return train(alone(process), strategy=Strategy(), config=config)


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_loss_and_gradients_equal_separate_documents(config):
    model = initialise(Decoder(config), seed=3)
    batch = stream(rank=0, world_size=1, parts=1).next_batch()
    documents = Documents.at(batch.positions)
    model(batch.tokens, batch.targets, documents).backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, counted = torch.zeros(()), (batch.targets != IGNORED).sum()
    sizes = documents.cu_seqlens.diff().tolist()
    assert len(sizes) > 2 * SEQUENCES and max(sizes) > 8
    for row, target in zip(batch.tokens.flatten().split(sizes), batch.targets.flatten().split(sizes), strict=True):
        logits = model(row[None])[0]
        total = total + F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
    (total / counted).backward()
    for name, parameter in model.named_parameters():
        largest = parameter.grad.abs().max()
        torch.testing.assert_close(packed[name], parameter.grad, rtol=0, atol=float(RELATIVE * largest), msg=name)


@pytest.fixture(scope="module")
def reference(ranks):
    return {config: ranks(1).run(train_alone, config=config)[0] for config in (CONFIG, EXPERTS)}


@pytest.mark.parametrize(
    ("world", "topology", "options", "config"),
    [
        (2, Topology(), {"accumulation_steps": 3}, CONFIG),
        (2, Topology(tensor=2), {"tensor": TensorPolicy(sequence_parallel=True)} | FULL, CONFIG),
        (2, Topology(pipeline=2), STAGES | FULL, CONFIG),
        (4, Topology(sequence=2, tensor=2), FULL, CONFIG),
        (4, Topology(pipeline=2, sequence=2), STAGES, CONFIG),
        (2, Topology(expert=2), {"recompute": RecomputePolicy(mode=RecomputeMode.selective)}, EXPERTS),
        (4, Topology(context=4), FULL, CONFIG),
        (4, Topology(context=2, pipeline=2), STAGES, CONFIG),
        (4, Topology(context=2, sequence=2), {}, CONFIG),
    ],
    ids=[
        "dp2",
        "tp2 sequence parallel full",
        "pp2 full",
        "tp2 sp2 full",
        "pp2 sp2",
        "ep2 selective",
        "cp4 full",
        "pp2 cp2",
        "cp2 sp2",
    ],
)
def test_layouts_compute_the_same(ranks, reference, world, topology, options, config):
    strategy = Strategy(topology=topology, stage=1, options=options)
    losses, norms, _ = reference[config]
    for found in ranks(world).run(train, strategy=strategy, config=config):
        assert found[0] == pytest.approx(losses, rel=RELATIVE)
        assert found[1] == pytest.approx(norms, rel=RELATIVE)
    assert losses[-1] < losses[0]


def test_no_stage_and_no_tier_changes_a_bit(ranks):
    digests = set()
    for stage, offload in ((0, "none"), (2, "cpu"), (3, "nvme")):
        strategy = Strategy(stage=stage, offload=offload, dtype="bf16")
        digests.add(tuple(found[2] for found in ranks(2).run(train, strategy=strategy)))
    assert len(digests) == 1


def without_documents(process: Process) -> str:
    placed = arranged(process, topology=Topology(pipeline=2))
    engine = make_engine(placed, strategy=Strategy(topology=Topology(pipeline=2), options=STAGES))
    read = stream(rank=0, world_size=1, parts=2)
    batches = [model_call(read.next_batch(), takes_batches=False, device=process.device) for _ in range(2)]
    if process.rank:
        batches = [MicroBatch(args=batch.args[:2]) for batch in batches]
    try:
        engine.train_batch(batches)
    except ValueError as error:
        return str(error)
    return ""


def test_a_stage_without_the_documents_is_refused(ranks):
    assert all("pass the same micro-batches on all ranks" in said for said in ranks(2).run(without_documents))
