"""`GatheredParameters`: parameters unsharded for a while, and their changes written back."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import nn

from ztk.deepspeed.owners import Owner, owner_of
from ztk.deepspeed.zero.external import register_external_parameter
from ztk.zero.bucket import Bucket
from ztk.zero.partitioned import partitioned_of
from ztk.zero.piece_states import MASTER


class GatheredParameters:
    """Inside, the parameters are unsharded on every rank. Every rank enters and leaves; contexts may be nested and may overlap. What is
    computed with an engine's parameters inside may be differentiated after it.

    params: a parameter or parameters, in any order, of an engine or built under `zero.Init`; all others are unsharded anyway.
    modifier_rank: the rank, among those that share the parameters, whose changes inside become everybody's, master weights included (in
        16 bit a value that was not changed keeps its fp32 master). None: changes are lost at stage 3, and must not be made below it.
    fwd_module: the module whose forward uses them; noted as `register_external_parameter` does.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = _ordered(given) if enabled else []
        self._modifier_rank, self._saving = modifier_rank, ExitStack()
        if fwd_module is not None:
            for parameter in self._params:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        pin(self._params)
        for hooks in dict.fromkeys(owner.engine.zero.hooks for owner in _buckets(self._params).values()):
            self._saving.enter_context(hooks.saved_tensors())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._saving.close()
        unpin(self._params, source=self._modifier_rank if kind is None else None)


def pin(parameters: Sequence[nn.Parameter]) -> None:
    """Unshards the parameters. A collective call."""
    for parameter in _ordered(parameters):
        if (partitioned := partitioned_of(parameter)) is not None:
            partitioned.pin()
    for bucket, owner in _buckets(parameters).items():
        owner.engine.zero.gathering.pin(bucket)


def unpin(parameters: Sequence[nn.Parameter], *, source: int | None) -> None:
    """Undoes `hold`. source: the rank whose values are taken over first; None: nobody changed them. A collective call."""
    buckets = _buckets(parameters)
    try:
        if source is not None:
            _take_over(parameters, source=source)
    finally:
        for parameter in _ordered(parameters):
            if (partitioned := partitioned_of(parameter)) is not None:
                partitioned.unpin(source=source)
        for bucket, owner in buckets.items():
            owner.engine.zero.gathering.unpin(bucket)


def _take_over(parameters: Sequence[nn.Parameter], *, source: int) -> None:
    changed: dict[Bucket, dict[str, torch.Tensor]] = {}
    owners = {}
    for parameter in _ordered(parameters):
        owner = owner_of(parameter)
        if owner is not None:
            owner.bucket.comm.broadcast(parameter.data, source=source, label=owner.name).wait()
            changed.setdefault(owner.bucket, {})[owner.name] = parameter.data
            owners[owner.bucket] = owner
    for bucket, values in changed.items():
        owners[bucket].engine.zero.named_state.write(bucket, values=values, kind=MASTER)


def _ordered(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that are sharded, each once, in an order that is the same on all ranks whatever a set or a dict did to theirs."""
    found = {}
    for parameter in parameters:
        partitioned, owner = partitioned_of(parameter), owner_of(parameter)
        if partitioned is not None:
            found[0, partitioned.number] = parameter
        elif owner is not None:
            found[1, owner.number] = parameter
    return [found[key] for key in sorted(found)]


def _buckets(parameters: Iterable[nn.Parameter]) -> dict[Bucket, Owner]:
    """The engines' sharded buckets in which the parameters lie."""
    owners = [owner for parameter in _ordered(parameters) if (owner := owner_of(parameter)) is not None]
    return {owner.bucket: owner for owner in owners if owner.bucket.traits.shards_parameters}
