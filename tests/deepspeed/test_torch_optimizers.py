"""Any elementwise torch optimizer: its own step over shards has the bits of its step over full parameters."""

import functools

import pytest
import torch

from tests.deepspeed import elementwise
from tests.deepspeed.elementwise import PLACES, Derived, Own, plain

optim = torch.optim
CASES = {
    "amsgrad": functools.partial(optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1),
    "derived": functools.partial(Derived, lr=0.01),
    "own": Own,
    "adagrad": functools.partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1),
    "rmsprop": functools.partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "nadam": functools.partial(optim.NAdam, lr=0.01),
    **elementwise.MAKERS,
}
MORE = {
    "adadelta": optim.Adadelta,
    "asgd": functools.partial(optim.ASGD, lr=0.1, t0=1.0),
    "rprop": optim.Rprop,
    "adamax": functools.partial(optim.Adamax, lr=0.01, weight_decay=0.1),
    "radam": functools.partial(optim.RAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "maximize": functools.partial(optim.SGD, lr=0.1, momentum=0.9, maximize=True),
}


@functools.cache
def expected(label: str, *, scheduled: bool = False) -> dict[str, torch.Tensor]:
    return plain({**CASES, **MORE}[label], after=elementwise.halving if scheduled else None)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_stage_and_tier_has_torchs_bits(ranks, place):
    cases = CASES | (MORE if place == (3, "nvme", "nvme") else {})
    values = {label: expected(label) for label in cases}
    assert not ranks(2).run(elementwise.differing, cases=cases, expected=values, places=[place])[0]


def test_16_bit_parameters_have_fp32_masters_of_torchs_bits(ranks):
    """Masters start from the fp32 values, and the gradients are exact in bf16."""
    values = {"amsgrad": expected("amsgrad")}
    places, bf16 = [(1, "none", "none"), (3, "nvme", "cpu")], {"enabled": True}
    found = ranks(2).run(
        elementwise.differing, cases={"amsgrad": CASES["amsgrad"]}, expected=values, places=places, bf16=bf16
    )
    assert not found[0]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Checkpoints of two ranks at stage 3, one folder per optimizer, after two steps under a schedule."""
    folder = tmp_path_factory.mktemp("torch_optimizers")
    makers = {label: CASES[label] for label in ("own", "nadam", "differing nesterov")}
    ranks(2).run(elementwise.save, makers=makers, folder=str(folder))
    return folder, makers


@pytest.mark.parametrize(("world", "stage", "tier"), [(1, 0, "none"), (1, 3, "nvme"), (2, 1, "cpu")])
def test_a_resumed_run_with_a_schedule_has_torchs_bits(ranks, saved, world, stage, tier):
    """Counts of steps, values of groups and rows come back on another number of ranks; rates follow the schedule."""
    folder, makers = saved
    found = ranks(world).run(elementwise.resume, makers=makers, folder=str(folder), stage=stage, tier=tier)[0]
    for label, values in found.items():
        for name, value in values.items():
            assert torch.equal(value, expected(label, scheduled=True)[name]), (label, name)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizers_state_dict_has_all_that_its_class_keeps(ranks, stage):
    """Rows, counts of steps and values of groups: a run that begins with them has the bits of one that went on."""
    makers = {label: CASES[label] for label in ("own", "nadam", "differing nesterov")}
    for found in ranks(2).run(elementwise.through_state_dicts, makers=makers, stage=stage):
        for label, values in found.items():
            for name, value in values.items():
                assert torch.equal(value, expected(label)[name]), (label, name)


def test_another_optimizers_checkpoint_is_refused(ranks, saved):
    """NAdam's rows have the names of Adam's, but their steps are counted otherwise."""
    said = ranks(2).run(elementwise.load_other, folder=str(saved[0]), label="nadam")[0]
    assert "saved with NAdam" in said and "weights_only=True" in said


@pytest.mark.parametrize(("stage", "tier"), [(2, "none"), (3, "cpu")])
def test_an_overflow_leaves_weights_and_states(ranks, stage, tier):
    found = ranks(2).run(elementwise.overflowing, make=CASES["nadam"], stage=stage, tier=tier)[0]
    assert found["skipped"] == 1
    for name, value in expected("nadam").items():
        assert torch.equal(found["weights"][name], value), name


def test_clipping_and_states_in_a_scripts_hands(ranks):
    """One step of RMSprop without averaging moves by lr g / (|g| + eps), where g is the clipped gradient.

    eps is large, so the clipping shows. Six roundings to fp32 (coefficient, gradient, square, root, sum, quotient) and the product and sum of
    the update: 8 times 2^-24 of the largest value.
    """
    lr, eps = 0.1, 0.01
    found = ranks(2).run(elementwise.in_hand, make=functools.partial(optim.RMSprop, lr=lr, alpha=0.0, eps=eps))[0]
    given = elementwise.gradients(0, rank=-1)
    norm = sum(value.double().square().sum() for value in given.values()).sqrt()
    assert found["norm"] == pytest.approx(float(norm), rel=1e-6)
    for name, before in found["before"].items():
        clipped = given[name].double() / (norm + 1e-6)
        wanted = before.double() - lr * clipped / (clipped.abs() + eps)
        torch.testing.assert_close(found["after"][name].double(), wanted, rtol=0, atol=8 * 2**-24 * 4)
    assert "has made no step yet" in found["early"] and bool((found["state"] == 3).all())


def test_parameters_without_a_gradient_are_skipped_if_asked(ranks):
    """As torch does: a block that only one rank uses is trained, one that no rank uses keeps weights, moments and its count of steps.

    The fused SGD has torch's bits, because products with 0.5 and 0.25 are exact.
    """
    cases = {
        "nadam": CASES["nadam"],
        "adagrad": functools.partial(optim.Adagrad, lr=0.01, weight_decay=0.1),
        "sgd": functools.partial(optim.SGD, lr=0.25, momentum=0.5),
    }
    values = {label: plain(make, drops=True) for label, make in cases.items()}
    places = [(0, "none", "none"), (2, "nvme", "none"), (3, "cpu", "cpu")]
    assert not ranks(2).run(
        elementwise.differing, cases=cases, expected=values, places=places, drops=True, skip_unused=True
    )[0]
    moved = ranks(2).run(elementwise.differing, cases=cases, expected=values, places=places[:1], drops=True)[0]
    assert {text.split()[0] for text in moved} == set(cases)


def test_adam_skips_by_name_and_by_object(ranks):
    """ztk's fused update rounds differently from torch's: 5 steps of 0.01, within 1e-6."""
    make = functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1, betas=(0.9, 0.999))
    section = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    expected = plain(make, drops=True)
    for case, more in (("by name", {"optimizer": section}), ("by object", {})):
        found = ranks(2).run(elementwise.dropping, make=None if more else make, skip_unused=True, **more)[0]
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-6, msg=lambda text, case=case: f"{case}: {text}"
            )
