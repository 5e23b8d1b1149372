"""Which optimizer runs, with which hyperparameters, on which parameters."""

import math
import re
from dataclasses import dataclass

NAMES = ("adamw", "adam", "sgd", "lion")
_DEFAULT_BETAS = {"adamw": (0.9, 0.95), "adam": (0.9, 0.95), "lion": (0.9, 0.99)}
_DEFAULT_EPS = {"adamw": 1e-8, "adam": 1e-8}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Hyperparameters for the parameters whose full name contains a match of the regular expression `pattern`.

    None takes the value of the policy. A `weight_decay` given here holds for every parameter of the group, also for
    those that the policy would leave undecayed.
    """

    pattern: str
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"optimizer.groups pattern={self.pattern!r}: not a regular expression ({error})") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerPolicy:
    """One optimizer for the whole model.

    name: adamw (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), adam (Kingma and Ba 2015,
        https://arxiv.org/abs/1412.6980, weight decay as an L2 term), sgd, or lion (Chen et al. 2023,
        https://arxiv.org/abs/2302.06675).
    betas: None means (0.9, 0.95) for adam and adamw, (0.9, 0.99) for lion.
    eps: None means 1e-8; adam and adamw only.
    momentum, nesterov: sgd only.
    weight_decay: decays the parameters with two or more dimensions; `decay_all` decays norms and biases too.
    clip_grad_norm: upper bound of the norm of the whole model's averaged gradient; 0 leaves it alone.
    groups: the first group whose pattern matches a parameter's name sets its hyperparameters.

    Raises ValueError for a value out of range and for an option that the optimizer does not have.
    """

    name: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    clip_grad_norm: float = 0.0
    decay_all: bool = False
    groups: tuple[ParameterGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"optimizer.name={self.name}: must be one of {', '.join(NAMES)}")
        if self.betas is None and self.name in _DEFAULT_BETAS:
            object.__setattr__(self, "betas", _DEFAULT_BETAS[self.name])
        if self.eps is None and self.name in _DEFAULT_EPS:
            object.__setattr__(self, "eps", _DEFAULT_EPS[self.name])
        object.__setattr__(self, "groups", tuple(self.groups))
        if not (math.isfinite(self.clip_grad_norm) and self.clip_grad_norm >= 0):
            raise ValueError(
                f"optimizer.clip_grad_norm={self.clip_grad_norm}: must be above 0, such as 1.0, or 0 for no clipping"
            )
        if self.nesterov and self.name == "sgd" and not self.momentum:
            raise ValueError("optimizer.nesterov=true needs momentum: add optimizer.momentum=0.9")
        if self.nesterov and self.name != "sgd":
            raise ValueError(
                f"optimizer.nesterov=true has no effect with optimizer={self.name}: leave it out, or use optimizer=sgd"
            )
        for group in (self, *self.groups):
            _check_values(self.name, group)
            if group is not self and self.name == "sgd" and bool(group.momentum) and not self.momentum:
                raise ValueError(
                    f"optimizer.groups momentum={group.momentum} for {group.pattern!r} needs a momentum buffer: "
                    "set optimizer.momentum too, to a small value if the others shall have little"
                )


def _check_values(name: str, group: OptimizerPolicy | ParameterGroup) -> None:
    """Ranges, and options that optimizer `name` lacks. None passes: it stands for the policy's value, or for
    nothing.
    """
    place = f"optimizer.groups[{group.pattern!r}]." if isinstance(group, ParameterGroup) else "optimizer."
    if group.lr is not None and not (math.isfinite(group.lr) and group.lr >= 0):
        raise ValueError(f"{place}lr={group.lr}: must be 0 or more and finite, such as 3e-4")
    if group.weight_decay is not None and not (math.isfinite(group.weight_decay) and group.weight_decay >= 0):
        raise ValueError(f"{place}weight_decay={group.weight_decay}: must be 0 or more, such as 0.1")
    if group.betas is not None:
        if name not in _DEFAULT_BETAS:
            raise ValueError(
                f"{place}betas={group.betas} has no effect with optimizer={name}: leave it out, or use optimizer=adamw"
            )
        if len(group.betas) != 2 or not all(0 <= beta < 1 for beta in group.betas):
            raise ValueError(f"{place}betas={group.betas}: must be two numbers from 0 to below 1, such as [0.9,0.95]")
    if group.eps is not None:
        if name not in _DEFAULT_EPS:
            raise ValueError(
                f"{place}eps={group.eps} has no effect with optimizer={name}: leave it out, or use optimizer=adamw"
            )
        if not group.eps > 0:
            raise ValueError(f"{place}eps={group.eps}: must be above 0, such as 1e-8")
    if group.momentum:
        if name != "sgd":
            raise ValueError(
                f"{place}momentum={group.momentum} has no effect with optimizer={name}: leave it out, "
                "or use optimizer=sgd"
            )
        if not 0 < group.momentum < 1:
            raise ValueError(f"{place}momentum={group.momentum}: must lie from 0 to below 1, such as 0.9")
