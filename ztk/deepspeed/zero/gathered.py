"""`GatheredParameters`: parameters whole for a while, and changes taken over."""

from collections.abc import Iterable

import torch
from torch import nn

from ztk.deepspeed.owners import Owner, owner_of
from ztk.zero.bucket import Bucket, ParameterState
from ztk.zero.whole import write_whole


class GatheredParameters:
    """Inside, the parameters are whole on every rank. Every rank enters and leaves.

    params: a parameter or parameters; those of no engine are whole anyway.
    modifier_rank: the rank whose changes inside become everybody's, master weights included (in 16 bit a value that was not changed
        keeps its fp32 master). None: changes are lost at stage 3, and must not be made below it.
    fwd_module: accepted as in DeepSpeed; every parameter knows its engine.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        del fwd_module
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        found = [(parameter, owner_of(parameter)) for parameter in given] if enabled else []
        self._owned: list[tuple[nn.Parameter, Owner]] = [(p, owner) for p, owner in found if owner is not None]
        self._modifier_rank = modifier_rank
        self._borrowed: dict[Bucket, Owner] = {}

    def __enter__(self) -> None:
        for _, owner in self._owned:
            if owner.bucket.state is ParameterState.sharded:
                owner.engine.zero.gathering.borrow(owner.bucket)
                self._borrowed[owner.bucket] = owner

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None and self._modifier_rank is not None:
                self._take_over()
        finally:
            for bucket, owner in self._borrowed.items():
                owner.engine.zero.gathering.release(bucket)
            self._borrowed = {}

    def _take_over(self) -> None:
        changed: dict[Bucket, dict[str, torch.Tensor]] = {}
        owners = {}
        for parameter, owner in self._owned:
            owner.engine.comm.broadcast(parameter.data, source=self._modifier_rank, label=owner.name).wait()
            changed.setdefault(owner.bucket, {})[owner.name] = parameter.data
            owners[owner.bucket] = owner
        for bucket, values in changed.items():
            write_whole(owners[bucket].engine.zero, bucket=bucket, values=values, kind="master")
