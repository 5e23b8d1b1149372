"""Which engine a parameter belongs to: functions such as `GatheredParameters` are given parameters alone."""

import itertools
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ztk.engine import Engine
from ztk.zero.bucket import Bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A parameter's place. number: rises in the order in which engines take parameters, the same on all ranks."""

    engine: Engine
    bucket: Bucket
    name: str
    number: int


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
_numbers = itertools.count()


def register(engine: Engine) -> None:
    """Called by `initialize`."""
    for bucket in engine.zero.buckets:
        for parameter, placement in zip(bucket.parameters, bucket.layout.placements, strict=True):
            _owners[parameter] = Owner(engine=engine, bucket=bucket, name=placement.name, number=next(_numbers))


def forget(engine: Engine) -> None:
    """The engine is closed: its parameters are nobody's."""
    for bucket in engine.zero.buckets:
        for parameter in bucket.parameters:
            _owners.pop(parameter, None)


def owner_of(parameter: torch.nn.Parameter) -> Owner | None:
    """None for a parameter of no engine."""
    return _owners.get(parameter)
