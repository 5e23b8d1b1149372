"""Experts sharded over ranks train like one rank, with the same bits under every stage and tier; bytes on the wire."""

import functools
import math
import os
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.parallel.moe.runs import BATCH, CONFIG, LENGTH, Expert, Run, train
from tests.ranks import RankFailed
from ztk.core.runtime import Topology
from ztk.parallel.moe import MoE, shard_experts
from ztk.parallel.pipeline import PipelinePolicy
from ztk.parallel.recompute import RecomputePolicy
from ztk.parallel.tensor import TensorPolicy

ONE, EP2, EP4 = Topology(), Topology(expert=2), Topology(expert=4)
LAYOUTS = {"dp2": (2, ONE), "ep2": (2, EP2), "ep2_dp2": (4, EP2), "ep4": (4, EP4)}


@functools.cache
def one_rank(ranks, kind: str, **options) -> Run:
    return ranks(1).run(train, topology=ONE, kind=kind, **options)[0]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("dp2", "decoder"), ("ep2", "decoder"), ("ep2", "layers"), ("ep2_dp2", "decoder"), ("ep4", "layers")],
)
def test_fp32_equals_the_one_rank_run(ranks, layout, kind):
    """20 steps: losses within 1e-5. The error of a norm is the error of the gradients: 1e-7 per step of drift, times 20, times the condition of
    clipped steps; measured 2e-6, allowed 2e-5. The decoder's balance is counted over all ranks, so it is equal too."""
    world, topology = LAYOUTS[layout]
    alone = one_rank(ranks, kind)
    assert alone.losses[-1] < 0.7 * alone.losses[0] and max(alone.norms) > 0.5, "it learns, and clipping acts"
    for run in ranks(world).run(train, topology=topology, kind=kind, stage=3):
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(alone.losses), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(alone.norms), rtol=2e-5, atol=0)
        assert run.module_metrics["moe.balance_loss"] == pytest.approx(
            alone.module_metrics["moe.balance_loss"], abs=0.2
        )


@pytest.mark.parametrize(
    ("layout", "kind", "dtype", "strategies"),
    [
        ("ep2", "decoder", "fp32", [(0, "cpu"), (1, "none"), (1, "nvme"), (2, "cpu"), (3, "none"), (3, "cpu")]),
        ("ep2", "layers", "fp32", [(1, "cpu"), (2, "none"), (3, "nvme")]),
        ("ep2", "decoder", "bf16", [(2, "none"), (3, "nvme")]),
        ("ep2", "decoder", "fp16", [(2, "nvme"), (3, "cpu")]),
        ("ep2_dp2", "decoder", "fp32", [(2, "none"), (3, "nvme")]),
        ("ep2_dp2", "layers", "bf16", [(3, "none")]),
    ],
)
def test_stages_and_tiers_give_the_same_bits(ranks, layout, kind, dtype, strategies):
    world, topology = LAYOUTS[layout]
    options = {"topology": topology, "kind": kind, "dtype": dtype, "steps": 5}
    expected = ranks(world).run(train, **options)[0]
    for stage, offload in strategies:
        runs = ranks(world).run(train, stage=stage, offload=offload, **options)
        assert runs[0].digest == expected.digest, (stage, offload)
        assert all(run.losses == expected.losses for run in runs)
        assert all(repr(run.norms) == repr(expected.norms) for run in runs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_runs_stay_near_the_one_rank_run(ranks, dtype):
    """bf16 keeps 8 bits: a loss of 4 is known to 1.6e-2, and rounding differs where tokens reach their expert in another order. Neither run
    overflows at the loss scale: a rank's gradients are of its own mean, so they are larger than one rank's."""
    alone = one_rank(ranks, "decoder", dtype=dtype, loss_scale=256.0)
    run = ranks(2).run(train, topology=EP2, dtype=dtype, stage=3, loss_scale=256.0)[0]
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(alone.losses), rtol=4e-2, atol=0)
    assert run.skipped == alone.skipped


def test_gradients_add_up_over_micro_batches(ranks):
    alone = one_rank(ranks, "decoder", accumulation_steps=2, steps=6)
    run = ranks(2).run(train, topology=EP2, stage=3, accumulation_steps=2, steps=6)[0]
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(alone.losses), rtol=1e-5, atol=0)


