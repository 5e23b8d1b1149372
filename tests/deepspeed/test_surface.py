"""The engine's methods besides forward, backward and step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts, surface
from ztk.deepspeed.zero import leaf


@pytest.mark.parametrize(("stage", "evaluate_first"), [(0, True), (2, False), (3, True), (3, False)])
def test_without_an_optimizer_training_is_adamws(ranks, stage, evaluate_first):
    losses, weights = scripts.plain(steps=6, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0))
    for found in ranks(2).run(surface.without_optimizer, stage=stage, evaluate_first=evaluate_first):
        assert found["optimizer"] is None and found["states"] == 0  # a model that only evaluates has no states
        assert found["lr"] == [1e-3] and found["name"] == "adamw"
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses))
        for name, value in weights.items():
            torch.testing.assert_close(found["weights"][name], value)
        if evaluate_first:
            torch.testing.assert_close(found["evaluated"], scripts.build()(scripts.data(0)[0]))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_reduction_coalesced_over_backwards(ranks, stage):
    once = ranks(2).run(surface.coalesced, stage=stage, coalesce=True)[0]
    each = ranks(2).run(surface.coalesced, stage=stage, coalesce=False)[0]
    assert once["steps"] == each["steps"] == 2 and "leave the outer block" in once["nested"]
    for name, value in each["weights"].items():  # sums in another order
        torch.testing.assert_close(once["weights"][name], value)
    if stage >= 2:
        assert 3 * once["reduced"] == each["reduced"]


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_sizes_change_between_steps(ranks, stage):
    found = ranks(2).run(surface.resized, stage=stage)[0]
    assert found["sizes"] == [(16, 4, 2), (8, 2, 2)] and found["steps"] == 3 and found["samples"] == 8 + 16 + 8
    assert "multiple of 4" in found["errors"][0] and "1 or more" in found["errors"][1]
    model = scripts.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step, size in enumerate((8, 16, 8)):
        x, y = scripts.data(step)
        x, y = x.repeat(4, 1)[:size], y.repeat(4)[:size]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["weights"][name], parameter.detach())


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_units_train_alike(ranks, stage):
    eager = ranks(2).run(surface.compiled, stage=stage, compile_it=False)[0]
    found = ranks(2).run(surface.compiled, stage=stage, compile_it=True)[0]
    assert found["compiled"] and not eager["compiled"] and found["graphs"] >= 1
    assert found["losses"] == eager["losses"]  # the same operations in the same order


def test_rates_states_and_loaders_in_a_scripts_hands(ranks):
    first, second = ranks(2).run(surface.edited)
    for name, value in first["before"].items():
        moved = not torch.equal(value, first["middle"][name])
        assert moved == name.startswith("fc1")
        assert torch.equal(first["middle"][name], first["after"][name]) != name.startswith("fc2")
    assert first["rates"] == [0.0, 1e-2] and first["modes"] == [False, False, True, True]
    assert first["asked"] == (600, 0, 50_000_000, 1_000_000_000, 1_000_000_000, False, False)
    assert first["repeated"] == [1, 2, 1, 2, 1]
    assert first["state"] == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"] and second["state"] == first["state"]
    assert first["eval"] == [[0, 2, 4, 6], [8, 10]] and second["eval"] == [[1, 3, 5, 7], [9, 11]]


@pytest.mark.parametrize("marked", ["class", "suffix", "config"])
def test_leaf_modules_are_gathered_as_one(ranks, marked):
    losses, weights = surface.routed_plainly()
    found = ranks(2).run(surface.leaves, marked=marked)[0]
    assert found["units"] == ["root", "routed"] and found["leaves"] == ["Experts"] and found["parameter"]
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses))
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value)


def test_a_model_that_is_a_leaf_may_choose_its_children_by_rank(ranks):
    """DeepSpeed's `test_choose_module_by_rank`."""
    usual = ranks(2).run(surface.chosen, stage=0)[0]
    for found in ranks(2).run(surface.chosen, stage=3):
        for name, value in usual.items():
            assert torch.equal(found[name], value), name


