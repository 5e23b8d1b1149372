"""LAMB over shards: the same bits at every stage and tier, and the arithmetic of its formula."""

from dataclasses import replace

import pytest
import torch

from tests.zero.models import WIDTH, Layout, batches, build, make_engine
from tests.zero.update.bits import check_bits
from ztk.checkpoint import load, save
from ztk.core.runtime import Process
from ztk.core.runtime.part import Part
from ztk.deepspeed.optimizers.own import FusedLamb
from ztk.optim import OptimizerPolicy

LAMB = OptimizerPolicy(name="lamb", lr=1e-2, weight_decay=0.1, decay_all=True, clip_grad_norm=0.5)
STEPS = 4  # one of them without a block


@pytest.mark.parametrize(("world", "dtype"), [(1, "fp32"), (2, "fp32"), (2, "bf16"), (2, "fp16"), (3, "fp32")])
def test_every_stage_and_tier_gives_the_same_bits(ranks, world, dtype):
    """Also after skipped steps. On three ranks shards end inside parameters."""
    check_bits(ranks, world=world, dtype=dtype, optimizer=LAMB, steps=STEPS)


def weights_after(process: Process, *, layout: Layout, steps: range, folder: str, saves: bool = False) -> dict:
    """Every rank trains on the same micro-batch, so that the mean over 1, 2 and 4 ranks is exact."""
    engine = make_engine(process, layout=layout, optimizer=replace(LAMB, clip_grad_norm=0.0))
    if steps.start:
        load(engine, path=folder)
    for tokens in list(batches(steps.stop, rank=0, world=1))[steps.start :]:
        engine.backward(engine(tokens))
        engine.step()
    if saves:
        save(engine, folder=folder)
    return {name: value.clone() for name, value in engine.zero.full_parameters()}


def by_the_class(steps: int) -> dict:
    model = build()
    optimizer = FusedLamb(model.parameters(), lr=1e-2, weight_decay=0.1)
    for tokens in batches(steps, rank=0, world=1):
        optimizer.zero_grad(set_to_none=False)
        model(tokens).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def test_it_is_deepspeeds_on_any_number_of_ranks_and_after_a_resume(ranks, tmp_path):
    """Compared with DeepSpeed's arithmetic on one process: four steps of roundings of 2^-24, which ratios up to 10 and cancellation in the sums
    widen to 2e-6."""
    folder = str(tmp_path)
    expected = by_the_class(4)
    ranks(2).run(weights_after, layout=Layout(stage=3), steps=range(2), folder=folder, saves=True)
    found = {
        "one rank": ranks(1).run(weights_after, layout=Layout(), steps=range(4), folder="")[0],
        "resumed on four": ranks(4).run(
            weights_after, layout=Layout(stage=2, offload="cpu"), steps=range(2, 4), folder=folder
        )[0],
    }
    for weights in found.values():
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=2e-6)
    moved = (expected["blocks.0.up.weight"] - build().blocks[0].up.weight).norm()
    assert moved > 5e-3 * expected["blocks.0.up.weight"].norm()  # the tolerance is a thousandth of that per element


def refusal(process: Process) -> None:
    with pytest.raises(ValueError, match="lamb takes norms of full parameters"):
        part = Part.cut((2 * WIDTH, 4 * WIDTH), dim=0, start=0, stop=WIDTH)
        make_engine(process, layout=Layout(), optimizer=LAMB, parts={"blocks.0.down.weight": part})


def test_parameters_that_are_cut_are_refused(ranks):
    ranks(1).run(refusal)
