"""Maps parameters to engines, for functions such as `GatheredParameters` that only get parameters."""

import itertools
from dataclasses import dataclass
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ztk.train.engine import Engine
from ztk.zero.buckets.bucket import Bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A parameter's engine and bucket. number: increases in the order in which engines take parameters, the same on all ranks."""

    engine: Engine
    bucket: Bucket
    name: str
    number: int

    @property
    def is_trained(self) -> bool:
        """Whether the parameter is not frozen."""
        return self.bucket.traits.trainable


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A weak Owner: an engine that a script drops without `destroy` is freed with its model."""

    engine: "ReferenceType[Engine]"
    bucket: int
    name: str
    number: int


_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
_numbers = itertools.count()
_engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by number of registration


def register(engine: Engine) -> None:
    """Registers an engine. Called by `initialize`."""
    _engines[next(_numbers)] = engine
    for index, bucket in enumerate(engine.zero.buckets):
        for parameter, placement in zip(bucket.parameters, bucket.layout.placements, strict=True):
            _places[parameter] = _Place(engine=ref(engine), bucket=index, name=placement.name, number=next(_numbers))


def forget(engine: Engine) -> None:
    """Removes a closed engine with its parameters."""
    for bucket in engine.zero.buckets:
        for parameter in bucket.parameters:
            _places.pop(parameter, None)
    for number in [number for number, other in _engines.items() if other is engine]:
        del _engines[number]


def newest() -> Engine | None:
    """Returns the newest engine that is not closed."""
    return _engines[max(_engines)] if _engines else None


def owner_of(parameter: torch.nn.Parameter) -> Owner | None:
    """Returns the parameter's owner, or None if no engine has it."""
    place = _places.get(parameter)
    engine = place.engine() if place else None
    if engine is None:
        return None
    return Owner(engine=engine, bucket=engine.zero.buckets[place.bucket], name=place.name, number=place.number)
