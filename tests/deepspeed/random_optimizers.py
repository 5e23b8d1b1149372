"""Optimizers of random scripts, and their changes after `initialize`: see `random_scripts`.

KINDS: SGD by the configuration, torch's optimizers as objects, and classes whose step reads more than groups and states, some of which are
declared elementwise.
LATE: changes made once, after `LATE_STEP` iterations or before the first one.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ztk.optim.script_optimizer import unhooked

KINDS = (
    "config",
    *2 * ("torch", "dampened", "in place", "attribute"),
    "centred",
    "identity",
)  # the last two step full parameters
HOOKS = (*2 * ("pre hook", "post hook", "scheduler"), "wrapped step", "lost step")  # from the first iteration on
CHANGES = (*2 * ("lr", "decay", "momentum"), "maximize", "nesterov", "dampening", "taken out", "new list")  # of groups
USES = ("walk", "reload", "second step")  # of states and steps
REFUSED = ("wrapped step", "lost step", "maximize", "nesterov", "dampening", "taken out", "new list", "second step")
LATE = ("none", *HOOKS, *CHANGES, *USES)
LATE_STEP, LR = 2, 0.05
# Torch wraps the step of a class when its first object is made, and a derived class that calls the wrapped one runs all hooks twice.
_SGD_STEP = unhooked(torch.optim.SGD.step)
# Warnings of rank 0 for a script's lines without effect.
WARNINGS = ("p.grad is None", "optimizer.state is empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """kind: of KINDS. late: of LATE. of_client: it is done with the object that was passed, not with the one that initialize returned."""

    kind: str
    late: str
    of_client: bool

    @staticmethod
    def draw(rng: random.Random) -> "Drawn":
        kind = rng.choice(KINDS[1:]) if rng.random() < 0.4 else KINDS[0]
        late = rng.choice(LATE[1:]) if rng.random() < 0.3 else LATE[0]
        return Drawn(kind=kind, late=late, of_client=rng.random() < 0.5)

    def heeded(self, *, momentum: float) -> "Drawn":
        """The script without requests that an engine refuses."""
        return Drawn(
            kind=self.kind,
            late="lr" if self.late in REFUSED or (self.late == "momentum" and not momentum) else self.late,
            of_client=self.of_client and self.late != "reload",
        )


class InPlace(torch.optim.SGD):
    """Scales gradients in place: by the parameter's attribute, and so that decay adds to them."""

    elementwise = True
    decay = 0.1

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=self.decay).mul_(getattr(p, "lr_scale", 1.0))
        return _SGD_STEP(self, closure)


class Scaled(InPlace):
    decay = 0.0


class Centred(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        return _SGD_STEP(self, closure)


class Excluding(torch.optim.SGD):
    """Leaves the parameters of a set alone."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.excluded = {params[0]}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p in self.excluded:
                    p.grad.zero_()
        return _SGD_STEP(self, closure)


def optimizer_of(drawn: Drawn, *, module: nn.Module, momentum: float, decays: bool) -> torch.optim.SGD:
    """decays: the script's parameters always have gradients. An engine decays parameters without one, torch does not (documented)."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if drawn.kind in ("in place", "attribute"):
        parameters[0].lr_scale = 0.25
    made = {"in place": InPlace if decays else Scaled, "attribute": Scaled, "centred": Centred, "identity": Excluding}
    dampening = 0.5 if drawn.kind == "dampened" else 0.0
    return made.get(drawn.kind, torch.optim.SGD)(parameters, lr=LR, momentum=momentum, dampening=dampening)


def begin_late(drawn: Drawn, *, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Hooks and similar changes. Returns a function to call after each step."""
    original = optimizer.step
    match drawn.late:
        case "pre hook":
            optimizer.register_step_pre_hook(_halve_gradients)
        case "post hook":
            optimizer.register_step_post_hook(_shrink)
        case "wrapped step":

            def wrapped(*args, **kwargs):
                original(*args, **kwargs)
                optimizer.param_groups[0]["lr"] *= 0.5

            optimizer.step = wrapped
        case "lost step":
            optimizer.step = lambda *_, **__: None
        case "scheduler":
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5).step
    return lambda: None


def change_late(drawn: Drawn, *, optimizer: torch.optim.Optimizer, number: int, decays: bool) -> None:
    """After the step of iteration `number`."""
    if number != LATE_STEP:
        return
    group = optimizer.param_groups[0]
    match drawn.late:
        case "lr":
            group["lr"] *= 0.5  # a larger one would enlarge the rounding of fp16
        case "decay":
            group["weight_decay"] = 0.1 * decays
        case "momentum":
            group["momentum"] = 0.5
        case "maximize" | "nesterov":
            group[drawn.late] = True
        case "dampening":
            group["dampening"] = 0.25
        case "taken out":
            del group["params"][0]
        case "new list":
            optimizer.param_groups = [{**group, "lr": 0.5 * group["lr"]}]
        case "walk":
            for state in optimizer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"].zero_()
        case "reload":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        case "second step":
            optimizer.step()


def _halve_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.mul_(0.9)
