"""A script's own optimizer object after `initialize`, its hooks and options: as in plain PyTorch, or an error with the way out."""

import copy
import types

import pytest
import torch
from torch import nn

import ztk
import ztk.deepspeed as deepspeed
from ztk.deepspeed.tools.log import logger

CONFIG = {"train_batch_size": 1, "gradient_clipping": 0.0}


def begin(optimizer=None, *, stage: int = 0, **options):
    """A new layer, its optimizer and an engine of one rank. optimizer: a class, by default the configuration's AdamW."""
    torch.manual_seed(0)
    model, config = nn.Linear(4, 4), {**CONFIG, "zero_optimization": {"stage": stage}}
    client = None if optimizer is None else optimizer(model.parameters(), **options)
    if client is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    engine, returned, *_ = deepspeed.initialize(model=model, optimizer=client, config=config)
    return engine, client, returned


def step(engine) -> None:
    engine.backward(engine(torch.ones(1, 4)).square().sum())
    engine.step()


sgd, adamw, lamb = torch.optim.SGD, torch.optim.AdamW, deepspeed.ops.lamb.FusedLamb


@pytest.mark.parametrize(
    ("optimizer", "options", "key", "value"),
    [
        (sgd, {"lr": 0.1}, "maximize", True),
        (sgd, {"lr": 0.1}, "momentum", 0.9),
        (sgd, {"lr": 0.1, "momentum": 0.9}, "nesterov", True),
        (sgd, {"lr": 0.1, "momentum": 0.9}, "dampening", 0.5),
        (adamw, {}, "amsgrad", True),
        (adamw, {}, "decoupled_weight_decay", False),
        (lamb, {}, "max_coeff", 2.0),
        (deepspeed.ops.adam.FusedAdam, {}, "bias_correction", False),
        (None, {}, "maximize", True),
    ],
)
def test_an_option_that_the_fused_update_is_built_with_is_not_changed_later(optimizer, options, key, value):
    engine, _, returned = begin(optimizer, **options)
    step(engine)
    for harmless in ("foreach", "fused", "capturable", "name"):
        returned.param_groups[0][harmless] = True
    step(engine)
    returned.param_groups[0][key] = value
    with pytest.raises(ValueError, match=rf"param_groups\[0\]\['{key}'\] is {value} now and was .* before initialize"):
        step(engine)
    engine.destroy()


def test_options_that_may_change_act_as_in_torch():
    """ztk's own update, and torch's, whose step reads all options."""
    for options in ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}):
        engine, client, _ = begin(sgd, **options)
        torch.manual_seed(0)
        plain = nn.Linear(4, 4)
        reference = sgd(plain.parameters(), **options)
        for number in range(4):
            for group in (client.param_groups[0], reference.param_groups[0]):
                group |= {"lr": 0.1 / (number + 1), "weight_decay": 0.1 * number, "momentum": 0.5}
                if "dampening" in options:
                    group |= {"maximize": number > 1, "dampening": 0.2}
            step(engine)
            reference.zero_grad()
            plain(torch.ones(1, 4)).square().sum().backward()
            reference.step()
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach())
        engine.destroy()


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.NAdam, None])
def test_the_parameters_of_a_group_stay(optimizer):
    def taken(group):
        del group["params"][0]

    def replaced(group):
        group["params"] = group["params"][1:]

    def added(group):
        group["params"].append(nn.Parameter(torch.ones(3)))

    def turned(group):
        group["params"].reverse()

    for change, words in (
        (taken, r"parameter weight was taken out of param_groups\[0\].*requires_grad_\(False\)"),
        (replaced, "parameter weight was taken out"),
        (added, r"parameter of shape \(3,\) came into it"),
        (turned, "its order or number"),
    ):
        engine, _, returned = begin(optimizer)
        step(engine)
        change(returned.param_groups[0])
        with pytest.raises(ValueError, match=words):
            step(engine)
        engine.destroy()


