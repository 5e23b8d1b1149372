"""Parameters that miss updates, frozen for a while or without a gradient, go on as under torch's optimizers, which count each one's steps."""

from unittest import mock

import pytest
import torch

from tests.zero.models import Layout, batches, build, make_engine
from ztk.checkpoint import load, save
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process
from ztk.deepspeed.optimizers.own import FusedLamb
from ztk.kernels import Control
from ztk.optim import HyperParameters, OptimizerPolicy
from ztk.zero.update import update
from ztk.zero.update.missed import MissedUpdates

COMMON = {"lr": 1e-2, "weight_decay": 0.1, "decay_all": True, "betas": (0.9, 0.999), "skip_unused": True}
STEPS, FROZEN = 5, "blocks.1.down.weight"
TORCHS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1),
    "lamb": lambda parameters: FusedLamb(parameters, lr=1e-2, weight_decay=0.1),
}


def _step(model, *, step: int):
    """A block is unused in the second step and a matrix frozen in the first two. The batch, and whether it uses the block."""
    dict(model.named_parameters())[FROZEN].requires_grad_(step >= 2)
    return list(batches(STEPS, rank=0, world=1))[step], step != 1


def by_torch(name: str) -> dict:
    model = build()
    optimizer = TORCHS[name](model.parameters())
    for step in range(STEPS):
        tokens, use_all = _step(model, step=step)
        optimizer.zero_grad()
        model(tokens, use_all=use_all).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def by_engine(process: Process, *, name: str, layout: Layout, steps: range, folder: str = "") -> dict:
    """Every rank has the same micro-batch, so that the mean over two ranks is exact."""
    engine = make_engine(process, layout=layout, optimizer=OptimizerPolicy(name=name, **COMMON))
    if steps.start:
        load(engine, path=folder)
    for step in steps:
        tokens, use_all = _step(engine.module, step=step)
        engine.backward(engine(tokens, use_all=use_all))
        engine.step()
    if folder and not steps.start:
        save(engine, folder=folder)
    weights = {name: value.clone() for name, value in engine.zero.full_parameters()}
    engine.close()
    return weights


@pytest.mark.parametrize("name", TORCHS)
def test_they_go_on_as_under_torch(ranks, tmp_path, name):
    """Five steps of 1e-2 whose roundings of 2^-24 Adam's quotient widens: within 2e-6 of torch's, and the same bits everywhere."""
    expected, places = (
        by_torch(name),
        [Layout(), Layout(stage=1), Layout(stage=2, offload="cpu"), Layout(stage=3, offload="nvme")],
    )
    found = [ranks(2).run(by_engine, name=name, layout=layout, steps=range(STEPS))[0] for layout in places]
    ranks(2).run(by_engine, name=name, layout=Layout(stage=3), steps=range(2), folder=str(tmp_path))
    found.append(ranks(1).run(by_engine, name=name, layout=Layout(), steps=range(2, STEPS), folder=str(tmp_path))[0])
    for weights in found:
        for parameter, value in expected.items():
            torch.testing.assert_close(weights[parameter], value, rtol=1e-5, atol=2e-6)
            assert torch.equal(weights[parameter], found[0][parameter])


def host_reads(process: Process, *, name: str) -> int:
    """How often a step without offloading, which leaves a parameter alone, reads from the device whether it is skipped."""
    engine = make_engine(process, layout=Layout(), optimizer=OptimizerPolicy(name=name, lr=1e-2))
    dict(engine.module.named_parameters())[FROZEN].requires_grad_(False)
    tokens = next(batches(1, rank=0, world=1))
    engine.backward(engine(tokens))
    with mock.patch.object(update, "is_set", wraps=update.is_set) as asked:
        engine.step()
    engine.close()
    return asked.call_count


def test_the_host_waits_only_where_updates_are_counted(ranks):
    assert ranks(1).run(host_reads, name="sgd") == [0]
    assert ranks(1).run(host_reads, name="adamw") == [1]


def test_a_late_parameter_has_its_own_corrections_without_a_host_read():
    """A meta tensor has no values that the host could read."""
    rows = [HyperParameters(lr=1.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, momentum=0.0)]
    missed = MissedUpdates(rows)
    missed.restore({"late": 3})
    control = torch.zeros(1, 16)
    control[0, Control.step], control[0, Control.beta1], control[0, Control.beta2] = 5, 0.9, 0.999
    own = missed.control_of("late", control=control, group=0)
    assert own[Control.step] == 2 and control[0, Control.step] == 5
    assert float(own[Control.bias_correction1]) == pytest.approx(1 - 0.9**2, rel=1e-6)
    assert float(own[Control.bias_correction2_sqrt]) == pytest.approx((1 - 0.999**2) ** 0.5, rel=1e-4)
    assert missed.control_of("late", control=control.to("meta"), group=0).is_meta
    assert missed.control_of("other", control=control, group=0) is not own


def left_alone(process: Process, *, layout: Layout, choice: tuple[str, str | None]) -> dict:
    """The weights of a run with smaller states. Asserts that a step changes only parameters that it does not skip, and their states."""
    states, master = choice
    policy = OptimizerPolicy(**COMMON, states=states, rounding_seed=5)
    precision = PrecisionPolicy(dtype=torch.bfloat16, master=master)
    engine = make_engine(process, layout=layout, optimizer=policy, precision=precision)
    buckets = {part.name: bucket for bucket in engine.zero.buckets for part in bucket.layout.placements}

    def kept() -> dict:
        return {
            (name, kind): engine.zero.named_state.read(buckets[name], name=name, kind=kind).clone()
            for name in (FROZEN, "blocks.1.up.weight", "sometimes.0.up.weight")
            for kind in ("master", "exp_avg", "exp_avg_sq")
        }

    before = {}
    for step in range(STEPS):
        tokens, use_all = list(batches(STEPS, rank=0, world=1))[step], step != 2
        dict(engine.module.named_parameters())[FROZEN].requires_grad_(step != 2)
        engine.backward(engine(tokens, use_all=use_all))
        engine.step()
        after = kept()
        for (name, kind), value in after.items() if before else ():
            skipped = step == 2 and name != "blocks.1.up.weight"
            assert torch.equal(value, before[name, kind]) == skipped, (step, name, kind)
        before = after
    weights = {name: value.clone() for name, value in engine.zero.full_parameters()}
    engine.close()
    return weights


@pytest.mark.parametrize("choice", [("bf16", "fp32"), ("bf16", "stochastic"), ("8bit", None)], ids=str)
def test_smaller_states_are_left_alone_and_go_on(ranks, choice):
    """Rows with a value per 32 elements, too. The late parameter is updated by bits of its own position: everywhere the same."""
    first, *others = (
        ranks(2).run(left_alone, layout=layout, choice=choice)[0]
        for layout in (Layout(), Layout(stage=2, offload="cpu"), Layout(stage=3, offload="nvme"))
    )
    for weights in others:
        assert all(torch.equal(weights[name], value) for name, value in first.items())
