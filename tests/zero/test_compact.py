"""AdamW with smaller states: the same bits at every stage and tier, the kept bytes, and losses compared with fp32."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from tests.slow.test_states import FORMATS, VOCAB, Format, chain, final, losses
from tests.zero.models import Layout, batches, make_engine, train
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.tier import StateKind
from ztk.core.runtime import Tier
from ztk.optim import OptimizerPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """dtype: of the parameters. kept: bytes per parameter of states, without the parameter; with its master weight and without."""

    states: str
    master: str | None
    dtype: str
    kept: tuple[float, float]

    @property
    def id(self) -> str:
        return f"{self.states}-{self.master or 'default'}-{self.dtype}"

    @property
    def options(self) -> dict:
        policy = OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5, states=self.states, rounding_seed=5)
        return {"dtype": self.dtype, "master": self.master, "optimizer": policy}


CHOICES = (
    Choice(states="bf16", master=None, dtype="fp32", kept=(8, 4)),
    Choice(states="bf16", master="fp32", dtype="bf16", kept=(8, 8)),
    Choice(states="bf16", master="fp32", dtype="fp16", kept=(8, 8)),
    Choice(states="bf16", master="stochastic", dtype="bf16", kept=(6, 4)),
    Choice(states="8bit", master=None, dtype="bf16", kept=(5.125, 3.125)),
)
LAYOUTS = (
    Layout(stage=1),
    Layout(stage=1, offload="cpu"),
    Layout(stage=2, offload="nvme"),
    Layout(stage=3),
    Layout(stage=3, offload="cpu"),
    Layout(stage=3, offload="nvme"),
    Layout(stage=3, offload="cpu", parameters="none"),
    Layout(stage=3, offload="nvme", parameters="cpu"),
)
NUM_BUCKETS = 16  # of the model with buckets of 2000 elements, at most


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.id)
def test_every_stage_and_tier_gives_the_same_bits(ranks, choice):
    """The bits of rounding are drawn by an element's position in the model, and 32 elements that share a scale are always the same 32."""
    first = ranks(2).run(train, layout=Layout(stage=0), steps=6, **choice.options)[0]
    assert first.losses[-1] < first.losses[0]
    for layout in LAYOUTS:
        runs = ranks(2).run(train, layout=layout, steps=6, **choice.options)
        for run in runs:
            assert run.losses == first.losses, layout.id
            assert run.digest == first.digest, layout.id


@pytest.mark.parametrize("choice", [CHOICES[1], *CHOICES[3:]], ids=lambda choice: choice.id)
def test_buckets_of_any_size_give_the_same_bits(ranks, choice):
    """Launches and pieces begin at other elements. Clipping is off, because the norm is summed per bucket."""
    options = choice.options
    options["optimizer"] = replace(options["optimizer"], clip_grad_norm=0.0)
    first = ranks(2).run(train, layout=Layout(stage=0), steps=4, **options)[0]
    for layout in (
        Layout(stage=3, offload="nvme", zero={"bucket_size": 10**6}),
        Layout(stage=2, zero={"bucket_size": 300}),
        Layout(stage=3, offload="cpu", zero={"param_persistence_threshold": 110}),
    ):
        assert ranks(2).run(train, layout=layout, steps=4, **options)[0].digest == first.digest, layout


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.id)
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_bytes_that_are_kept(ranks, choice, offload):
    """Per parameter with padding, at stage 3 on one tier: a parameter of the master weights' dtype is its own, on NVMe only in bf16. A row
    per 32 elements fills up to 64 bytes in each of the pieces, and NVMe reserves pages of 4096 bytes per piece."""
    run = ranks(2).run(train, layout=Layout(stage=3, offload=offload), steps=1, **choice.options)[0]
    own_master = choice.kept[1] if not (offload == "nvme" and choice.dtype == "fp32") else choice.kept[0]
    found = run.memory[{"none": "device", "cpu": "host", "nvme": "nvme"}[offload]]["optimizer"]
    per_rank = own_master * run.padded / 2
    pieces = NUM_BUCKETS
    spare = pieces * (4096 if offload == "nvme" else 2 * 64 if choice.states == "8bit" else 0)
    assert per_rank <= found <= per_rank + spare


def positions_of(process, *, layout: Layout, **options) -> dict[str, int]:
    """Where each parameter's first element of this rank is in the model."""
    engine, found = make_engine(process, layout=layout, **options), {}
    for bucket in engine.zero.buckets:
        for piece in bucket.pieces:
            for fragment in piece.fragments:
                at = piece.start + fragment.place.start
                segment = next(segment for segment in piece.segments if segment.start <= at < segment.stop)
                found.setdefault(fragment.name, segment.position + at - segment.start - fragment.start)
    return found


def test_positions_do_not_depend_on_buckets_ranks_or_stages(ranks):
    """The names decide: equal for other bucket sizes, persistent parameters, numbers of ranks; and no two parameters overlap."""
    options = CHOICES[-1].options
    first = ranks(1).run(positions_of, layout=Layout(stage=0, zero={"bucket_size": 10**6}), **options)[0]
    ends = sorted(first.values())
    assert all(
        after - before >= 24 for before, after in itertools.pairwise(ends)
    )  # 24 elements: the smallest parameters
    for layout in (
        Layout(stage=3),
        Layout(stage=3, offload="nvme"),
        Layout(stage=2, zero={"param_persistence_threshold": 110}),
    ):
        for own in ranks(2).run(positions_of, layout=layout, **options):
            assert own.items() <= first.items(), layout.id


