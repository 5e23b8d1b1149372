"""Pipelines train like one rank, under every schedule, ZeRO stage and tier.

Tolerance 1e-5 relative over 20 steps in fp32: layouts add up the same numbers in another order, eps is 6e-8, and Adam's first steps,
whose update is a sign, carry a difference of one rounding in a near-zero gradient into the weights at most `lr` large; clipping
keeps gradients at 0.5. Runs without a difference in order must agree in every bit.
"""

import math
import os
import time
from pathlib import Path

import pytest
import torch

from tests.parallel.pipeline.models import (
    BATCH,
    DECODER,
    GLOBAL_BATCH,
    LENGTH,
    Layout,
    Run,
    build_engine,
    decoder,
    micro_batches,
    train,
)
from tests.ranks import RankFailed, RankPool
from ztk.core.runtime import PeerLost, Topology
from ztk.parallel.pipeline import LayerSpec, MicroBatch, PipelineModule
from ztk.parallel.recompute import RecomputePolicy

TWO, FOUR = Topology(pipeline=2), Topology(pipeline=4)
ACTIVATION = BATCH * LENGTH * DECODER.dim * 4  # bytes in fp32


@pytest.fixture(scope="module")
def alone(ranks):
    """The results of one rank, by the model's options."""
    runs: dict[tuple, Run] = {}

    def run(*, steps: int, **fields) -> Run:
        key = (steps, *sorted(fields.items()))
        if key not in runs:
            (runs[key],) = ranks(1).run(train, layout=Layout(**fields), steps=steps)
        return runs[key]

    return run


def check_equal(runs: list[Run], *, expected: Run, relative: float) -> None:
    """Losses (of all replicas together), norms, held-out loss and all weights, each stage's where it lies."""
    losses = torch.tensor([run.losses for run in runs]).mean(0)  # every rank of a replica has its loss
    torch.testing.assert_close(losses, torch.tensor(expected.losses), rtol=relative, atol=0)
    validation = sum(run.validation for run in runs) / len(runs)
    assert math.isclose(validation, expected.validation, rel_tol=relative)
    for run in runs:
        torch.testing.assert_close(
            torch.tensor(run.grad_norms), torch.tensor(expected.grad_norms), rtol=2 * relative, atol=0
        )
        for name, weight in run.weights.items():
            error = (weight - expected.weights[name]).norm() / expected.weights[name].norm()
            assert error <= relative, (name, float(error))
    assert {name for run in runs for name in run.weights} == set(expected.weights)


def same_bits(runs: list[Run], others: list[Run]) -> None:
    for run, other in zip(runs, others, strict=True):
        assert run.losses == other.losses
        assert run.grad_norms == other.grad_norms
        assert all(torch.equal(weight, other.weights[name]) for name, weight in run.weights.items())


@pytest.mark.parametrize("topology", [TWO, FOUR], ids=["pp2", "pp4"])
def test_twenty_steps_equal_one_rank(ranks, alone, topology):
    runs = ranks(topology.pipeline).run(train, layout=Layout(topology=topology), steps=20)
    check_equal(runs, expected=alone(steps=20), relative=1e-5)
    each = 20 * GLOBAL_BATCH * ACTIVATION  # one activation per boundary and micro-batch forwards, one gradient back
    last = topology.pipeline - 1
    assert [run.bytes["send"] for run in runs] == [each * ((r < last) + (r > 0)) for r in range(topology.pipeline)]


def test_schedules_change_the_order_alone(ranks, alone):
    """Zero-bubble computes the same products later, and GPipe and 1F1B add up in the same order: equal bits. Interleaving divides the layers
    differently."""
    pool = ranks(2)
    base = pool.run(train, layout=Layout(topology=TWO), steps=3)
    for schedule in ("gpipe", "zero_bubble"):
        same_bits(pool.run(train, layout=Layout(topology=TWO, schedule=schedule), steps=3), base)
    interleaved = Layout(topology=TWO, schedule="interleaved", virtual_stages=2)
    runs = pool.run(train, layout=interleaved, steps=3)
    check_equal(runs, expected=alone(steps=3), relative=1e-5)
    assert [run.bytes["send"] for run in runs] == [3 * GLOBAL_BATCH * ACTIVATION * 3] * 2


