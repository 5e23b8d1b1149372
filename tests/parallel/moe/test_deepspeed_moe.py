"""The names of `deepspeed.moe`: the documents' block and helper, and DeepSpeed's helpers."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.documents.harness import config_of
from tests.parallel.moe.deepspeed_scripts import (
    STEPS,
    WIDTH,
    built,
    built_sharded,
    data,
    train,
    train_hub,
)
from tests.rounding import Bounds
from ztk.deepspeed.config import DeepSpeedConfigError, parse_config
from ztk.deepspeed.experts import expert_degree, give_layer_options
from ztk.deepspeed.names import lookup
from ztk.parallel.moe import (
    MoE,
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)


@functools.cache
def bounds_of_losses() -> Bounds:
    """Losses of the documents' script in plain fp64. The longest sum is over the hidden elements of an expert."""

    def compute() -> dict[str, torch.Tensor]:
        model = built(ep_size=1).double()
        attention, moe = model.block.attention, model.block.moe_layer
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0, foreach=False)
        losses = {}
        for step in range(STEPS):
            x, y = data(step)
            x = x.double().flatten(0, 1)
            x = x + F.linear(x, attention.weight, attention.bias)
            gates, chosen = F.linear(x, moe.gate.weight).softmax(-1).topk(2)
            weights = torch.zeros(len(x), 4, dtype=x.dtype).scatter(1, chosen, gates / gates.sum(-1, keepdim=True))
            out = sum(weights[:, e, None] * expert.net(x) for e, expert in enumerate(moe.experts.children()))
            loss = F.cross_entropy(F.linear(out, model.head.weight, model.head.bias), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            optimizer.step()
            losses[f"loss {step}"] = loss
        return losses

    return Bounds(compute=compute, longest_sum=4 * WIDTH, samples=10)


def check(losses: list[float]) -> None:
    assert len(losses) == STEPS and losses[-1] < losses[0]
    for step, loss in enumerate(losses):
        bounds_of_losses().check(f"loss {step}", torch.tensor(loss))


@pytest.mark.parametrize(("stage", "groups"), [(0, "none"), (1, "deepspeed"), (2, "seed"), (3, "seed")])
def test_the_documents_script_trains_with_experts_spread(ranks, stage, groups):
    """`ep_size=2` alone creates the mesh; also at stage 3, which DeepSpeed refuses for its layer."""
    (alone, names, _) = ranks(1).run(train, ep_size=1, stage=0, groups="none")[0]
    assert names == ["0", "1", "2", "3"]
    check(alone)
    runs = ranks(2).run(train, ep_size=2, stage=stage, groups=groups)
    assert [names for _, names, _ in runs] == [["0", "1"], ["2", "3"]]
    for losses, _, number in runs:
        check(losses)
        assert number == (1 if groups == "none" else 2)


def test_the_documents_configuration_spreads_the_layer_that_leaves_it_open(ranks):
    """002, 9.2: moe and moe_expert_parallel_size as written, with 9.1's layer of ep_size=1, on the four ranks that they ask for."""
    runs = ranks(4).run(train, ep_size=1, stage=2, groups="seed", more=config_of("002_9_2.json"))
    assert [names for _, names, _ in runs] == [["0"], ["1"], ["2"], ["3"]]
    for losses, _, number in runs:
        check(losses)
        assert number == 2


def given_to(model: nn.Module, **section) -> nn.Module:
    settings = parse_config({"train_batch_size": 8, "moe": section}, world_size=4)
    give_layer_options(model, options=settings.experts.layers)
    return model


def test_the_section_moe_sets_the_layers_defaults():
    layer = MoE(4, nn.Linear(4, 4), num_experts=4, capacity_factor=2.0)
    given = {"k": 2, "capacity_factor": 2.0, "min_capacity": 1, "noisy_gate_policy": "Jitter", "use_rts": False}
    given_to(nn.Sequential(layer), enabled=True, ep_size=2, num_experts=4, drop_tokens=True, **given)
    policy = layer.policy
    assert (policy.k, policy.capacity_factor, policy.min_capacity, policy.noise) == (2, 2.0, 1, "Jitter")
    assert not policy.random_selection and policy.drop_tokens and policy.eval_capacity_factor == 1.0
    assert layer.ep_size == 2 and {p.group_name for p in layer.experts.parameters()} == {"ep_size_2"}
    assert expert_degree(layer) == 2
    off = MoE(4, nn.Linear(4, 4), num_experts=4)
    given_to(off, enabled=False, ep_size=2, k=2)
    assert off.ep_size == 1 and off.policy.k == 1


@pytest.mark.parametrize(
    ("layer", "section", "message"),
    [
        ({"ep_size": 2}, {"ep_size": 4}, r"moe.ep_size=4: 0 is made with MoE\(ep_size=2\)"),
        ({"k": 2}, {"k": 4}, r"moe.k=4: 0 is made with MoE\(k=2\)"),
        ({"drop_tokens": False}, {"drop_tokens": True}, r"drop_tokens=True: 0 is made with MoE\(drop_tokens=False\)"),
        ({}, {"num_experts": 8}, r"moe.num_experts=8: 0 is made with MoE\(num_experts=4\)"),
        ({}, {"use_residual": True}, r"make the layer with MoE\(use_residual=True\)"),
        ({"num_experts": 6}, {"ep_size": 4}, "does not fit 0, which has 6 experts"),
        ({}, {"k": 5}, "does not fit 0, which has 4 experts"),
    ],
    ids=str,
)
def test_a_layer_that_contradicts_the_section_is_refused(layer, section, message):
    made = nn.Sequential(MoE(4, nn.Linear(4, 4), **{"num_experts": 4, **layer}))
    with pytest.raises(ValueError, match=message):
        given_to(made, min_capacity=1, **section)
    assert made[0].policy.min_capacity == 4, "nothing is changed where something is refused"


def model() -> nn.Module:
    return nn.ModuleDict({"plain": nn.Linear(4, 4), "moe": MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2)})


