"""zero.Init: models that are built sharded, and parameters that are unsharded for a while."""

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed import zero_init


def ordinary() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = zero_init.Model()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_model_is_built_sharded_with_the_values_it_would_have(ranks):
    expected = ordinary()
    after = torch.rand(3)
    first, second = ranks(2).run(zero_init.build)
    for found in (first, second):
        assert found["partitioned"] and found["nan"] and found["tied"] and found["clean"]
        assert found["bytes"] == 4 * len(expected)  # one NaN each
        assert equal(found["values"], expected)
        assert torch.equal(found["next"], after)  # the random numbers that a script draws next are the same
        assert found["status"] == "NOT_AVAILABLE" and found["shape"] == (2 * zero_init.WIDTH, zero_init.WIDTH)
        assert found["dtype"] is torch.float32 and found["buffer"].tolist() == [0, 1, 2, 3]
    assert first["ids"] == second["ids"] and len(set(first["ids"])) == len(expected)
    slices = torch.cat([first["slice"], second["slice"]])
    assert torch.equal(slices, expected["blocks.0.up.weight"].flatten())


def test_rank_0s_values_are_everybodys(ranks):
    first, second = ranks(2).run(zero_init.build, seed_of_rank=5)
    assert equal(first["values"], ordinary()) and equal(first["values"], second["values"])


def test_one_module_is_full_at_a_time(ranks):
    full = ranks(2).run(zero_init.peak, under_init=False)[0]
    assert full["peak"] == full["model"]
    for found in ranks(2).run(zero_init.peak, under_init=True):
        assert found["peak"] < 1.2 * found["model"] / 20  # 20 equal layers; 4 bytes per sharded parameter


@pytest.mark.parametrize(
    ("stage", "bf16", "offload"),
    [(0, False, "none"), (2, True, "none"), (3, False, "none"), (3, True, "cpu"), (3, False, "nvme")],
)
def test_initialize_takes_over_sharded_models(ranks, stage, bf16, offload):
    """Master weights are fp32 in 16 bit too, so nothing differs from a model built full."""
    arguments = {"stage": stage, "bf16": bf16, "offload": offload}
    expected = ranks(2).run(zero_init.train, under_init=False, **arguments)[0]
    for rank, found in enumerate(ranks(2).run(zero_init.train, under_init=True, **arguments)):
        assert found["left"] == []
        assert equal(found["first"], expected["first"]) and equal(found["weights"], expected["weights"])
        if rank == 0:
            assert found["losses"] == expected["losses"]
    assert equal(expected["first"], {name: value.float() for name, value in ordinary().items()})


def test_gathered_parameters_before_initialize(ranks):
    for found in ranks(2).run(zero_init.gathered_before_initialize):
        before, after = found["before"], found["after"]
        assert found["inner"].eq(2).all() and found["still"] == "AVAILABLE" and found["status"] == "AVAILABLE"
        assert "modifier_rank" in found["refused"]
        for name, value in after.items():
            if name == "extra.weight":
                assert value.eq(2).all()
            elif name.startswith("blocks.2."):
                assert value.eq(0.5).all()
            else:
                assert torch.equal(value, before[name])


def test_other_ways_to_use_init(ranks):
    for found in ranks(2).run(zero_init.other_ways):
        assert equal(found["module"], found["expected"]) and equal(found["nested"], found["expected"])
        assert found["half"] and found["clean"]
        assert found["dtype"] is torch.bfloat16 and found["copy"] == "ZeroParameter"
        assert "GatheredParameters" in found["refused copy"] and found["same copy"]


def test_pinned_parameters_stay_unsharded_through_passes(ranks):
    first, second = ranks(2).run(zero_init.pinned)
    for found in (first, second):
        assert found["same"] and found["full"] and found["moved"] == 0  # gathered once for three forwards
        assert "leave GatheredParameters" in found["refused"]
        assert found["released"] and found["steps"] == 1 and found["generated"]
    assert first["ids"] == second["ids"]
    assert [a + b for a, b in zip(first["slices"], second["slices"], strict=True)] == first["sizes"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"remote_device": "nvme"}, "nvme_path"),
        ({"remote_device": "gpu"}, "must be cpu"),
        ({"dtype": torch.float64}, "must be torch.float16"),
        ({"zero_quantized_weights": True}, "not offered"),
        ({"config": {}, "config_dict_or_path": {}}, "give one"),
        ({"config_dict_or_path": {"zero_optimization": {"stage": 3, "offload_parm": {}}}}, "offload_param"),
    ],
)
def test_what_init_cannot_follow_is_refused(arguments, part):
    with pytest.raises(ValueError, match=part):
        deepspeed.zero.Init(**arguments)


def _normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 1))


def parametrized(process) -> dict[str, torch.Tensor]:
    """Of a model whose layer makes parameters of a sharded one."""
    with deepspeed.zero.Init():
        model = _normalised()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_parameters_that_are_made_of_sharded_ones(ranks):
    for found in ranks(2).run(parametrized):
        for name, value in _normalised().named_parameters():
            assert torch.equal(found[name], value), name


def test_external_parameters_are_kept_and_checked():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    deepspeed.zero.register_external_parameter(module, other.weight)
    deepspeed.zero.unregister_external_parameter(module, other.weight)
    with pytest.raises(RuntimeError, match="not a registered"):
        deepspeed.zero.unregister_external_parameter(module, other.weight)
    with pytest.raises(RuntimeError, match="Parameter"):
        deepspeed.zero.register_external_parameter(module, torch.ones(2))
