"""DeepSpeed's optimizers by class: `deepspeed.ops.adam.FusedAdam` and others.

Passed to `initialize`, they select one of ztk's optimizers, with their groups. There is one Adam for all devices, without a compilation.
Without an engine they step by themselves, like torch's.
"""

from collections.abc import Iterable

import torch


class _GradNone:
    """`set_grad_none`: whether `zero_grad` drops gradients or fills them with zeros."""

    set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        # pyrefly: ignore[missing-attribute]  # mixed into an optimizer
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


class _Adam(torch.optim.Adam):
    """Adam with optional bias correction, which torch's always applies."""

    def _keep(self, bias_correction: bool) -> None:
        """Stores the option in the groups, where `initialize` reads it."""
        for group in (self.defaults, *self.param_groups):
            group["bias_correction"] = bias_correction

    def step(self, closure=None):
        """Runs torch's step. Raises RuntimeError without bias correction, which only an engine's step supports."""
        if not all(group["bias_correction"] for group in self.param_groups):
            raise RuntimeError(
                "bias_correction=False: this optimizer steps so only inside an engine; pass it to initialize"
            )
        return super().step(closure)


class FusedAdam(_GradNone, _Adam):
    """AdamW, or Adam with L2 regularisation if adam_w_mode is false. Raises ValueError for options that ztk's Adam does not support."""

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
        _check(amsgrad=amsgrad)
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )
        self._keep(bias_correction)
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none


class DeepSpeedCPUAdam(_Adam):
    """FusedAdam under the name for offloaded runs. `offload_optimizer` decides where it runs."""

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
        _check(amsgrad=amsgrad, fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adamw_mode
        )
        self._keep(bias_correction)
        self.adam_w_mode = adamw_mode


class _Stepping(torch.optim.Optimizer):
    """Steps like torch's optimizers: calls `_update` for every parameter with a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group=group)
        return loss

    def _update(self, parameter: torch.Tensor, *, group: dict) -> None:
        raise NotImplementedError


class _Lion(_Stepping):
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675: the sign of an average, and decoupled decay."""

    def __init__(self, params: Iterable, *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: torch.Tensor, *, group: dict) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
        direction = average.lerp(parameter.grad, 1 - beta1).sign_()
        parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        average.lerp_(parameter.grad, 1 - beta2)


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
    """Lion under the name for offloaded runs."""

    def __init__(
        self,
        model_params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """`deepspeed.ops.adagrad`: torch's Adagrad."""

    elementwise = True  # runs over shards

    def __init__(
        self,
        model_params: Iterable,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(amsgrad=amsgrad, fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLamb(_Stepping):
    """`deepspeed.ops.lamb`: Adam with each parameter's step scaled by the ratio of the norms of its weights and its update.

    min_coeff, max_coeff: bounds of the ratio. max_grad_norm: must be 0, because `gradient_clipping` clips. You et al. 2020,
    https://arxiv.org/abs/1904.00962
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _check(eps_inside_sqrt=eps_inside_sqrt, amsgrad=amsgrad, max_grad_norm=max_grad_norm)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults | {"max_coeff": max_coeff, "min_coeff": min_coeff})

    def _update(self, parameter: torch.Tensor, *, group: dict) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        average = state.setdefault("exp_avg", torch.zeros_like(parameter))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
        state["step"] = step = state.get("step", 0) + 1
        average.lerp_(parameter.grad, 1 - beta1)
        square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        update = average / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        weight, length = parameter.norm(), update.norm()
        ratio = (weight / length).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight > 0) & (length > 0), ratio, torch.ones_like(ratio))
        parameter.sub_(update * (rate * ratio))


# Options with one supported value.
_ONLY = {"amsgrad": False, "eps_inside_sqrt": False, "fp32_optimizer_states": True, "max_grad_norm": 0.0}


def _check(**options: object) -> None:
    """Raises ValueError for an option with another value than in `_ONLY`."""
    for name, given in options.items():
        if given != _ONLY[name]:
            raise ValueError(
                f"{name}={given}: not offered by ztk, whose optimizers have {name}={_ONLY[name]}; leave it out"
            )