@pytest.mark.parametrize("of_client", [True, False])
def test_another_list_of_groups_is_refused(of_client):
    engine, client, returned = begin(sgd, lr=0.1)
    owner = client if of_client else returned
    owner.param_groups = copy.copy(owner.param_groups)
    with pytest.raises(ValueError, match="param_groups was replaced by another list"):
        step(engine)
    engine.destroy()


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.NAdam])
def test_the_passed_object_refuses_its_own_methods(optimizer):
    engine, client, _ = begin(optimizer)
    step(engine)
    for call, words in (
        (client.step, r"call engine.step\(\) instead"),
        (client.state_dict, "the optimizer that initialize returned"),
        (lambda: client.load_state_dict({"state": {}, "param_groups": []}), "the optimizer that initialize returned"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(ValueError, match="Give all groups to initialize"):
        client.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    engine.backward(engine(torch.ones(1, 4)).square().sum())
    client.zero_grad()
    assert not engine.engine.zero.reduction.has_gradients
    engine.destroy()
    model = nn.Linear(4, 4)
    client.add_param_group({"params": list(model.parameters())})
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.detach().clone()
    client.step()
    client.zero_grad()
    assert not torch.equal(before, model.weight) and model.weight.grad is None and client.state_dict()["param_groups"]


def test_a_step_that_was_replaced_is_refused():
    """On the object or on its class, before initialize or after. A scheduler wraps the step of the object, which is no fault."""

    def replace(optimizer):
        optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)

    model = nn.Linear(4, 4)
    client = sgd(model.parameters(), lr=0.1)
    replace(client)
    with pytest.raises(ValueError, match=r"optimizer.step was replaced.*register_step_pre_hook"):
        deepspeed.initialize(model=model, optimizer=client, config=CONFIG)

    engine, client, _ = begin(sgd, lr=0.1)
    step(engine)
    replace(client)
    with pytest.raises(ValueError, match=r"optimizer.step was replaced"):
        step(engine)
    engine.destroy()

    original = sgd.step
    try:
        sgd.step = lambda self, closure=None: [original(self, closure) for _ in range(2)][-1]
        engine, client, _ = begin(sgd, lr=0.1)
        assert engine.engine.zero.optimizer.options["class"] == "SGD"  # its own step runs
        engine.destroy()
    finally:
        sgd.step = original


def test_schedulers_wrap_the_step_before_and_after_initialize(recwarn):
    for is_early in (True, False):
        model = nn.Linear(4, 4)
        client = sgd(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(client, step_size=1, gamma=0.5) if is_early else None
        engine, *_ = deepspeed.initialize(model=model, optimizer=client, config=CONFIG)
        schedule = schedule or torch.optim.lr_scheduler.StepLR(client, step_size=1, gamma=0.5)
        for _ in range(2):
            step(engine)
            schedule.step()
        assert engine.get_lr() == [0.125]
        engine.destroy()
        client.step()
        schedule.step()
    assert not [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_replaced_step_of_the_returned_optimizer_runs():
    """As in DeepSpeed, whose engine calls it; one that does not call the original would lose the step."""
    engine, _, returned = begin(sgd, lr=0.1)
    called, original = [], returned.step

    def counted(closure=None):
        called.append(closure)
        return original(closure)

    returned.step = counted
    before = engine.module.weight.detach().clone()
    step(engine)
    assert len(called) == 1 and not torch.equal(before, engine.module.weight)
    returned.step = lambda: None
    with pytest.raises(RuntimeError, match=r"engine.optimizer.step was replaced by a function that does not call"):
        step(engine)
    engine.destroy()


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.NAdam])
@pytest.mark.parametrize("of_client", [True, False])
def test_a_hook_before_the_step_may_change_gradients_at_stage_0(optimizer, of_client):
    def halve(owner, *_):
        for group in owner.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
                p.grad = p.grad + 1

    engine, client, returned = begin(optimizer, lr=0.1)
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    reference = optimizer(plain.parameters(), lr=0.1)
    for owner in (client if of_client else returned, reference):
        owner.register_step_pre_hook(halve)
    for _ in range(2):
        step(engine)
        reference.zero_grad()
        plain(torch.ones(1, 4)).square().sum().backward()
        reference.step()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach())
    engine.destroy()


def test_a_walk_over_states_warns_once_there_would_be_some(caplog):
    engine, client, returned = begin(adamw)
    with caplog.at_level("WARNING", logger=logger.name):
        for owner in (client, returned):
            assert not list(owner.state.values()) and not owner.state.get(engine.module.weight)
        assert "optimizer.state" not in caplog.text
        step(engine)
        for state in client.state.values():
            state["exp_avg"].zero_()
        list(returned.state)
    assert caplog.text.count("optimizer.state is empty (read by values)") == 1
    assert "safe_set_full_optimizer_state" in caplog.text
    engine.destroy()


# The library


def of_the_library(process) -> dict[str, object]:
    """Effects of `parallelize(torch_optimizer=)` on the caller's object."""
    model, called, found = nn.Linear(4, 4), [], {}
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    options = {"process": process, "optimizer": ztk.OptimizerPolicy(name="torch")}
    engine = ztk.parallelize(model, torch_optimizer=optimizer, **options)

    def train() -> None:
        engine.backward(engine(torch.ones(1, 4)).square().sum())
        engine.step()

    train()
    found["called"] = list(called)

    def added() -> None:
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
        train()

    for name, call in {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "state": lambda: optimizer.state[model.weight],
        "add_param_group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "added": added,
    }.items():
        try:
            found[name] = call()
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    engine.close()
    found["closed"] = sorted(optimizer.state_dict())
    return found


def test_the_librarys_optimizer_runs_its_hooks_and_refuses_the_rest(ranks):
    found = ranks(1).run(of_the_library)[0]
    assert found["called"] == ["before", "after"]
    assert "call engine.step() instead" in found["step"]
    assert "ztk.checkpoint.save" in found["state_dict"] and "ztk.checkpoint.save" in found["state"]
    assert "Give all groups to parallelize" in found["add_param_group"]
    assert "came into it" in found["added"] and "parallelize" in found["added"]
    assert found["closed"] == ["param_groups", "state"]
