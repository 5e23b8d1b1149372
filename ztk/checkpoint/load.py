"""Loading into an engine of any layout.

Phases: rank 0 says which checkpoint, all check that it fits, each reads its own slices, agree, share replicated parameters.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.checkpoint.errors import Agreement, CheckpointError
from ztk.checkpoint.folder import open_manifest, resolve
from ztk.checkpoint.manifest import BUFFER, Manifest, TensorInfo
from ztk.checkpoint.model import ModelInfo, persistent_buffers, restore_control
from ztk.checkpoint.reader import StateReader
from ztk.checkpoint.rng import restore_rng
from ztk.checkpoint.subject import Subject
from ztk.runtime.part import Part

_SHOWN = 4  # names in an error text


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What was loaded. data_state, extra: as given to `save`. step: optimizer steps made.

    same_world: the number of ranks is that of the save, so the random number generators were restored too.
    read_bytes: that this rank read from the files.
    """

    path: Path
    step: int
    data_state: Any
    extra: Any
    saved_world_size: int
    same_world: bool
    read_bytes: int


def load(engine: Subject, *, path: str | os.PathLike, weights_only: bool = False) -> LoadReport:
    """Sets the engine's state from a checkpoint saved under any stage, tier, precision, bucket size and number of ranks.

    path: a step folder, or a folder of checkpoints or a run folder, of which the latest is taken. Every rank calls it.
    weights_only: parameters and buffers only; the optimizer starts anew and counters stay.

    Reads by offset what this rank keeps, one block of a file at a time. Raises CheckpointError (a ValueError), on all ranks
    alike, for a missing, truncated, damaged or foreign checkpoint, another model or another optimizer. If that comes after some
    state was set, the engine may be loaded again from elsewhere, but must not go on as it is.
    """
    comm = engine.process.comm
    agreement = Agreement(comm, error=CheckpointError)
    folder = None
    with agreement.step():
        if comm.rank == 0:
            folder = resolve(path)
    folder = comm.gather_objects(folder)[0]
    info = ModelInfo.gather(engine)
    with agreement.step():
        manifest = open_manifest(folder)
        check_fits(manifest, engine=engine, info=info, weights_only=weights_only)
        reader = StateReader(manifest)
        if comm.rank == 0:
            reader.check_files()
    with reader:
        same_world = manifest.world_size == comm.size
        with agreement.step():
            engine.zero.load_state(_state_source(reader, parts=engine.zero.parts, weights_only=weights_only))
            _load_buffers(engine, reader=reader)
            rng = reader.rng_states(comm.rank) if same_world and not weights_only else None
        engine.zero.share_parameters()
        if not weights_only:
            _restore_progress(engine, manifest=manifest)
            if rng is not None:
                restore_rng(rng, device=engine.process.device)
    return LoadReport(
        path=folder,
        step=manifest.step,
        data_state=manifest.data,
        extra=manifest.extra,
        saved_world_size=manifest.world_size,
        same_world=same_world,
        read_bytes=reader.read_bytes,
    )


def check_fits(manifest: Manifest, *, engine: Subject, info: ModelInfo, weights_only: bool) -> None:
    """Raises CheckpointError if names, shapes or optimizer states are not the engine's. info: of the engine's model."""
    where = manifest.path
    _check_names(manifest.parameters, engine_infos=info.parameters, manifest=manifest, ties=info.tied)
    _check_names(manifest.buffers, engine_infos=info.buffers, manifest=manifest, ties={})
    if weights_only:
        return
    own = list(engine.zero.optimizer.state_names)
    if manifest.state_names is None:
        raise CheckpointError(f"{where} holds weights only, no optimizer states; load it with weights_only=True")
    if manifest.state_names != own:
        raise CheckpointError(
            f"{where} was saved with another optimizer: it has the states {_named(manifest.state_names)}, this one keeps "
            f"{_named(own)}; use the optimizer it was saved with, or load it with weights_only=True"
        )
    trained = {info.name for info in manifest.parameters if info.trainable}
    newly = [
        own.name for own in info.parameters if own.trainable and manifest.tied.get(own.name, own.name) not in trained
    ]
    if newly:
        raise CheckpointError(
            f"{where} has no optimizer states for {_named(newly)}, which were frozen when it was saved; "
            "freeze them, or load it with weights_only=True"
        )


def _check_names(
    saved_infos: list[TensorInfo], *, engine_infos: list[TensorInfo], manifest: Manifest, ties: dict[str, str]
) -> None:
    saved = {info.name: info.shape for info in saved_infos}
    saved |= {name: saved[canonical] for name, canonical in manifest.tied.items() if canonical in saved}
    own = {info.name: info.shape for info in engine_infos}
    missing = [name for name in own if name not in saved]
    unknown = [name for name in saved if name not in own and name not in ties and name not in manifest.tied]
    untied = [name for name in saved if name in ties and name not in manifest.tied]
    other = [
        f"{name} {saved[name]} instead of {own[name]}" for name in own if name in saved and saved[name] != own[name]
    ]
    faults = [
        *([f"it lacks {_named(missing)}"] if missing else []),
        *([f"it has {_named(unknown)}, which the model has not"] if unknown else []),
        *([f"{_named(untied)} stands alone in it and is tied in the model"] if untied else []),
        *([f"its shapes differ: {_named(other)}"] if other else []),
    ]
    if faults:
        raise CheckpointError(
            f"{manifest.path} is of another model: {'; '.join(faults)}; build the model it was saved from"
        )


def _named(names: list[str]) -> str:
    """A few names and how many more."""
    if not names:
        return "none"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _state_source(reader: StateReader, *, parts: Mapping[str, Part], weights_only: bool) -> Callable[..., Tensor]:
    """`read` for `Zero.load_state`: what was trained may be loaded frozen and, as weights, the other way round."""

    def read(*, name: str, kind: str, start: int, stop: int) -> Tensor:
        if kind in ("master", "parameter"):
            kind = "master" if reader.has(name=name, kind="master") else "parameter"
        elif weights_only:
            return torch.zeros(stop - start)
        return reader.read(name=name, kind=kind, start=start, stop=stop, part=parts.get(name))

    return read


def _load_buffers(engine: Subject, *, reader: StateReader) -> None:
    for name, buffer in persistent_buffers(engine.module):
        value = reader.read(name=name, kind=BUFFER, start=0, stop=buffer.numel())
        buffer.data.copy_(value.view(buffer.shape))


def _restore_progress(engine: Subject, *, manifest: Manifest) -> None:
    """Step control and counters, as if this engine had made the steps."""
    scaling = engine.control.scaling
    alike = scaling.dynamic == manifest.layout["dynamic_loss_scale"]
    alike = alike and (scaling.dynamic or manifest.control["loss_scale"] == scaling.initial)
    restore_control(engine.control.state, values=manifest.control, with_scaling=alike)
    counters = manifest.counters
    engine.global_steps = counters["global_steps"]
    same = counters["accumulation_steps"] == engine.accumulation_steps
    engine.micro_steps = counters["micro_steps"] if same else engine.global_steps * engine.accumulation_steps