def test_stages_and_tiers_agree_in_every_bit(ranks, alone, tmp_path):
    """pp2 x dp2: gradients add up locally and are reduced once, whatever the stage."""
    pool = ranks(4)
    base = pool.run(train, layout=Layout(topology=TWO), steps=2)
    check_equal(base, expected=alone(steps=2), relative=1e-5)
    for stage, offload in ((0, "cpu"), (1, "nvme"), (2, "none"), (2, "cpu"), (3, "none"), (3, "nvme")):
        layout = Layout(topology=TWO, stage=stage, offload=offload)
        same_bits(pool.run(train, layout=layout, steps=2, folder=str(tmp_path)), base)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
def test_stage_3_gathers_once_a_batch_as_far_as_memory_allows(ranks, alone, schedule):
    """Kept: every bucket once a step. Not kept, and gradients reduced per micro-batch: for each forward and each backward."""
    fields = {
        "topology": TWO,
        "schedule": schedule,
        "virtual_stages": 2 if schedule == "interleaved" else 1,
        "stage": 3,
    }
    kept = ranks(4).run(train, layout=Layout(**fields), steps=2)
    tight = {"zero": {"max_live_parameters": 0}, "pipeline": {"max_local_gradients": 0}}
    dropped = ranks(4).run(train, layout=Layout(**fields, **tight), steps=2)
    for runs in (kept, dropped):
        check_equal(runs, expected=alone(steps=2), relative=1e-5)
    m = GLOBAL_BATCH // 2
    for few, many in zip(kept, dropped, strict=True):
        assert many.bytes["reduce_scatter"] == m * few.bytes["reduce_scatter"]
        assert many.bytes["all_gather"] > m * few.bytes["all_gather"]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("topology", [TWO, FOUR], ids=["pp2-dp2", "pp4"])
def test_a_tied_head_has_one_gradient(ranks, alone, topology, stage):
    runs = ranks(4).run(train, layout=Layout(topology=topology, tied=True, stage=stage), steps=3)
    check_equal(runs, expected=alone(steps=3, tied=True), relative=1e-5)
    first, last = runs[0], runs[-1]
    assert torch.equal(first.weights["embedding.weight"], last.weights["embedding.weight"])
    assert "head.weight" not in last.weights


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_layers_that_pass_tuples_and_share_a_module(ranks, alone, schedule):
    expected = alone(steps=3, model="layers")
    for world in (2, 4):
        layout = Layout(topology=Topology(pipeline=world), model="layers", schedule=schedule, partition="uniform")
        check_equal(ranks(world).run(train, layout=layout, steps=3), expected=expected, relative=1e-5)


@pytest.mark.parametrize(("dtype", "relative"), [("bf16", 2**-7), ("fp16", 2**-9)])
def test_half_precision(ranks, alone, dtype, relative):
    """Activations are sent in 16 bit: only the order of sums differs, by one rounding of the type's eps."""
    expected = alone(steps=3, dtype=dtype)
    runs = ranks(2).run(train, layout=Layout(topology=TWO, dtype=dtype, stage=3), steps=3)
    assert [run.skipped for run in runs] == [expected.skipped] * 2
    losses = torch.tensor(runs[0].losses)
    torch.testing.assert_close(losses, torch.tensor(expected.losses), rtol=relative, atol=0)


def looked_at(process) -> tuple[torch.Tensor, list[str], float]:
    """Logits of a pipeline on every rank, recomputation inside stages, and refusals."""
    model, more = decoder(DECODER)
    recompute = RecomputePolicy(mode="full")
    engine = build_engine(process, layout=Layout(topology=TWO), model=model, recompute=recompute, **more)
    batches = micro_batches(0, replica=0, replicas=1)
    with engine.evaluating():
        logits = engine(batches[0][0])
    loss = float(engine.train_batch(batches))
    errors = []
    calls = [lambda: engine.train_batch(batches[:2]), lambda: engine.backward(torch.zeros(()))]
    if engine.is_last_stage:
        calls.append(lambda: MicroBatch.of(batches[0][0]).weigh(logits))
    for call in calls:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
    return logits, errors, loss


def test_logits_recomputation_and_refusals(ranks, alone):
    (first, errors, loss), (second, last_errors, _) = ranks(2).run(looked_at)
    assert torch.equal(first, second)
    assert first.shape == (BATCH, LENGTH, DECODER.vocab_size)
    assert "got 2 micro-batches and needs 8" in errors[0]
    assert "train_batch" in errors[1]
    assert "must return its loss" in last_errors[2]
    assert math.isclose(loss, alone(steps=3).losses[0], rel_tol=1e-6)


