"""Checks that a checkpoint fits a model, and determines which of the model's parameters a load sets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.manifest import Manifest, TensorInfo
from ztk.checkpoint.model import ModelInfo
from ztk.checkpoint.reader import StateReader
from ztk.optim.states import FROZEN, MASTER
from ztk.zero.buckets.context import AVERAGE

_SHOWN = 4  # names per error message
_RANGE_ELEMENTS = 1 << 20  # elements compared at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The part of the state that `load` sets.

    weights_only: skips optimizer states.
    only: shell patterns of the parameters and buffers to set; all others keep their values.
    strict: requires the same names on both sides. Otherwise names on one side only are ignored.

    Raises:
        ValueError: the options exclude each other.
    """

    weights_only: bool = False
    only: Sequence[str] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if not self.weights_only and (self.only is not None or not self.strict):
            raise ValueError(
                "only= and strict=False load weights: part of the optimizer's states is not enough to continue from; "
                "add weights_only=True"
            )

    @property
    def is_partial(self) -> bool:
        """Whether some names may stay unset."""
        return self.only is not None or not self.strict


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """kept: parameters and buffers of the model that keep their values. unused: names of the checkpoint that are not loaded."""

    kept: tuple[str, ...]
    unused: tuple[str, ...]


def with_buffers_of(info: ModelInfo, *, manifest: Manifest) -> Manifest:
    """Returns `manifest` with the model's buffers listed as buffers: an imported state_dict does not separate them from parameters."""
    names = {buffer.name for buffer in info.buffers} - {buffer.name for buffer in manifest.buffers}
    found = [saved for saved in manifest.parameters if saved.name in names]
    others = [saved for saved in manifest.parameters if saved.name not in names]
    return replace(manifest, parameters=others, buffers=[*manifest.buffers, *found])


def match(manifest: Manifest, *, info: ModelInfo, options: LoadOptions) -> Match:
    """Determines the names that a load with `options` sets and keeps.

    Frozen parameters that the checkpoint omits on purpose are always kept.

    Raises:
        CheckpointError: a pattern matches nothing.
    """
    saved = _names_and_shapes([*manifest.parameters, *manifest.buffers], manifest=manifest)
    own = [entry.name for entry in [*info.parameters, *info.buffers]]
    for pattern in options.only or ():
        if not any(fnmatchcase(name, pattern) for name in own):
            raise CheckpointError(f"only={pattern!r} matches none of the model's names, such as {_named(own)}")
    left_out = set(manifest.left_out)
    kept = [
        name
        for name in own
        if name in left_out
        or (not options.strict and name not in saved)
        or (options.only is not None and not any(fnmatchcase(name, pattern) for pattern in options.only))
    ]
    used = (set(own) | info.tied.keys()) - set(kept)
    unused = [name for name in saved if name not in used and manifest.tied.get(name) not in used]
    return Match(kept=tuple(kept), unused=tuple(unused))


def check_fits(
    manifest: Manifest, *, state_names: Sequence[str], info: ModelInfo, options: LoadOptions, matched: Match
) -> None:
    """Checks the names, shapes and optimizer states to be set. An average of the weights may be missing on either side.

    state_names: states of the model's optimizer.

    Raises:
        CheckpointError: the checkpoint does not fit the model.
    """
    where = manifest.path
    for saved, own, ties in (
        (manifest.parameters, info.parameters, info.tied),
        (manifest.buffers, info.buffers, {}),
    ):
        _check_names(saved, engine_infos=own, manifest=manifest, ties=ties, options=options, kept=set(matched.kept))
    if options.weights_only:
        return
    if manifest.state_names is None:
        raise CheckpointError(f"{where} contains only weights, no optimizer states; load it with weights_only=True")
    if _of_optimizer(manifest.state_names) != _of_optimizer(state_names):
        raise CheckpointError(
            f"{where} was saved with another optimizer: it has the states {_named(_of_optimizer(manifest.state_names))}, this one keeps "
            f"{_named(_of_optimizer(state_names))}; use the optimizer it was saved with, or load it with weights_only=True"
        )
    trained = {saved.name for saved in manifest.parameters if saved.trainable}
    newly = [
        own.name for own in info.parameters if own.trainable and manifest.tied.get(own.name, own.name) not in trained
    ]
    if newly:
        raise CheckpointError(
            f"{where} has no optimizer states for {_named(newly)}, which were frozen when it was saved; "
            "freeze them, or load it with weights_only=True"
        )


def _of_optimizer(names: Sequence[str]) -> list[str]:
    """Returns the states without the average of the weights."""
    return [name for name in names if name != AVERAGE]


def check_ties(manifest: Manifest, *, info: ModelInfo, reader: StateReader) -> None:
    """Checks that a tied parameter has the same values under all names. FSDP stores it under each.

    Raises:
        CheckpointError: the values differ.
    """
    shapes = {saved.name: saved.shape for saved in manifest.parameters}
    for name, canonical in info.tied.items():
        if name not in shapes or canonical not in shapes:
            continue
        for start in range(0, prod(shapes[name]), _RANGE_ELEMENTS):
            stop = min(start + _RANGE_ELEMENTS, prod(shapes[name]))
            one, other = (_weights(reader, name=either, start=start, stop=stop) for either in (name, canonical))
            if not torch.equal(one, other):
                raise CheckpointError(
                    f"{manifest.path} is of another model: {name} and {canonical} have different values in it and are tied in "
                    "the model; build the model it was saved from"
                )


def _weights(reader: StateReader, *, name: str, start: int, stop: int) -> Tensor:
    kind = MASTER if reader.has(name=name, kind=MASTER) else FROZEN
    return reader.read(name=name, kind=kind, start=start, stop=stop)


def _check_names(
    saved_infos: list[TensorInfo],
    *,
    engine_infos: list[TensorInfo],
    manifest: Manifest,
    ties: dict[str, str],
    options: LoadOptions,
    kept: set[str],
) -> None:
    saved = _names_and_shapes(saved_infos, manifest=manifest)
    every = {info.name for info in engine_infos}
    own = {info.name: info.shape for info in engine_infos if info.name not in kept}
    missing = [name for name in own if name not in saved]
    unknown = [name for name in saved if name not in every and name not in ties and name not in manifest.tied]
    other = [
        f"{name} {saved[name]} instead of {own[name]}" for name in own if name in saved and saved[name] != own[name]
    ]
    faults = [
        *([f"it lacks {_named(missing)}"] if missing else []),
        *([f"it has {_named(unknown)}, which the model lacks"] if unknown and not options.is_partial else []),
        *([f"its shapes differ: {_named(other)}"] if other else []),
    ]
    if faults:
        raise CheckpointError(
            f"{manifest.path} is of another model: {'; '.join(faults)}; build the model it was saved from"
        )


def _names_and_shapes(infos: list[TensorInfo], *, manifest: Manifest) -> dict[str, list[int]]:
    """Returns names and shapes, including tied names."""
    saved = {info.name: info.shape for info in infos}
    return saved | {name: saved[canonical] for name, canonical in manifest.tied.items() if canonical in saved}


def _named(names: list[str]) -> str:
    """Formats a few names and the number of others."""
    if not names:
        return "none"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