def test_bytes_equal_two_all_to_alls_per_layer_and_direction(ranks):
    """Each choice's row of C numbers is sent to its expert and back, and so is its gradient: 4 T k C elements per layer and step."""
    steps, item = 5, 4
    runs = ranks(2).run(train, topology=EP2, steps=steps)
    rows = BATCH * LENGTH * CONFIG.experts_per_token
    assert sum(run.bytes["all_to_all"] for run in runs) == steps * 4 * rows * CONFIG.dim * item
    assert all(run.calls["all_to_all"] == steps * 4 for run in runs)

    layers = ranks(2).run(train, topology=EP2, kind="layers", steps=steps)
    capacity = math.ceil(BATCH * LENGTH / 2 / 4 * (4.0 * 2))  # tokens of a rank / experts * factor * k
    for run in layers:
        assert run.bytes["all_to_all"] == steps * 2 * 4 * 4 * capacity * 16 * item
        assert run.calls["all_to_all"] == steps * 2 * 4


def test_a_rank_holds_its_share_of_the_experts(ranks):
    """Stage 0: a rank holds all parameters except the other ranks' experts. Stage 3: states shard over the ranks with the same experts."""
    run, other = ranks(2).run(train, topology=EP2, steps=1)
    experts = 3 * CONFIG.dim * CONFIG.expert_hidden_dim
    assert sum(weight.numel() for weight in run.weights.values()) == CONFIG.parameter_count() - 2 * experts
    assert run.weights["blocks.1.mlp.experts.gate"].shape == (2, CONFIG.dim, CONFIG.expert_hidden_dim)
    full = one_rank(ranks, "decoder", steps=1).weights["blocks.1.mlp.experts.down"]
    halves = [part.weights["blocks.1.mlp.experts.down"] for part in (run, other)]
    torch.testing.assert_close(torch.cat(halves), full, rtol=1e-5, atol=1e-6)

    modules = ranks(2).run(train, topology=EP2, kind="layers", steps=1)
    names = [{name.split(".")[3] for name in part.weights if ".experts." in name} for part in modules]
    assert names == [{"0", "1"}, {"2", "3"}], "expert 3 is experts.3 on whichever rank has it"

    spread = ranks(4).run(train, topology=EP2, steps=1, stage=3)
    held = sum(part.memory["device"]["optimizer"] for part in spread)
    # exp_avg and exp_avg_sq in fp32; buckets are padded to 128 elements per shard, of which there are at most 2 per 2000 parameters.
    assert 8 * CONFIG.parameter_count() <= held <= 1.2 * 8 * CONFIG.parameter_count()


def unbalanced(process, *, topology, kind="decoder", stage=0):
    """Every token chooses the experts 0 and 1, whatever it is: rank 1 of the expert axis gets none."""
    import tests.parallel.moe.runs as runs

    def favour(model, **arguments):
        def values(*, name, start, stop):
            if name.endswith("router.weight"):
                return torch.zeros(stop - start)  # ties go to the lower number
            return initial(name=name, start=start, stop=stop)

        initial = arguments.pop("initial_values")
        engine = original(model, initial_values=values, **arguments)
        for name, parameter in engine.module.named_parameters():
            if name.endswith("router.weight"):
                parameter.register_hook(torch.zeros_like)
        return engine

    original, runs.parallelize = runs.parallelize, favour
    try:
        return runs.train(process, topology=topology, kind=kind, stage=stage, steps=4)
    finally:
        runs.parallelize = original


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (4, 3)])
def test_ranks_whose_experts_get_no_token_keep_step(ranks, world, stage):
    """Their gradients are zero and all ranks still take part in the collectives."""
    (alone,) = ranks(1).run(unbalanced, topology=ONE)
    assert alone.module_metrics["moe.load"]["blocks.1.mlp"] == [0.5, 0.5, 0.0, 0.0]
    runs = ranks(world).run(unbalanced, topology=EP2, stage=stage)
    torch.testing.assert_close(torch.tensor(runs[0].losses), torch.tensor(alone.losses), rtol=1e-5, atol=0)
    idle = runs[1].weights["blocks.1.mlp.experts.up"]
    torch.testing.assert_close(idle, alone.weights["blocks.1.mlp.experts.up"][2:], rtol=1e-5, atol=1e-7)


def dies_on_the_way(process) -> None:
    process = process.arrange(EP2)
    axis = process.mesh.comm("ep")

    def before(label: str) -> None:
        if process.rank == 1 and "from experts back" in label:
            os._exit(9)

    axis.before = before
    import tests.parallel.moe.runs as runs

    arranged = type("Arranged", (), {"arrange": lambda self, topology: process})()
    runs.train(arranged, topology=EP2, steps=3)


def test_a_rank_that_dies_in_an_all_to_all_ends_the_others_at_once():
    from tests.ranks import RankPool

    pool = RankPool(2)
    pool.run(_nothing)
    start = time.perf_counter()
    with pytest.raises(RankFailed, match=r"rank 1 (is gone|died)"):
        pool.run(dies_on_the_way)
    assert time.perf_counter() - start < 15
    pool.close()


