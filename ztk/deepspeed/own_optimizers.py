"""DeepSpeed's optimizers by class: `deepspeed.ops.adam.FusedAdam` and its kin.

Given to `initialize` they say which of ztk's optimizers runs, with their groups: there is one Adam for every place, and it needs no
compiler. Without an engine they step by themselves, as torch's do.
"""

from collections.abc import Iterable

import torch


class _GradNone:
    """`set_grad_none`: whether `zero_grad` drops gradients or fills them with zeros."""

    set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        # pyrefly: ignore[missing-attribute]  # mixed into an optimizer
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_GradNone, torch.optim.Adam):
    """AdamW, or Adam with L2 regularisation if adam_w_mode is false. Raises ValueError for what ztk's Adam does not do."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _must_be(bias_correction=(bias_correction, True), amsgrad=(amsgrad, False))
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none


class DeepSpeedCPUAdam(torch.optim.Adam):
    """The same under the name that offloaded runs use; where it runs is up to `offload_optimizer`."""

    def __init__(
        self,
        model_params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _must_be(
            bias_correction=(bias_correction, True),
            amsgrad=(amsgrad, False),
            fp32_optimizer_states=(fp32_optimizer_states, True),
        )
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adamw_mode
        )
        self.adam_w_mode = adamw_mode


class _Lion(torch.optim.Optimizer):
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675: the sign of an average, and decoupled decay."""

    def __init__(self, params: Iterable, *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                direction = average.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                average.lerp_(parameter.grad, 1 - beta2)
        return loss


class FusedLion(_GradNone, _Lion):
    """Lion."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none


class DeepSpeedCPULion(_Lion):
    """The same under the name that offloaded runs use."""

    def __init__(
        self,
        model_params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _must_be(fp32_optimizer_states=(fp32_optimizer_states, True))
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def _must_be(**options: tuple[object, object]) -> None:
    """option=(given, the value that ztk has)."""
    for name, (given, only) in options.items():
        if given != only:
            raise ValueError(f"{name}={given}: not offered by ztk, whose optimizers have {name}={only}; leave it out")