def dying(process, *, folder: str) -> None:
    """Rank 2 of 4 ends in the middle of a batch; the others write down their errors and the seconds until they appear."""
    model, more = decoder(DECODER)
    engine = build_engine(process, layout=Layout(topology=FOUR), model=model, **more)
    death = Path(folder, "death")
    if process.rank == 2:
        seen = []

        def before(label: str) -> None:
            seen.append(label)
            if len(seen) == 9:
                death.write_text(str(time.monotonic()))
                os._exit(7)

        engine.process.mesh.comm("pp").before = before
    try:
        engine.train_batch(micro_batches(0, replica=0, replicas=1))
    except PeerLost as error:
        waited = time.monotonic() - float(death.read_text())
        Path(folder, f"rank{process.rank}").write_text(f"{waited} {error}")
        raise
    finally:
        if process.rank != 2:
            os._exit(1)  # as the worker does: all connections to this rank close


def test_a_rank_that_dies_ends_the_run_in_seconds(tmp_path):
    """The neighbours of the dead rank detect it at once, and the other ranks follow in milliseconds. A loaded machine gets five seconds."""
    pool = RankPool(4)
    try:
        with pytest.raises(RankFailed, match="died"):
            pool.run(dying, folder=str(tmp_path))
    finally:
        pool.close()
    for rank in (0, 1, 3):
        waited, _, message = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert float(waited) < 5
        assert "is gone" in message


def lengths(process, *, dynamic: bool) -> list:
    """Micro-batches of two lengths in one batch, another in the evaluation; a model that changes shapes by itself."""
    layout = Layout(topology=TWO if process.world_size == 2 else Topology(), pipeline={"dynamic_shapes": dynamic})
    model, more = decoder(DECODER)
    engine = build_engine(process, layout=layout, model=model, **more)
    full = micro_batches(0, replica=0, replicas=1)
    mixed = [tuple(part[:, : 6 + index % 2] for part in batch) for index, batch in enumerate(full)]
    losses = [float(engine.train_batch(batches)) for batches in (mixed, full, mixed[::-1])]
    losses.append(float(engine.eval_batch([tuple(part[:, :3] for part in batch) for batch in full[:3]])))
    return losses


@pytest.mark.parametrize("dynamic", [False, True])
def test_micro_batches_may_have_different_shapes(ranks, dynamic):
    (expected,) = ranks(1).run(lengths, dynamic=False)
    for found in ranks(2).run(lengths, dynamic=dynamic):
        assert found == pytest.approx(expected, rel=1e-5)


def shrinking(x: torch.Tensor) -> torch.Tensor:
    """A layer whose output's shape depends on values."""
    return x[:, : 1 + int(x.sum() > 0)]


def capricious(process, *, dynamic: bool) -> float:
    model = PipelineModule(
        [shrinking, LayerSpec(torch.nn.Linear, 4, 4), LayerSpec(torch.nn.Linear, 4, 4)],
        loss_fn=lambda outputs, labels: (outputs.sum() - labels).square(),
    )
    layout = Layout(topology=TWO, pipeline={"dynamic_shapes": dynamic}, partition="type:linear")
    engine = build_engine(process, layout=layout, model=model)
    inputs = [torch.full((3, 2, 4), float((-1) ** index)) for index in range(GLOBAL_BATCH)]
    return float(engine.train_batch([(row, torch.zeros(())) for row in inputs]))


def test_shapes_that_depend_on_values_must_be_announced(ranks):
    first, second = ranks(2).run(capricious, dynamic=True)
    assert first == second
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match=r"output of pipeline stage 0 changed .*dynamic_shapes=True"):
            pool.run(capricious, dynamic=False)
    finally:
        pool.close()


def poisoned(process) -> list[str]:
    """Stage 0's last gradient and stage 1's first are NaN; (the named parameter, stage 0's)."""
    model, more = decoder(DECODER)
    engine = build_engine(process, layout=Layout(topology=TWO, stage=2), model=model, **more)
    own = dict(engine.module.named_parameters())
    names = list(own) if engine.is_last_stage else [*reversed(own)]
    own[names[0]].register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError) as caught:
        engine.train_batch(micro_batches(0, replica=0, replicas=1))
        engine.close()
    return [str(caught.value), names[0]]


def test_the_first_stages_parameter_is_named(ranks):
    """Its number among its rank's parameters is higher than the other parameter's."""
    (text, first), (other, _) = ranks(2).run(poisoned)
    assert f"the gradient of {first} is not finite" in text and text == other
