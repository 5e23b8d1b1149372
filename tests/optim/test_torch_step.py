"""Which torch optimizers may run over shards, and why others may not: a declaration is compared with steps over full parameters."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.device_tagged import DEVICE, gpu_tensors
from ztk.optim import TorchStep
from ztk.optim.alone import initial_state
from ztk.optim.elementwise import TORCHS, _checked, is_elementwise

CONTROL = torch.tensor([0.0, 0.5, *[0.0] * 14])  # step, with half the gradient


class Trust(torch.optim.SGD):
    """LARS's ratio of norms."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class Centred(torch.optim.SGD):
    """Gradient centralisation: rows of matrices only."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad if p.dim() == 1 else p.grad - p.grad.mean(-1, keepdim=True), alpha=group["lr"])


class Counting(torch.optim.SGD):
    made = 0

    def step(self, closure=None):
        self.made += 1
        return super().step(closure)


class Sharpness(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class Wide(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = p.detach().double()


class Listed(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("past", []).append(0)


class ClippedIfLarge(torch.optim.SGD):
    """An optimizer that treats large parameters differently, without a state that shows it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                scale = p.grad.norm() if p.numel() >= 4096 else 1.0
                p.sub_(p.grad / scale, alpha=group["lr"])


class Factored(torch.optim.SGD):
    """Matrices with both sides of 128 and more."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() == 2 and min(p.shape) >= 128:
                    self.state[p]["rows"] = p.grad.square().mean(-1)
                p.sub_(p.grad, alpha=group["lr"])


class Global(torch.optim.SGD):
    """The learning rate depends on the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = sum(p.grad.square().sum() for p in group["params"]).sqrt()
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


class CentredInPlace(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(-1, keepdim=True))
        return super().step(closure)


class ClippingLarge(torch.optim.SGD):
    """Clips only gradients with larger norms than in the first step of a trial."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 2000.0)
        return super().step(closure)


class Excluding(torch.optim.SGD):
    """Recognises parameters by identity. `how` returns an object that `is_excluded` reads."""

    def __init__(self, params, how):
        params = list(params)
        super().__init__(params, lr=0.1)
        self.excluded = how(params)
        self.unread = params

    def is_excluded(self, p):
        return p in self.excluded

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.is_excluded(p):
                    p.sub_(p.grad, alpha=group["lr"])


class ExcludingByNumber(Excluding):
    def is_excluded(self, p):
        return id(p) in self.excluded


class ByPlace(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p, scale in zip(group["params"], group["scales"], strict=False):
                p.sub_(p.grad, alpha=group["lr"] * scale)


class Marking(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.velocity = p.grad + getattr(p, "velocity", 0)
                p.sub_(p.velocity, alpha=group["lr"])


class Masked(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.mask * p.grad, alpha=group["lr"])


class Across(torch.optim.SGD):
    """Its rate is the first group's, over the number of groups."""

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.param_groups[0]["lr"] / len(self.param_groups)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate)


