"""What the host does in a step beside operations: Python takes a gradient, hands a request to the disk, chooses what a block keeps.

On a CPU these take time from computing. No operation shows them, so the functions that do them are watched.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ztk.offload.planned import PlannedIo
from ztk.planner.lanes import GRADIENT, INTERCEPTED, REQUEST, Lanes
from ztk.planner.tracker import is_work
from ztk.recompute import selective
from ztk.zero.reduction import GradientReduction


@contextmanager
def watched_host(lanes: Lanes | None) -> Iterator[None]:
    """Inside, the clock of `lanes` runs for it. None: there is no clock."""
    if lanes is None:
        yield
        return
    accept, request, choose = GradientReduction.accept, PlannedIo.request, selective.choose

    def accepted(reduction: GradientReduction, *args: Any, **kwargs: Any) -> None:
        lanes.host_work(GRADIENT)
        accept(reduction, *args, **kwargs)

    def requested(io: PlannedIo, *args: Any, nbytes: int, **kwargs: Any) -> None:
        lanes.host_work(REQUEST, amount=nbytes)
        request(io, *args, nbytes=nbytes, **kwargs)

    def chosen(ctx: object, func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> object:
        if is_work(func):
            dtype = next((value.dtype for value in args if isinstance(value, Tensor)), torch.float32)
            lanes.host_work(INTERCEPTED, dtype=dtype)
        return choose(ctx, func, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GradientReduction, "accept", accepted))
        stack.enter_context(mock.patch.object(PlannedIo, "request", requested))
        stack.enter_context(mock.patch.object(selective, "choose", chosen))
        yield
