"""Every layout equals one rank, and within a layout no memory strategy changes a bit."""

import dataclasses

import pytest

from tests.parallel.topology.runs import (
    CONFIG,
    Outcome,
    Strategy,
    arranged,
    make_engine,
    train,
    train_alone,
    train_step,
)
from ztk.checkpoint import load, save
from ztk.core.runtime import Tier, Topology
from ztk.parallel.tensor import TensorPolicy

# A sum split over ranks is rounded in another order: each of 20 steps may move a loss by a few fp32 units of 6e-8, which training
# amplifies; the bound, a hundred of them, holds with room.
RELATIVE = 1e-5

TENSOR2 = Topology(tensor=2)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
NORMS = {"tensor": TensorPolicy(sequence_parallel=True)}


@pytest.fixture(scope="module")
def reference(ranks) -> Outcome:
    return ranks(1).run(train_alone, strategy=Strategy())[0]


@pytest.mark.parametrize(
    ("world", "topology", "options"),
    [
        (2, TENSOR2, NORMS),
        (4, Topology(tensor=2, sequence=2), {}),
        (4, Topology(sequence=4), {}),
    ],
    ids=["tp2 sequence parallel", "tp2 sp2", "sp4"],
)
def test_losses_and_norms_equal_one_rank(ranks, reference, world, topology, options):
    strategy = Strategy(topology=topology, stage=2, options=options)
    outcomes = ranks(world).run(train, strategy=strategy)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(reference.losses, rel=RELATIVE)
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=RELATIVE)
        assert outcome.parameters == reference.parameters
    assert reference.losses[-1] < reference.losses[0]


@pytest.mark.parametrize("topology", [Topology(tensor=2), Topology(sequence=2)], ids=["tp2_dp2", "sp2_dp2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])  # fp32: test_matrix.py
def test_within_a_layout_no_stage_and_no_tier_changes_a_bit(ranks, topology, dtype):
    digests = {}
    for stage, offload in ((0, "none"), (2, "cpu"), (3, "nvme")):
        strategy = Strategy(topology=topology, stage=stage, offload=offload, dtype=dtype)
        digests[stage, offload] = [outcome.digest for outcome in ranks(4).run(train, strategy=strategy, steps=6)]
    assert all(digest == digests[0, "none"] for digest in digests.values()), digests


def test_8_bit_states_follow_the_same_rule(ranks):
    digests = []
    for stage, offload in ((0, "none"), (2, "cpu"), (3, "nvme")):
        strategy = Strategy(topology=TENSOR2, stage=stage, offload=offload, dtype="bf16", states="8bit")
        outcomes = ranks(4).run(train, strategy=strategy, steps=3)
        assert outcomes[0].losses[-1] < outcomes[0].losses[0]
        digests.append([outcome.digest for outcome in outcomes])
    assert digests[0] == digests[1] == digests[2]


def device_peak(process, *, strategy: Strategy) -> int:
    """The peak of this rank's device bytes over two steps."""
    engine = make_engine(arranged(process, topology=strategy.topology), strategy=strategy)
    for step in range(2):
        train_step(engine, step=step)
    peak = engine.memory.peak(Tier.device)
    engine.close()
    return peak


@pytest.mark.parametrize("topology", [Topology(sequence=2), Topology(context=2)], ids=["sp2", "cp2"])
def test_ranks_that_share_a_sequence_gather_no_more_than_replicas(ranks, topology):
    narrow = {"prefetch_bucket_size": 0}  # one unit at a time: a gather before its use is visible
    replicas = ranks(2).run(device_peak, strategy=Strategy(stage=3, zero=narrow))
    assert ranks(2).run(device_peak, strategy=Strategy(topology=topology, stage=3, zero=narrow)) == replicas


def embeddings(process, *, strategy: Strategy, steps: int) -> bytes:
    """Bits of the tied embedding on this rank after `steps`."""
    engine = make_engine(arranged(process, topology=strategy.topology), strategy=strategy, config=TIED)
    for step in range(steps):
        train_step(engine, step=step)
    weights = {name: value.clone() for name, value in engine.zero.full_parameters()}
    return weights["embedding.weight"].float().numpy().tobytes()


def test_copies_of_a_parameter_stay_equal_when_they_are_rounded_stochastically(ranks):
    options = {"accumulation_steps": 2}
    strategy = Strategy(topology=Topology(pipeline=2), dtype="bf16", states="8bit", options=options)
    first, last = ranks(2).run(embeddings, strategy=strategy, steps=4)
    assert first == last


def saved(process, *, strategy: Strategy, folder: str) -> list[float]:
    """Losses of the steps after a checkpoint."""
    engine = make_engine(arranged(process, topology=strategy.topology), strategy=strategy)
    train_step(engine, step=0)
    save(engine, folder=folder)
    return [train_step(engine, step=step) for step in range(1, 3)]


def resumed(process, *, strategy: Strategy, folder: str) -> tuple[tuple[str, ...], list[float]]:
    """The notes of a load, and the losses after it."""
    engine = make_engine(arranged(process, topology=strategy.topology), strategy=strategy)
    return load(engine, path=folder).notes, [train_step(engine, step=step) for step in range(1, 3)]


def test_8_bit_states_resume_with_the_same_bits_unless_parameters_are_cut_otherwise(ranks, tmp_path):
    strategy = Strategy(topology=TENSOR2, stage=2, dtype="bf16", states="8bit")
    straight = ranks(2).run(saved, strategy=strategy, folder=str(tmp_path))[0]
    again = dataclasses.replace(strategy, stage=1, offload="cpu", seed=4)
    assert ranks(2).run(resumed, strategy=again, folder=str(tmp_path))[0] == ((), straight)
    uncut = dataclasses.replace(again, topology=Topology())
    (note,), losses = ranks(2).run(resumed, strategy=uncut, folder=str(tmp_path))[0]
    assert "groups of 32 8-bit states" in note and losses == pytest.approx(straight, rel=1e-2)