class Rebinding(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


SHAPES = {"a": (320,), "b": (8, 32), "c": (160, 144), "d": (5,), "e": ()}


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (CentredInPlace, "shape"),
        (ClippingLarge, "not elementwise"),
        (Marking, "sets the attribute velocity of a parameter"),
        (Trust, "not elementwise: the weights depend on other elements"),
        (Noisy, "random numbers"),
        (Centred, "shape"),
        (Global, "not elementwise"),
        (ClippedIfLarge, "not elementwise: the weights depend on other elements"),
        (Factored, "not elementwise: its state rows"),
        (torch.optim.Adafactor, "not elementwise: its state row_var"),
        (torch.optim.Muon, "its step raises|only supports 2D"),
        (torch.optim.LBFGS, "needs a closure"),
        (Sharpness, "needs a closure"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
        (Counting, "changes its attribute made"),
        (Wide, "its state sum is float64"),
        (Listed, "its state past is a list"),
        (partial(Excluding, how=lambda params: {params[1]}), "not elementwise"),
        (partial(ExcludingByNumber, how=lambda params: {id(params[1]): "bias"}), "not elementwise"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_declaration_is_refused_at_the_start_with_the_reason(make, words):
    """The check has the real groups and parameter objects. The parameters keep their values and memory."""
    own = parameters()
    memory = [parameter.data_ptr() for parameter in own.values()]
    with pytest.raises(ValueError, match=words):
        TorchStep(make(list(own.values())), parameters=own)
    assert [parameter.data_ptr() for parameter in own.values()] == memory
    assert all(parameter.grad is None and (parameter == 1).all() for parameter in own.values())


def test_the_place_in_a_group_and_tensors_at_parameters_are_refused():
    own = {f"{number}": nn.Parameter(torch.ones(4)) for number in range(7)}
    for scales, is_equal in (([1.0] * 7, True), ([1.0] * 6 + [2.0], False)):
        optimizer = ByPlace([{"params": list(own.values()), "scales": scales}])
        if is_equal:
            TorchStep(optimizer, parameters=own)
        else:
            with pytest.raises(ValueError, match="on the place in the group"):
                TorchStep(optimizer, parameters=own)
    for parameter in own.values():
        parameter.mask = torch.ones(4)
    with pytest.raises(ValueError, match="the attribute mask of a parameter is a tensor"):
        TorchStep(Masked(own.values()), parameters=own)


@pytest.mark.parametrize("make", [Across, Rebinding])
def test_a_step_that_reads_other_groups_or_rebinds_acts_over_ranges(make):
    own = {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4))}
    groups = [{"params": [own["a"]], "lr": 0.5}, {"params": [own["b"]], "lr": 0.25}]
    made = TorchStep(make(groups), parameters=own)
    made.begin_step()
    master = torch.ones(4)
    made.step(master, grad=torch.full((4,), 2.0), rows={}, control=CONTROL, places={"b": slice(0, 4)})
    assert master.tolist() == [0.75] * 4  # in both: 1 - 0.25 * (0.5 * 2)


TORCHS_CASES = {
    **{cls.__name__: cls for cls in TORCHS},
    "momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": partial(torch.optim.SGD, momentum=0.9, dampening=0.5, maximize=True),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "centered": partial(torch.optim.RMSprop, centered=True, momentum=0.9, weight_decay=0.1),
    "foreach": partial(torch.optim.Adam, foreach=True, weight_decay=0.1),
    "one by one": partial(torch.optim.Adam, foreach=False, weight_decay=0.1),
    "fused": partial(torch.optim.AdamW, fused=True),
    "fused sgd": partial(torch.optim.SGD, fused=True, momentum=0.9),
    "decaying": partial(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    "averaged": partial(torch.optim.ASGD, t0=1),
    "decoupled": partial(torch.optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
}


@pytest.mark.parametrize("name", TORCHS_CASES)
def test_torchs_own_classes_are_elementwise(name):
    """The comparison that declared classes get finds no difference, so `TORCHS` needs none."""
    optimizer = TORCHS_CASES[name](parameters().values())
    initial = {}
    for parameter, state in optimizer.state.items():
        initial[id(parameter)] = initial_state(state, parameter=parameter)
    assert is_elementwise(optimizer)
    _checked(optimizer, initial=initial, device=torch.device("cpu"), compares=True)


def test_derived_classes_are_not_elementwise_unless_declared():
    made = Trust(parameters().values())
    assert not is_elementwise(made)
    made.elementwise = True
    assert is_elementwise(made)
    assert not any(map(is_elementwise, (torch.optim.Adafactor([nn.Parameter(torch.ones(2))]),)))


def test_one_that_has_made_steps_or_lacks_a_parameter_is_refused():
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.NAdam([a])
    with pytest.raises(ValueError, match="does not hold b"):
        TorchStep(optimizer, parameters={"a": a, "b": b})
    a.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps already"):
        TorchStep(optimizer, parameters={"a": a})


def step(made: TorchStep, *, names: tuple[str, ...] = ("a",), rows: dict | None = None) -> dict[str, torch.Tensor]:
    rows = {name: torch.zeros(8) for name in made.state_names} if rows is None else rows
    made.begin_step()
    places = {name: slice(4 * index, 4 * index + 4) for index, name in enumerate(names)}
    made.step(torch.ones(8), grad=torch.full((8,), 2.0), rows=rows, control=CONTROL, places=places)
    return rows


def test_hooks_schedulers_and_random_numbers_are_left_alone():
    """The class's step runs once per piece; hooks, schedulers and random numbers of the object run once per step, elsewhere."""
    parameter, calls = nn.Parameter(torch.ones(4)), []
    optimizer = torch.optim.NAdam([parameter])
    optimizer.register_step_pre_hook(lambda *args: calls.append("pre"))
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    torch.manual_seed(3)
    expected = torch.randn(1)
    torch.manual_seed(3)
    step(TorchStep(optimizer, parameters={"a": parameter}))
    assert not calls and not optimizer.state and torch.equal(torch.randn(1), expected)


def test_a_parameter_that_is_left_out_keeps_its_own_count():
    parameters = {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4))}
    made = TorchStep(torch.optim.NAdam(parameters.values()), parameters=parameters)
    rows = step(made, names=("a", "b"))
    step(made, names=("a",), rows=rows)
    counts = {name: float(progress.scalars["step"]) for name, progress in made.progress().items()}
    assert counts == {"a": 2, "b": 1}


def test_a_state_that_comes_later_is_an_error():
    """SGD begins without momentum, so there is no row for its buffer."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, maximize=True)
    made = TorchStep(optimizer, parameters={"a": parameter})
    step(made)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuntimeError, match="momentum_buffer"):
        step(made)


class Elsewhere(torch.optim.SGD):
    """Keeps a state for parameters of a GPU only."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.is_cuda:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adagrad, partial(torch.optim.SGD, lr=0.1, momentum=0.9)]
)
def test_a_part_of_the_states_on_a_gpu_has_the_bits_of_the_host(make):
    """offload.optimizer_fraction below 1 steps on both devices, some parameters here and some there."""
    parameters = {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4))}
    found = {}
    with gpu_tensors():
        for split in (False, True):
            made = TorchStep(
                make(parameters.values()), parameters=parameters, devices=(DEVICE, "cpu") if split else ("cpu",)
            )
            places = {"a": DEVICE if split else "cpu", "b": "cpu"}
            masters = {name: torch.arange(4.0, device=device) for name, device in places.items()}
            rows = {
                name: {state: torch.zeros(4, device=masters[name].device) for state in made.state_names}
                for name in places
            }
            for _ in range(3):
                made.begin_step()
                for name, master in masters.items():
                    gradient, control = torch.full((4,), 2.0, device=master.device), CONTROL.to(master.device)
                    made.step(master, grad=gradient, rows=rows[name], control=control, places={name: slice(0, 4)})
            found[split] = [value.tolist() for name in places for value in (masters[name], *rows[name].values())]
            assert masters["a"].is_cuda == split and not masters["b"].is_cuda
    assert found[True] == found[False] != [[0.0, 1.0, 2.0, 3.0]] * len(found[True])


def test_a_class_that_cannot_step_on_both_devices_is_refused():
    parameters = {"a": nn.Parameter(torch.ones(4))}
    with gpu_tensors():
        with pytest.raises(ValueError, match=r"optimizer=AdamW: its step raises .*capturable.*parameters \(cpu\)"):
            TorchStep(
                torch.optim.AdamW(parameters.values(), capturable=True), parameters=parameters, devices=(DEVICE, "cpu")
            )
        with pytest.raises(
            ValueError, match="optimizer=Elsewhere: it keeps sum for .* offload.optimizer_fraction below 1"
        ):
            TorchStep(Elsewhere(parameters.values()), parameters=parameters, devices=(DEVICE, "cpu"))
