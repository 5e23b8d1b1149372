"""One fused step over one flat shard."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ztk import kernels
from ztk.core.policies.optimizer import OptimizerPolicy
from ztk.optim.eight_bit import GROUP
from ztk.optim.lamb import Lamb
from ztk.optim.muon import Muon
from ztk.optim.states import StateFormat, StateRow


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatOptimizer:
    """An optimizer defined by its states, which start at zero, and one fused update of master weights and states. It owns no tensors: the
    store keeps the states.

    format: layout of the states, and the dtype of the master weights. is_stochastic: the kernel rounds with bits drawn by the position of
    an element. writes_out: the kernel casts the master weights itself. is_wide: the kernel updates copies in float32, which are rounded to
    the dtypes of the rows.
    muon: the update of matrices (rows with a `muon_scale`), whose momentum is the first state. None if there are none.
    lamb: the update that replaces `kernel` if the norms of a parameter span several shards.
    """

    format: StateFormat
    kernel: Callable[..., None]
    options: dict[str, int] = field(default_factory=dict)
    is_stochastic: bool = False
    writes_out: bool = True
    is_wide: bool = False
    muon: Muon | None = None
    lamb: Lamb | None = None

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states in a checkpoint."""
        return self.format.names

    def step(
        self,
        master: Tensor,
        *,
        grad: Tensor,
        states: tuple[Tensor, ...],
        control: Tensor,
        out: Tensor | None = None,
        position: int = 0,
        tiles: Tensor | None = None,
    ) -> None:
        """Updates `master` and `states` in place from the scaled, summed gradient. A skipped step changes no value.

        master: [n] of the format's dtype; states: its rows for these elements; grad: float32, bfloat16 or float16 [n]; control: one row of
        the control table, written by `ztk.kernels.step_control`, with the skip flag, the factor on the gradient and the hyperparameters;
        position: index of the first element in the model; out: 16-bit [n] that receives the cast master.
        tiles: made by `ztk.kernels.tiles_of`; maps elements to rows of `control`, which is then [groups, 16], and to positions. If omitted, one
        row applies to all.
        """
        options = (
            self.options
            | ({"start": position} if self.is_stochastic else {})
            | ({"out": out} if self.writes_out else {})
            | ({} if tiles is None else {"tiles": tiles})
        )
        kept = (master, *states)
        values = tuple(value.to(torch.float32) for value in kept) if self.is_wide else kept
        named = {row.name: state for row, state in zip(self.format.rows, values[1:], strict=True)}
        self.kernel(values[0], grad=grad, control=control, **named, **options)
        for narrow, value in zip(kept, values, strict=True):
            if narrow is not value:
                narrow.copy_(value)
        if out is not None and not self.writes_out:
            out.copy_(master)

    def rounded(self, *, states: torch.dtype) -> "FlatOptimizer":
        """The optimizer with bfloat16 parameters as their own master weights, and states of dtype `states`: computes in float32, rounds to
        nearest.

        Raises ValueError for an optimizer whose update is not elementwise, or whose states are compact already.
        """
        if self.muon is not None or self.lamb is not None or not self.format.is_plain:
            raise ValueError(
                "precision.bf16_master=true (bf16.bf16_master_weights_and_grads of a ds_config) works only with adamw, adam, lion or sgd "
                "and optimizer.states=fp32: use one of them, or leave it out"
            )
        rows = tuple(replace(row, dtype=states) for row in self.format.rows)
        narrow = replace(self.format, rows=rows, master=torch.bfloat16)
        return replace(self, format=narrow, writes_out=False, is_wide=True, options=self.options | {"out": None})


def flat_optimizer(policy: OptimizerPolicy, *, master: str = "fp32") -> FlatOptimizer:
    """The fused step of the optimizer `policy.name` with the states `policy.states`. master: "fp32" or "stochastic", see
    `ztk.core.policies.compact`. Raises AssertionError for combinations that the policies refuse."""
    if policy.states != "fp32":
        return _compact(policy, master=master)
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
    return FlatOptimizer(format=StateFormat.float32(names), kernel=kernel, options=options, muon=muon, lamb=lamb)


def _compact(policy: OptimizerPolicy, *, master: str) -> FlatOptimizer:
    """AdamW with smaller states."""
    names, bf16 = ("exp_avg", "exp_avg_sq"), torch.bfloat16
    halves = tuple(StateRow(name=name, dtype=bf16) for name in names)
    common = {"options": {"seed": policy.rounding_seed}, "is_stochastic": True}
    match policy.states, master:
        case "bf16", "fp32":
            return FlatOptimizer(format=StateFormat(rows=halves, names=names), kernel=kernels.adamw_bf16, **common)
        case "bf16", "stochastic":
            states = StateFormat(rows=halves, names=names, master=bf16)
            return FlatOptimizer(format=states, kernel=kernels.adamw_stochastic, writes_out=False, **common)
        case "8bit", "stochastic":
            rows = (
                StateRow(name="low", dtype=torch.int8),
                StateRow(name="code_m", dtype=torch.int8),
                StateRow(name="code_v", dtype=torch.uint8),
                StateRow(name="scale_m", dtype=bf16, group=GROUP),
                StateRow(name="scale_v", dtype=bf16, group=GROUP),
            )
            states = StateFormat(rows=rows, names=names, master=bf16, is_eight_bit=True)
            return FlatOptimizer(format=states, kernel=kernels.adamw_8bit, writes_out=False, **common)
    raise AssertionError((policy.states, master))
