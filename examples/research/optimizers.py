"""Own optimizers: `optimizer=sign` is elementwise and runs over shards, `optimizer=normed` is not and steps full parameters."""

import torch


class Sign(torch.optim.Optimizer):
    """The sign of an averaged gradient."""

    elementwise = True  # every element is updated from its own weight, gradient and states

    def __init__(self, params, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(group["lr"] * average.sign())


class Normed(torch.optim.SGD):
    """Gradients divided by the norm of their parameter's."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())