def test_leaf_modules_are_marked_and_unmarked():
    model = nn.Sequential(nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.Linear(2, 2))
    assert leaf.set_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"]) == leaf.get_z3_leaf_modules(model)
    assert len(leaf.unset_z3_leaf_modules(model, [nn.Linear])) == 2 and leaf.get_z3_leaf_modules(model) == []
    leaf.set_z3_leaf_module(model[1], True)
    assert leaf.z3_leaf_module(model[1]) and not leaf.z3_leaf_parameter(model[1].weight)
    assert leaf.set_z3_leaf_modules_by_name(model, ["0.a", "b"], raise_if_not_found=False)[1] == ["b"]
    with pytest.raises(ValueError, match="no modules of type Conv2d"):
        leaf.set_z3_leaf_modules(model, ["Conv2d"])
    with pytest.raises(ValueError, match="classes or their names"):
        leaf.set_z3_leaf_modules(model, [3])


@pytest.mark.parametrize(
    ("stage", "include"), [(0, None), (1, ["optim_states"]), (2, None), (3, None), (3, ["optim_states"])]
)
def test_states_are_offloaded_and_reloaded(ranks, stage, include):
    expected, _ = scripts.plain(steps=6)
    for found in ranks(2).run(surface.states_moved, stage=stage, include=include):
        device, host = found["during"]["device"], found["during"]["host"]
        assert found["after"] == found["before"] and not any(found["before"]["host"].values())
        assert device["optimizer"] == 0 and host["optimizer"] == found["before"]["device"]["optimizer"]
        if include is None:
            assert not any(device.values()) and host == found["before"]["device"]
        assert ("reload_states" in found["refused"]) == (include is None)
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected))


@pytest.mark.parametrize(("bf16", "offload"), [(False, "none"), (True, "none"), (False, "cpu"), (True, "nvme")])
def test_local_parts_and_gradients_set_by_hand(ranks, bf16, offload):
    first, second = ranks(2).run(surface.local_states, bf16=bf16, offload=offload)
    for kind in ("grad", "master", "moment"):
        for name, full in first[f"full_{kind}"].items():
            joined = torch.cat([first[kind][name], second[kind][name]])
            assert torch.equal(joined, full.flatten()), (kind, name)
    for name, part in first["bf16"].items():
        assert torch.equal(part.float(), first["master"][name].to(part.dtype).float())
    for found in (first, second):
        assert all(value.eq(1).all() for value in found["set_grads"].values())
        size = sum(value.numel() for value in found["set_grads"].values())
        assert found["norm"] == pytest.approx(size**0.5, rel=1e-6)
        for value in found["stepped"].values():  # the same gradient and moments everywhere: 0.25 less one equal step
            assert value.max() - value.min() < 1e-3 and value.mean() < 0.25
        no_step, elements, stage = found["errors"]
        assert "no reduced gradient" in no_step and "elements" in elements and "stage 3" in stage


def test_names_that_scripts_import():
    from ztk.deepspeed.names import lookup  # the table of `deepspeed.` names

    for name in ("safe_get_local_grad", "safe_set_full_grad", "RepeatingLoader"):
        assert callable(lookup(name))
    assert deepspeed.RepeatingLoader is lookup("utils").RepeatingLoader
    kinds = lookup("runtime").zero.offload_config.OffloadStateTypeEnum
    assert {kind.name for kind in kinds} == {
        *("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
    }
    assert callable(lookup("utils").zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint)
    parameters = lookup("runtime").zero.partition_parameters
    assert parameters.ZeroParamStatus.AVAILABLE.value == 1 and parameters._orig_torch_arange is torch.arange
    halved = parameters.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.float16)
    assert halved(2).dtype is torch.float16 and halved(2, dtype=torch.int32).dtype is torch.int32


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_belongs_to_one_engine(ranks, stage):
    """Plain SGD has no states, so that the run with two engines is the run with one."""
    losses, _ = scripts.plain(steps=5, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for found in ranks(2).run(surface.pinned, stage=stage):
        assert (
            "fc1.weight belongs to the engine of an earlier initialize" in found["text"]
            and "destroy()" in found["text"]
        )
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses))


def test_a_frozen_layer_may_be_read_by_two_engines(ranks):
    for losses in ranks(2).run(surface.shared)[0]:
        assert losses[-1] < 0.8 * losses[0]