def _nothing(process) -> None:
    """The ranks are up."""


def refused(process, *, topology: Topology, kind: str, changes: dict) -> str:
    with pytest.raises(ValueError) as caught:
        train(process, topology=topology, kind=kind, steps=1, config=replace(CONFIG, **changes))
    return str(caught.value)


def test_what_cannot_be_spread_is_refused(ranks):
    pool = ranks(2)
    (text, _) = pool.run(refused, topology=EP2, kind="decoder", changes={"experts": 5})
    assert "topology.expert=2: blocks.1.mlp has 5 experts, not a multiple; use topology.expert=1" in text
    (text, _) = pool.run(refused, topology=EP2, kind="decoder", changes={"experts": 0})
    assert "the model has no layer whose experts could be spread; use topology.expert=1" in text


CUT = replace(CONFIG, kv_heads=2, layers=4)  # for axes that need two key heads, or two stages with experts each


@pytest.mark.parametrize(
    ("world", "topology", "more"),
    [
        (4, Topology(tensor=2, expert=2), {"stage": 2}),
        (4, Topology(tensor=2, expert=2), {"stage": 3, "tensor": TensorPolicy(sequence_parallel=True)}),
        (2, Topology(tensor=2), {"stage": 1, "tensor": TensorPolicy(sequence_parallel=True)}),
        (2, Topology(sequence=2, expert=2), {"stage": 3, "offload": "cpu"}),
        (4, Topology(pipeline=2, expert=2), {"stage": 3, "offload": "nvme"}),
        (4, Topology(pipeline=2, expert=2), {"stage": 1, "pipeline": PipelinePolicy(schedule="zero_bubble")}),
        (2, EP2, {"stage": 3, "recompute": RecomputePolicy(mode="full")}),
    ],
    ids=[
        *("tp2_ep2", "tp2_ep2 sequence parallel", "tp2 sequence parallel", "sp2_ep2", "pp2_ep2", "pp2_ep2 zero bubble"),
        "ep2 recomputed",
    ],
)
def test_experts_go_with_every_other_axis(ranks, world, topology, more):
    """Losses, norms and the balance as on one rank: the router's losses take into account that ranks hold parts of the same tokens."""
    alone = one_rank(ranks, "decoder", config=CUT, accumulation_steps=2, steps=5)
    for run in ranks(world).run(train, topology=topology, config=CUT, accumulation_steps=2, steps=5, **more):
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(alone.losses), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(alone.norms), rtol=2e-5, atol=0)
        assert run.module_metrics["moe.balance_loss"] == pytest.approx(
            alone.module_metrics["moe.balance_loss"], rel=1e-5
        )
        assert set(run.module_metrics["moe.load"]) == {"blocks.1.mlp", "blocks.3.mlp"}


def saves(process, *, kind: str, folder: str) -> list[float]:
    return train(process, topology=EP2, kind=kind, stage=3, offload="cpu", steps=6, save_after=(3, folder)).losses[3:]


@pytest.mark.parametrize("kind", ["decoder", "layers"])
def test_checkpoints_of_spread_experts_load_where_they_are_spread_otherwise(ranks, tmp_path, kind):
    """Saved by four ranks with two of each expert, continued on one rank and on two."""
    rest = ranks(4).run(saves, kind=kind, folder=str(tmp_path))[0]
    for world, topology in ((1, ONE), (2, EP2)):
        run = ranks(world).run(train, topology=topology, kind=kind, stage=2, steps=6, resume=str(tmp_path))[0]
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(rest), rtol=1e-5, atol=0)


def chance(process, *, topology: Topology) -> list[torch.Tensor]:
    """Results of layers with random choices on the same tokens, on ranks whose generators differ."""
    mesh = process.arrange(topology).mesh
    torch.manual_seed(3)
    layers = nn.ModuleList(
        MoE(16, Expert(16), num_experts=4, capacity_factor=0.5, **options)
        for options in ({"k": 1, "noisy_gate_policy": "RSample"}, {"k": 1, "noisy_gate_policy": "Jitter"}, {"k": 2})
    )
    shard_experts(layers, mesh=mesh)
    x = torch.randn(64, 16)
    torch.manual_seed(process.rank)
    return [layer(x)[0].detach() for layer in layers]


def test_tensor_ranks_draw_the_same_numbers(ranks):
    """Random selection, sampled choices and jitter are those that the first tensor rank would draw alone."""
    first, second = ranks(2).run(chance, topology=Topology(tensor=2))
    (alone,) = ranks(1).run(chance, topology=ONE)
    for own, other, expected in zip(first, second, alone, strict=True):
        assert torch.equal(own, other) and torch.equal(own, expected)