def test_helpers_tell_experts_from_the_rest():
    made = model()
    assert has_moe_layers(made) == (True, 4) and has_moe_layers(made["plain"]) == (False, 0)
    shared, experts = split_params_into_shared_and_expert_params(made.parameters())
    assert len(experts) == 8 and all(map(is_moe_param, experts)) and not any(map(is_moe_param, shared))

    options = {"params": list(made.parameters()), "name": "all", "lr": 0.5}
    groups = split_params_into_different_moe_groups_for_optimizer(options)
    assert [is_moe_param_group(group) for group in groups] == [False, True]
    assert [group["name"] for group in groups] == ["all", "ep_size_2"] and groups[1]["lr"] == 0.5
    assert [len(group["params"]) for group in groups] == [3, 8]

    chunks = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(made.parameters()), "name": "all"}, max_group_size=40
    )
    assert [sum(p.numel() for p in group["params"]) for group in chunks[1:]] == [40, 40]
    assert configure_moe_param_groups(groups) is groups
    assert [len(group["params"]) for group in configure_moe_param_groups(list(made.parameters()))] == [3, 8]
    torch.optim.AdamW(groups)


def test_experts_built_under_zero_init_train_unless_they_are_spread(ranks):
    assert ranks(2).run(built_sharded, ep_size=1) == ["finite: True"] * 2
    for text in ranks(2).run(built_sharded, ep_size=2):
        assert "has no values of its own (zero.Init?)" in text and "outside of zero.Init" in text


def test_layers_say_over_how_many_ranks_they_are_spread():
    made = model()
    assert expert_degree(made) == 2 and expert_degree(made["plain"]) == 1
    made["more"] = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=4)
    with pytest.raises(ValueError, match="experts over 2 and 4 ranks"):
        expert_degree(made)


def test_the_configuration_spreads_the_experts_of_hub_models(ranks):
    """AutoEP's section: its size makes the mesh, its pattern chooses layers."""
    section = {"enabled": True, "autoep_size": 2, "moe_layer_pattern": r"model\.layers\.1\.mlp"}
    alone, _ = ranks(1).run(train_hub, section={})[0]
    for losses, shapes in ranks(2).run(train_hub, section=section):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=0)
        assert [shapes[f"model.layers.{layer}.mlp.experts.down_proj"][0] for layer in range(2)] == [4, 2]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"autoep_size": 0}, "autoep_size=0: must be a whole number, 1 or more"),
        ({"top_k": 3}, "expert_parallel.top_k=3: the model routes as it always does"),
        ({"expert_tensor_parallel_size": 2}, "use 1 and raise autoep_size"),
        ({"auto_ep_size": 2}, "did you mean autoep_size"),
    ],
)
def test_what_the_section_cannot_do_is_refused(section, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        parse_config({"train_batch_size": 8, "expert_parallel": {"enabled": True, **section}}, world_size=2)


def test_the_section_is_read_only_when_it_is_on():
    off = parse_config({"train_batch_size": 8, "expert_parallel": {"autoep_size": 4}}, world_size=2)
    assert off.experts.size == 1
    given = {"enabled": True, "autoep_size": 2, "comm_num_sm": 20, "preset_model": "mixtral", "use_grouped_mm": True}
    on = parse_config({"train_batch_size": 8, "expert_parallel": given}, world_size=2)
    assert on.experts.size == 2
    assert sum("expert_parallel." in note for note in on.notes) == 2


def test_names_are_deepspeeds():
    assert lookup("moe").layer.MoE is MoE
    assert lookup("moe").utils.is_moe_param is is_moe_param