def above_entropy(process, *, kept: Format, steps: int) -> float:
    """How far the loss stays above the entropy."""
    return final(losses(process, kept=kept, seed=0, steps=steps))


def test_every_format_learns_as_float32(ranks):
    """On the same tokens, within 1 % of float32 states' loss; `tests/slow/test_states.py` has longer runs."""
    base = ranks(1).run(above_entropy, kept=FORMATS[0], steps=60)[0]
    learned = math.log(VOCAB) - chain(0)[1] - base
    for kept in FORMATS[1:]:
        assert abs(ranks(1).run(above_entropy, kept=kept, steps=60)[0] - base) < 0.01 * learned, kept


def refusal(process, **options) -> str:
    try:
        make_engine(process, layout=Layout(), **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "optimizer, precision, ema, fix",
    [
        (OptimizerPolicy(states="8bit"), {"dtype": "fp32"}, None, "use precision=bf16"),
        (OptimizerPolicy(states="8bit"), {"dtype": "bf16", "master": "fp32"}, None, "use precision.master=stochastic"),
        (OptimizerPolicy(), {"dtype": "bf16", "master": "stochastic"}, None, "use optimizer.states=bf16"),
        (OptimizerPolicy(states="bf16"), {"dtype": "fp16", "master": "stochastic"}, None, "or precision.master=fp32"),
        (OptimizerPolicy(name="sgd"), {"dtype": "bf16", "master": "stochastic"}, None, "use optimizer.states=bf16"),
        (OptimizerPolicy(states="8bit"), {"dtype": "bf16"}, EmaPolicy(), "use ema.decay=null"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_fix(ranks, optimizer, precision, ema, fix):
    options = {"optimizer": optimizer, "master": precision.get("master"), "dtype": precision["dtype"], "ema": ema}
    assert fix in ranks(1).run(refusal, **options)[0]


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon"])
def test_other_optimizers_have_no_smaller_states(name):
    with pytest.raises(ValueError, match="use optimizer=adamw, or optimizer.states=fp32"):
        OptimizerPolicy(name=name, states="bf16")


WRITTEN = "blocks.1.down.weight"


def halve_in_place(parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)
        parameter[:5] = 0


def halve_data(parameter) -> None:
    parameter.data.mul_(0.5)
    parameter.data[:5] = 0


def halve_elsewhere(parameter) -> None:
    value = parameter.data * 0.5
    value[:5] = 0
    parameter.data = value


def script_writes(process, *, layout: Layout, write, choice: Choice) -> tuple[list, list, int]:
    """A script halves a matrix and sets 5 of its rows to 0. Its master weights then, and all weights after two steps more."""
    engine, masters = make_engine(process, layout=layout, **choice.options), []
    matrix = dict(engine.module.named_parameters())[WRITTEN]
    bucket = next(b for b in engine.zero.buckets if any(p.name == WRITTEN for p in b.layout.placements))
    for step, tokens in enumerate(batches(5, rank=process.rank, world=process.world_size)):
        if step == 3:
            write(matrix)
            masters = [
                engine.zero.named_state.read(bucket, name=WRITTEN, kind="master").clone(),
                matrix.detach().clone(),
            ]
        engine.backward(engine(tokens))
        engine.step()
    weights = [value for _, value in sorted((name, value.clone()) for name, value in engine.zero.full_parameters())]
    moved = int(matrix[:5].count_nonzero())
    engine.close()
    return masters, weights, moved


@pytest.mark.parametrize("choice", CHOICES[3:], ids=lambda choice: choice.id)
@pytest.mark.parametrize("write", [halve_in_place, halve_data, halve_elsewhere])
def test_what_a_script_writes_counts_at_every_stage_and_tier(ranks, choice, write):
    """A master weight's extra bits belong to the old value: next to 0 they would be NaN."""
    found = [
        ranks(2).run(script_writes, layout=layout, write=write, choice=choice)[0]
        for layout in (Layout(), Layout(stage=1, offload="cpu"), Layout(stage=2, offload="nvme"))
    ]
    for (master, parameter), weights, moved in found:
        assert torch.equal(master.bfloat16().float(), parameter.float())
        assert write is halve_data or torch.equal(master, parameter.float())
        assert moved == 5 * parameter.shape[1]
        assert all(torch.equal(own, first) for own, first in zip(weights, found[0][1], strict=True))


def states_leave_for_a_while(process, *, leave: bool) -> list[float]:
    """Losses of a run whose states are offloaded once, one kind after the other, and come back."""
    engine, found = make_engine(process, layout=Layout(stage=3), **CHOICES[-1].options), []
    for step, tokens in enumerate(batches(4, rank=process.rank, world=process.world_size)):
        if leave and step == 2:
            for kinds in ([StateKind.hp_params], [StateKind.optim_states], list(StateKind)):
                engine.zero.offloader.offload(kinds, pin_memory=False, non_blocking=False)
            assert engine.memory.by_category(Tier.device).get("optimizer", 0) == 0
            engine.zero.offloader.reload(non_blocking=False)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def test_rows_of_several_dtypes_leave_the_device_and_come_back(ranks):
    straight = ranks(2).run(states_leave_for_a_while, leave=False)
    assert ranks(2).run(states_leave_for_a_while, leave=True) == straight
