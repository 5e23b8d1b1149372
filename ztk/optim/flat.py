"""One fused step over one flat shard."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk import kernels
from ztk.optim.lamb import Lamb
from ztk.optim.muon import Muon
from ztk.policies.optimizer import OptimizerPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatOptimizer:
    """An optimizer as the states it keeps beside the master weights (float32, the shard's size, zero at the start) and
    one fused update. It has no tensors of its own: the store keeps the states.

    muon: how the matrices of rows with a `muon_scale` are updated, whose momentum is the first state; None: there are none.
    lamb: what updates everything in place of `kernel`, as the norms of a parameter are over several shards.
    """

    state_names: tuple[str, ...]
    kernel: Callable[..., None]
    options: dict[str, bool]
    muon: Muon | None = None
    lamb: Lamb | None = None

    def step(
        self, master: Tensor, *, grad: Tensor, states: tuple[Tensor, ...], control: Tensor, out: Tensor | None = None
    ) -> None:
        """Updates `master` and `states` in place from the scaled, summed gradient.

        master, states: float32 [n]; grad: float32, bfloat16 or float16 [n]; control: one row of the control table,
        written by `ztk.kernels.step_control`, which says whether to skip, the factor on the gradient and the
        hyperparameters;
        out: 16-bit [n] that receives the cast master. On a skipped step nothing is touched.
        """
        assert len(states) == len(self.state_names), (len(states), self.state_names)
        named = dict(zip(self.state_names, states, strict=True))
        self.kernel(master, grad=grad, control=control, out=out, **named, **self.options)


def flat_optimizer(policy: OptimizerPolicy) -> FlatOptimizer:
    """The fused step of the optimizer `policy.name`. An unknown name, which the policy refuses, is an AssertionError."""
    muon = lamb = None
    match policy.name:
        case "muon":
            names, kernel, options = ("exp_avg", "exp_avg_sq"), kernels.adamw, {"decoupled": True}
            assert policy.ns_steps is not None, "settled"
            dtype = torch.float32 if policy.ns_dtype == "fp32" else torch.bfloat16
            muon = Muon(steps=policy.ns_steps, nesterov=bool(policy.nesterov), dtype=dtype)
        case "adamw" | "adam":
            names, kernel, options = ("exp_avg", "exp_avg_sq"), kernels.adamw, {"decoupled": policy.name == "adamw"}
        case "lamb":
            names, kernel = ("exp_avg", "exp_avg_sq"), kernels.adamw
            assert policy.min_coeff is not None and policy.max_coeff is not None, "settled"
            options, lamb = {}, Lamb(min_coeff=policy.min_coeff, max_coeff=policy.max_coeff)
        case "lion":
            names, kernel, options = ("exp_avg",), kernels.lion, {}
        case "sgd" if policy.momentum:
            names, kernel, options = ("momentum_buffer",), kernels.sgd, {"nesterov": bool(policy.nesterov)}
        case "sgd":
            names, kernel, options = (), kernels.sgd, {}
        case _:
            raise AssertionError(policy.name)  # the policy has checked it
    return FlatOptimizer(state_names=names, kernel=kernel, options=options, muon=muon, lamb=lamb)
