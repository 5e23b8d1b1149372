"""Assignment of hyperparameters to parameters."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk import kernels
from ztk.core.policies.optimizer import OptimizerPolicy, ParameterGroup
from ztk.optim.muon import scale_of


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperParameters:
    """One row of the table that the step's control kernel reads, named as in `ztk.kernels.Hyper`. 0 for values that the optimizer
    does not have.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    uncorrected: float = 0.0  # 1: without bias correction
    muon_scale: float = 0.0  # factor on the rate of Muon's matrices, not in the table; 0 for the other optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTable:
    """The rows in use, and the row number of every parameter."""

    rows: tuple[HyperParameters, ...]
    row_of: dict[str, int]

    def hyper(self, *, device: torch.device | str = "cpu") -> Tensor:
        """Float32 [rows, 8] in the layout that `ztk.kernels.step_control` reads."""
        table = torch.zeros(len(self.rows), kernels.HYPER_COLUMNS, dtype=torch.float32)
        for index, row in enumerate(self.rows):
            for column in kernels.Hyper:
                table[index, column] = getattr(row, column.name)
        return table.to(device)


def group_parameters(
    policy: OptimizerPolicy, *, shapes: Mapping[str, Sequence[int]], tables: Collection[str] = ()
) -> GroupTable:
    """Assigns a row to every parameter.

    shapes: full name -> shape of the full parameter (not of a shard), in the order of the model, so that all ranks number their rows alike.
    tables: names of embedding weights, which Muon does not treat as matrices.

    Raises ValueError for a group whose pattern matches no parameter that an earlier group has not taken.
    """
    row_numbers: dict[tuple[int, HyperParameters], int] = {}
    row_of = {}
    matched = set()
    for name, shape in shapes.items():
        number = _first_match(policy.groups, name=name)
        matched.add(number)
        group = None if number is None else policy.groups[number]
        row = _row(policy, group=group, shape=shape, by_muon=_is_matrix(policy, name=name, shape=shape, tables=tables))
        key = (-1 if number is None else number, row)
        row_of[name] = row_numbers.setdefault(key, len(row_numbers))
    for number, group in enumerate(policy.groups):
        if number not in matched:
            raise ValueError(
                f"optimizer.groups pattern={group.pattern!r}: matches no parameter that earlier groups left; "
                f"parameters are named like {', '.join(list(shapes)[:3])}"
            )
    return GroupTable(rows=tuple(row for _, row in row_numbers), row_of=row_of)


def _first_match(groups: Sequence[ParameterGroup], *, name: str) -> int | None:
    return next((number for number, group in enumerate(groups) if re.search(group.pattern, name)), None)


def _is_matrix(policy: OptimizerPolicy, *, name: str, shape: Sequence[int], tables: Collection[str]) -> bool:
    """Whether Muon updates the parameter."""
    if policy.adam_names is None or len(shape) != 2 or name in tables:
        return False
    return re.search(policy.adam_names, name) is None


def _row(
    policy: OptimizerPolicy, *, group: ParameterGroup | None, shape: Sequence[int], by_muon: bool
) -> HyperParameters:
    def value(key: str):
        own = None if group is None else getattr(group, key)
        return getattr(policy, key) if own is None else own

    decays = len(shape) >= 2 or policy.decay_all or (group is not None and group.weight_decay is not None)
    beta1, beta2 = value("betas") or (0.0, 0.0)
    own_rate = None if group is None else group.lr
    return HyperParameters(
        lr=value("lr") if policy.adam_lr is None or by_muon or own_rate is not None else policy.adam_lr,
        beta1=beta1,
        beta2=beta2,
        eps=value("eps") or 0.0,
        weight_decay=value("weight_decay") if decays else 0.0,
        momentum=value("momentum"),
        uncorrected=float(not policy.bias_correction),
        muon_scale=scale_of(shape, rule=policy.adjust_lr) if by_muon else 0.0,
    )
