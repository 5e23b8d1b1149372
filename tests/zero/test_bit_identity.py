"""A memory strategy never changes a number: losses, gradient norms and weights have the same bits at every stage and tier."""

import functools
import itertools

import pytest
import torch

from tests.zero.models import DTYPES, Layout, Run, batches, build, train
from ztk.optim import OptimizerPolicy

TIERS = ("none", "cpu", "nvme")
STEPS = 6  # two rounds of the parameter that only some steps use
LAYOUTS = [Layout(stage=stage, offload=offload) for stage in range(4) for offload in TIERS]
LAYOUTS += [Layout(stage=3, offload=a, parameters=b) for a, b in itertools.permutations(TIERS, 2)]


@functools.cache
def baseline(ranks, dtype: str) -> Run:
    return ranks.run(train, layout=LAYOUTS[0], dtype=dtype, steps=STEPS)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [2, 4])
def test_every_stage_and_tier_gives_the_same_bits(ranks, world, dtype, pytestconfig):
    """Every layout in one of the precisions, by turns; with --slow on 2 ranks in each."""
    pool = ranks(world)
    first = baseline(pool, dtype)
    assert first.losses[-1] < first.losses[0]
    assert (first.skipped > 0) == (dtype == "fp16")
    turn = list(DTYPES).index(dtype)
    is_complete = world == 2 and pytestconfig.getoption("--slow")
    for layout in LAYOUTS[1:] if is_complete else LAYOUTS[1 + turn :: len(DTYPES)]:
        runs = pool.run(train, layout=layout, dtype=dtype, steps=STEPS)
        for run in runs:
            assert run.losses == first.losses, layout.id
            assert repr(run.grad_norms) == repr(first.grad_norms), layout.id  # repr: an overflow's norm is NaN
            assert run.digest == first.digest, layout.id


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp32_equals_a_plain_loop(ranks, world):
    """One process, undivided batches, torch's own AdamW and clipping: within 1e-5 relative over 20 steps."""
    model = build()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for step in range(20):
        *_, parts = zip(*(batches(step + 1, rank=rank, world=world) for rank in range(world)), strict=True)
        loss = sum(model(tokens, use_all=step % 3 != 1) for tokens in parts) / world
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    run = ranks(world).run(train, layout=Layout(stage=3))[0]
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(losses), rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_overflow_skips_on_all_ranks_alike(ranks, stage):
    """The scale starts too high for the first steps; every rank skips the same ones and none is harmed."""
    runs = ranks(2).run(train, layout=Layout(stage=stage), dtype="fp16")
    assert runs[0].skipped == runs[1].skipped > 0
    assert runs[0].digest == runs[1].digest


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_persistent_parameters_change_nothing(ranks, offload):
    """Biases and norms stay full at stage 3; with the same option, stage 0 has the same layout and sums."""
    zero = {"param_persistence_threshold": 110, "bucket_size": 10**6}
    first = ranks(2).run(train, layout=Layout(stage=0, zero=zero))[0]
    kept = ranks(2).run(train, layout=Layout(stage=3, offload=offload, zero=zero))
    assert kept[0].digest == kept[1].digest == first.digest
    assert kept[0].memory["device"]["parameters"] > 0


OPTIMIZERS = {
    "adam": OptimizerPolicy(name="adam", lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5),
    "sgd": OptimizerPolicy(name="sgd", lr=1e-2, clip_grad_norm=0.5),
    "momentum": OptimizerPolicy(name="sgd", lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": OptimizerPolicy(name="lion", lr=1e-3, weight_decay=0.1, clip_grad_norm=0.5),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_same_bits(ranks, name, dtype):
    """The optimizers have different numbers of states; plain SGD in fp32 has none."""
    first = ranks(2).run(train, layout=Layout(stage=0), dtype=dtype, steps=6, optimizer=OPTIMIZERS[name])[0]
    assert first.losses[-1] < first.losses[0]
    for layout in (Layout(stage=1, offload="cpu"), Layout(stage=2), Layout(stage=3), Layout(stage=3, offload="nvme")):
        run = ranks(2).run(train, layout=layout, dtype=dtype, steps=6, optimizer=OPTIMIZERS[name])[0]
        assert run.digest == first.digest, layout.id
