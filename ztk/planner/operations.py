"""Counts the operations of a model's forward and backward over tensors without values, as torch executes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.core.policies.recompute import RecomputeMode, RecomputePolicy
from ztk.core.runtime.planned import PLANNED
from ztk.parallel.recompute import recompute_blocks
from ztk.planner.attention_costs import fused_attention
from ztk.planner.grouped import RESULTS
from ztk.planner.trace import planned, values_are_refused
from ztk.planner.tracker import flops_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """model: operations that MFU counts; hardware: operations that HFU counts, see `ztk.core.policies.utilization`."""

    model: int
    hardware: int


def count_operations(
    build: Callable[[], nn.Module], *, batch: Any, recompute: RecomputePolicy | None = None
) -> Operations:
    """Counts the operations of one forward and backward.

    build: returns the model, whose forward returns its loss; called with torch's meta device as default. batch: the arguments of that
    forward, a tuple or a dict of keywords. A frozen weight has no gradient, so it counts four operations instead of six. Raises ValueError
    for a model that reads its tensors' values or returns no loss.
    """
    plain = _counted(build, batch=batch, recompute=None)
    is_plain = recompute is None or recompute.mode is RecomputeMode.none
    counted = plain if is_plain else _counted(build, batch=batch, recompute=recompute)
    return Operations(model=plain.flops - plain.again, hardware=counted.flops)


class _Counter(TorchDispatchMode):
    """flops: operations of matrix products and attention. again: the part of them in which attention's backward recomputes scores."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.again = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = RESULTS.get(func, func)(*args, **kwargs)
        flops = flops_of(func, args=args, kwargs=kwargs, out=out)
        self.flops += flops
        if "attention" in func.name() and "backward" in func.name():
            self.again += flops // 5
        return out


def _counted(build: Callable[[], nn.Module], *, batch: Any, recompute: RecomputePolicy | None) -> _Counter:
    with torch.device(PLANNED):
        model = build()
    if recompute is not None:
        where = RecomputePolicy(mode=recompute.mode, every=recompute.every, modules=recompute.modules)
        recompute_blocks(model, policy=where)
    arguments = planned(batch)
    counter = _Counter()
    with counter, fused_attention(), values_are_refused():
        loss = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("the model's forward returns no scalar: wrap the model in one that returns its loss")
        loss.backward()
    return counter
