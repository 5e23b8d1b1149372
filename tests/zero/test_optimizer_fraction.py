"""`offload.optimizer_fraction`: part of the optimizer states stays on the device, and no bit of the training changes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoint.runs import canonical, digest, full_weights
from tests.core.streams.model import modelled
from tests.planner.measure import Case, planned
from tests.planner.test_plan import FAST_LINKS
from tests.zero.models import DTYPES, Layout, batches, make_engine, train
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.offload import PAGE_BYTES
from ztk.core.runtime import Process, Tier
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import _devices_of_states
from ztk.zero.offload import OffloadPolicy

LAYOUTS = [Layout(stage=stage, offload=tier, fraction=0.5) for stage in (1, 2, 3) for tier in ("cpu", "nvme")]
LAYOUTS += [Layout(stage=0, offload="cpu", fraction=0.7), Layout(stage=3, offload="cpu", fraction=0.0)]
LAYOUTS += [Layout(stage=3, offload="cpu", parameters="none", fraction=0.3)]
LAYOUTS += [Layout(stage=3, offload="none", parameters="cpu"), Layout(stage=3, offload="nvme", fraction=0.8)]
CLIPPED = {"weight_decay": 0.1, "clip_grad_norm": 0.5}
OPTIMIZERS = {
    "adamw 8bit": {"optimizer": OptimizerPolicy(lr=1e-2, states="8bit", **CLIPPED), "dtype": "bf16"},
    "muon": {"optimizer": OptimizerPolicy(name="muon", lr=1e-2, **CLIPPED)},
    "lamb": {"optimizer": OptimizerPolicy(name="lamb", lr=1e-2, **CLIPPED)},
    "adamw with an average": {"ema": EmaPolicy(decay=0.9)},
    "adamw with an average in main memory": {"ema": EmaPolicy(decay=0.9, offload=Tier.cpu)},
    "skips unused": {"optimizer": OptimizerPolicy(lr=1e-2, skip_unused=True, **CLIPPED)},
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_stage_and_tier_gives_the_bits_of_no_offload(ranks, dtype):
    """With clipping, unused parameters, and an overflow in fp16. The layouts take turns over the precisions."""
    first = ranks(2).run(train, layout=Layout(), dtype=dtype, steps=6)[0]
    assert (first.skipped > 0) == (dtype == "fp16")
    for layout in LAYOUTS[list(DTYPES).index(dtype) :: 3]:
        for run in ranks(2).run(train, layout=layout, dtype=dtype, steps=6):
            assert run.digest == first.digest and repr(run.grad_norms) == repr(first.grad_norms), layout.id


def states(process: Process, *, layouts: list[Layout], **options) -> list[tuple[str, str]]:
    found = []
    for layout in layouts:
        engine = make_engine(process, layout=layout, **options)
        for number, tokens in enumerate(batches(5, rank=process.rank, world=process.world_size)):
            engine.backward(engine(tokens, use_all=number % 3 != 1))
            engine.step()
        found.append((digest(canonical(engine)), full_weights(engine)))
        engine.close()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_and_averages_keep_their_bits(ranks, name):
    chosen = [Layout(), Layout(stage=1, offload="cpu", fraction=0.5), Layout(stage=3, offload="nvme", fraction=0.4)]
    first, *others = ranks(2).run(states, layouts=chosen, **OPTIMIZERS[name])[0]
    assert others == [first] * len(others)


def booked(process: Process, *, layout: Layout) -> tuple[dict[str, int], list[tuple[str, list[int]]]]:
    """Bytes of optimizer states by tier; tier of every bucket and elements of its pieces, in the order of use."""
    engine = make_engine(process, layout=layout, dtype="bf16")
    buckets = sorted(engine.zero.buckets, key=lambda bucket: bucket.traits.unit != "root")
    rows = [
        (bucket.pieces[0].stores.optimizer.tier.label, [piece.numel for piece in bucket.pieces]) for bucket in buckets
    ]
    memory = {tier.label: engine.memory.by_category(tier).get("optimizer", 0) for tier in Tier}
    engine.close()
    return memory, rows


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_on_each_tier_are_those_of_the_buckets_there(ranks, stage):
    """12 bytes an element, in a file whole pages of each piece. The first buckets in the order of use stay, as many as there is room for."""
    for tier, place, unit in (("cpu", "host", 1), ("nvme", "nvme", PAGE_BYTES)):
        for memory, rows in ranks(2).run(booked, layout=Layout(stage=stage, offload=tier, fraction=0.6)):
            kept, away = ([numels for of, numels in rows if of == where] for where in ("device", place))
            assert len(kept) + len(away) == len(rows)
            assert memory["device"] == 12 * sum(map(sum, kept)) > 0
            assert memory[place] == sum(-(-12 * numel // unit) * unit for numels in away for numel in numels) > 0
            room, stays = 0.4 * sum(map(sum, kept + away)), 0
            for of, numels in rows:
                assert (of == "device") == (stays + sum(numels) <= room)
                stays += sum(numels) * (of == "device")


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_plan_books_the_split_and_orders_its_copies(tmp_path, tier):
    """On the model of streams of a GPU: no use of memory without an order, and none that mixes memories."""
    for stage in (0, 1, 2, 3):
        case = Case(ranks=2, stage=stage, offload=tier, parameters=tier if stage == 3 else "none", dtype="bf16")
        with modelled() as model:
            plan = planned(replace(case, fraction=0.5), folder=str(tmp_path))
        assert model.checked and not model.races
        state = plan.classes[0].state
        kept, away = (state[place].get("optimizer", 0) for place in ("device", "host" if tier == "cpu" else "nvme"))
        assert 0 < kept <= away


def test_a_planned_step_is_faster_the_more_states_stay(tmp_path):
    slow_host = replace(FAST_LINKS, host_bandwidth=1e8)
    for stage in (1, 3):
        case = Case(ranks=2, stage=stage, offload="cpu", dtype="bf16")
        plans = [
            planned(replace(case, fraction=part), folder=str(tmp_path), hardware=slow_host) for part in (1.0, 0.5, 0.0)
        ]
        seconds = [plan.time.seconds for plan in plans]
        assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 3


def test_a_torch_optimizer_is_tried_where_its_states_are():
    gpu, host = torch.device("cuda", 0), torch.device("cpu")
    found = {
        (tier, fraction): _devices_of_states(
            OffloadPolicy(optimizer=tier, optimizer_fraction=fraction), process=SimpleNamespace(device=gpu)
        )
        for tier, fraction in (("none", 1.0), ("cpu", 1.0), ("cpu", 0.5), ("cpu", 0.0))
    }
    assert list(found.values()) == [[gpu], [host], [gpu, host], [gpu]]


def test_a_value_outside_of_the_range_is_refused():
    for value in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="offload.optimizer_fraction=.*: must be 0 or more and at most 1"):
            OffloadPolicy(optimizer="cpu", optimizer_fraction=value)
