"""Work of the host in a planned step that is not an operation.

On a CPU, Python takes time from computing when it accepts a gradient, sends a request to the disk, or decides about an operation of a
recomputed block. With a GPU, an update in main memory delays the next use of its parameters: the step waits for the host, or the gather of
a bucket does. The functions that do this are wrapped.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ztk.core.runtime.io import Direction
from ztk.parallel.recompute import selective
from ztk.planner.kinds import GRADIENT, INTERCEPTED, REQUEST
from ztk.planner.lanes import Lanes
from ztk.planner.tracker import is_work
from ztk.zero.buckets.residency import ParameterState, Residency
from ztk.zero.offload.planned import PlannedIo
from ztk.zero.reduction import GradientReduction
from ztk.zero.update import update
from ztk.zero.update.update import ShardUpdate


@contextmanager
def watched_host(lanes: Lanes | None) -> Iterator[None]:
    """Context in which the clock of `lanes` includes this work. If None, there is no clock."""
    if lanes is None:
        yield
        return
    accept, request, choose = GradientReduction.accept, PlannedIo.request, selective.choose
    run, update_behind = ShardUpdate.run, ShardUpdate._update_behind
    start_gather, finish_work = Residency.start_gather, Residency._finish_work

    def accepted(reduction: GradientReduction, *args: Any, **kwargs: Any) -> None:
        lanes.host_work(GRADIENT)
        accept(reduction, *args, **kwargs)

    def requested(io: PlannedIo, direction: Direction, *, nbytes: int, **kwargs: Any) -> None:
        lanes.host_work(REQUEST, amount=nbytes)
        if direction is Direction.read:
            lanes.disk_reads(nbytes)
        request(io, direction, nbytes=nbytes, **kwargs)

    def chosen(ctx: object, func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> object:
        if is_work(func):
            dtype = next((value.dtype for value in args if isinstance(value, Tensor)), torch.float32)
            lanes.host_work(INTERCEPTED, dtype=dtype)
        return choose(ctx, func, *args, **kwargs)

    def ran(shards: ShardUpdate, *args: Any, **kwargs: Any) -> None:
        run(shards, *args, **kwargs)
        lanes.wait_until(
            lanes.loaded, lane="pcie"
        )  # parameters that are full on every rank, unless a gather waited for them

    def updated_behind(shards: ShardUpdate, *args: Any, **kwargs: Any) -> None:
        with lanes.behind():
            update_behind(shards, *args, **kwargs)

    fetched: dict[Residency, float] = {}

    def started_gather(residency: Residency, *, is_exact: bool = False) -> None:
        starts = residency.state is ParameterState.sharded
        start_gather(residency, is_exact=is_exact)
        if starts:
            fetched[residency] = lanes.loaded

    def finished_work(residency: Residency) -> None:
        before = lanes.loaded
        finish_work(residency)
        own = lanes.loaded if lanes.loaded > before else fetched.pop(residency, 0.0)
        lanes.wait_until(own, lane="pcie")

    class Updated(Future):
        """Done at a time of the clock."""

        def done(self) -> bool:
            return super().done() and super().result() <= lanes.now

        def set_result(self, result: object) -> None:
            super().set_result(lanes.updated())

        def result(self, timeout: float | None = None) -> None:
            lanes.wait_until(super().result(timeout), lane="host")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(update, "Future", Updated))
        stack.enter_context(mock.patch.object(ShardUpdate, "run", ran))
        stack.enter_context(mock.patch.object(ShardUpdate, "_update_behind", updated_behind))
        stack.enter_context(mock.patch.object(Residency, "start_gather", started_gather))
        stack.enter_context(mock.patch.object(Residency, "_finish_work", finished_work))
        stack.enter_context(mock.patch.object(GradientReduction, "accept", accepted))
        stack.enter_context(mock.patch.object(PlannedIo, "request", requested))
        stack.enter_context(mock.patch.object(selective, "choose", chosen))
        yield
