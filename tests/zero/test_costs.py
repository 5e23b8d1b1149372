"""The costs of strategies by arithmetic: bytes of model state per rank and tier, elements on the wire per step.

P is the number of elements of all buckets, padding included. ZeRO paper, sections 5 and 7.
"""

import tempfile
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.zero.models import DTYPES, Block, Layout, Run, build, train
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Tier
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy

PAGE = 4096


def expected_memory(*, stage: int, offload: str, dtype: str, padded: int, world: int) -> dict[str, dict[str, int]]:
    """Parameters and gradients of 2 or 4 bytes; optimizer states of 12 bytes with the fp32 master weights, 8 where an fp32
    parameter is its own master (not on NVMe, and not if the parameter stays on the device while its states leave)."""
    itemsize = DTYPES[dtype].itemsize
    sharded = world > 1 or offload != "none"
    optimizer = 12 * padded // (world if stage >= 1 else 1)
    where = {"none": "device", "cpu": "host", "nvme": "nvme"}[offload]
    together = stage == 3 or offload == "none"
    if dtype == "fp32" and where != "nvme" and together:
        optimizer = optimizer // 12 * 8
    memory: dict[str, dict[str, int]] = {"device": {}, "host": {}, "nvme": {}}
    memory[where]["optimizer"] = optimizer
    memory[where if stage >= 2 else "device"]["gradients"] = itemsize * padded // (world if stage >= 2 else 1)
    memory[where if stage == 3 and sharded else "device"]["parameters"] = (
        itemsize * padded // (world if stage == 3 else 1)
    )
    return memory


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_model_state_follows_the_formula(ranks, world, stage, offload, dtype):
    run = ranks(world).run(train, layout=Layout(stage=stage, offload=offload), dtype=dtype, steps=2)[0]
    expected = expected_memory(stage=stage, offload=offload, dtype=dtype, padded=run.padded, world=world)
    for tier, categories in expected.items():
        for category, nbytes in categories.items():
            found = run.memory[tier].get(category, 0)
            slack = PAGE * 40 if tier == "nvme" else 0  # each of at most 40 slots ends on a page
            assert nbytes <= found <= nbytes + slack, (tier, category)
    for category in ("parameters", "gradients", "optimizer"):
        tiers = [tier for tier in expected if category in run.memory[tier]]
        assert tiers == [tier for tier in expected if category in expected[tier]], category


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_communication_is_two_or_three_times_the_parameters(ranks, world, stage):
    steps = 5
    layout = Layout(stage=stage, zero={"bucket_size": 10**6})  # one bucket per unit, so the backward reads every bucket
    run = ranks(world).run(train, layout=layout, steps=steps, plain=True)[0]
    moved = {kind: elements for kind, elements in run.elements.items() if kind != "scalars"}
    p = run.padded * steps
    assert (
        moved
        == {
            0: {"all_reduce": 2 * p},
            1: {"reduce_scatter": p, "all_gather": p},
            2: {"reduce_scatter": p, "all_gather": p},
            3: {"reduce_scatter": p, "all_gather": 2 * p},
        }[stage]
    )


def test_what_the_backward_does_not_read_is_not_gathered_again(ranks):
    """With small buckets the biases stand alone; a linear layer's backward does not need its bias."""
    run = ranks(2).run(train, layout=Layout(stage=3), steps=5, plain=True)[0]
    assert run.elements["reduce_scatter"] == 5 * run.padded
    assert run.elements["all_gather"] < 2 * 5 * run.padded


def test_reuse_and_persistence_save_gathers(ranks):
    """max_reuse_distance keeps units that are used again soon; persistent parameters are gathered once per step, after the update."""
    steps = 5
    plain = ranks(2).run(train, layout=Layout(stage=3), steps=steps, plain=True)[0]
    zero = {"max_reuse_distance": 10**9, "max_live_parameters": 10**9}
    kept = ranks(2).run(train, layout=Layout(stage=3, zero=zero), steps=steps, plain=True)[0]
    assert kept.digest == plain.digest
    backward = plain.elements["all_gather"] - steps * plain.padded
    saved = plain.elements["all_gather"] - kept.elements["all_gather"]
    assert saved == backward * (steps - 1) // steps  # the first step has no forecast yet
    bounded = ranks(2).run(train, layout=Layout(stage=3, zero={"max_reuse_distance": 4000}), steps=steps, plain=True)[0]
    assert bounded.digest == plain.digest
    assert kept.elements["all_gather"] < bounded.elements["all_gather"] < plain.elements["all_gather"]


def test_live_parameters_are_bounded(ranks):
    """Without prefetching and with a small bound, two gathered buckets at most exist at one time (the root's and a unit's)."""
    layout = {"prefetch_bucket_size": 0, "max_live_parameters": 0}
    lean = ranks(2).run(train, layout=Layout(stage=3, zero=layout), steps=3, plain=True)[0]
    layout = {"prefetch_bucket_size": 50_000_000, "max_live_parameters": 10**9}
    eager = ranks(2).run(train, layout=Layout(stage=3, zero=layout), steps=3, plain=True)[0]
    assert lean.digest == eager.digest
    assert lean.memory["device"]["gathered"] < eager.memory["device"]["gathered"] / 2


def test_prefetching_follows_the_size_of_the_model(ranks):
    """A fixed 50,000,000 elements gather all of a small model at once; a sixteenth of it is one bucket ahead. The bits stay."""
    fixed, follows = (
        ranks(2).run(
            train, layout=Layout(stage=3, zero={"bucket_size": 10**6, "prefetch_bucket_size": ahead}), steps=3
        )[0]
        for ahead in (50_000_000, None)
    )
    assert follows.digest == fixed.digest
    assert follows.memory["device"]["gathered"] < fixed.memory["device"]["gathered"]


def live_run(process, *, live: int | None, ahead: int) -> Run:
    """Of a deep model whose units would all stay gathered."""
    model = build()
    model.blocks = nn.ModuleList(Block(odd=0) for _ in range(12))
    zero = {
        "bucket_size": 10**6,
        "prefetch_bucket_size": ahead,
        "max_reuse_distance": 10**9,
        "max_live_parameters": live,
    }
    return train(process, layout=Layout(stage=3, zero=zero), steps=3, plain=True, model=model)


def test_live_parameters_follow_the_size_of_the_model(ranks):
    """DeepSpeed's 1,000,000,000 elements keep all of a small model. By default no more than half stays in addition to the unit in use, and
    requested prefetches have room. The bits are equal."""
    fixed, follows, ahead = (
        ranks(2).run(live_run, live=live, ahead=ahead)[0] for live, ahead in ((10**9, 0), (None, 0), (None, 10**6))
    )
    assert fixed.digest == follows.digest == ahead.digest
    all_of_it, half, on_request = (run.memory["device"]["gathered"] for run in (fixed, follows, ahead))
    assert all_of_it == on_request >= 4 * fixed.padded
    assert all_of_it / 4 < half <= all_of_it * (1 / 2 + 1 / 12)


def passing_bytes(process, *, layers: int) -> int:
    """Bytes of full gradients that stage 2 holds at one time, after a few steps of a deep model."""
    model = build()
    model.blocks = nn.ModuleList(Block(odd=0) for _ in range(layers))
    run = train(process, layout=Layout(stage=2, zero={"bucket_size": 10**6}), steps=3, plain=True, model=model)
    return run.memory["device"]["gradients in flight"]


def test_gradients_in_flight_do_not_grow_with_depth(ranks):
    """They are reduced during the backward, also the embedding's, which complete last."""
    shallow, deep = (ranks(2).run(passing_bytes, layers=layers)[0] for layers in (6, 12))
    assert shallow == deep


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisk:
    """pool: host bytes. written: over the steps. gradients: bytes of their slots."""

    pool: int
    written: int
    gradients: int


def on_disk(process, *, width: int, buffer_count: int, steps: int = 1) -> OnDisk:
    """Four linear layers whose states and parameters are stored on NVMe."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    policy = OffloadPolicy(
        optimizer="nvme", parameters="nvme", nvme_path=tempfile.mkdtemp(), buffer_count=buffer_count, threads=1
    )
    engine = parallelize(model, process=process, optimizer=OptimizerPolicy(), zero=ZeroPolicy(stage=3), offload=policy)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, width)).square().mean())
        engine.step()
    gradients = engine.memory.by_category(Tier.nvme)["gradients"]
    engine.close()
    return OnDisk(pool=engine.memory.peak(Tier.host), written=engine.io.write_bytes, gradients=gradients)


def test_a_small_model_does_not_reserve_a_large_pool(ranks):
    """Five buffers and one block, each as large as a unit's shard with its states and some padding; 32 MiB each otherwise."""
    shard = 12 * 256 * 256 // 2
    pool = ranks(2).run(on_disk, width=256, buffer_count=5)[0].pool
    assert 6 * shard <= pool <= 6 * (shard + 12 * 4096 + PAGE)


def test_gradients_are_written_only_where_the_pool_has_no_room(ranks):
    """Three buffers are a pipeline's; half of three more holds the four layers' gradients, which are a third of a layer's states each."""
    lean, kept = (ranks(2).run(on_disk, width=256, buffer_count=count, steps=3)[0] for count in (3, 3 + 3))
    assert lean.written - kept.written == 3 * lean.gradients > 0
