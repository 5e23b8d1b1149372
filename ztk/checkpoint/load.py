"""Loads a checkpoint into an engine of any layout.

Phases: rank 0 chooses the checkpoint and reads its manifest, all ranks check that it fits, rank 0 sends each rank the entries of the ranges
that it reads, each reads its own slices, they agree, and they broadcast replicated parameters. If every node has its own folder, nodes send
each other the entries that they lack before ([Note: Own folders]).
"""

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.checkpoint.errors import CheckpointError, DamagedCheckpoint, agreed
from ztk.checkpoint.fit import LoadOptions, check_fits, check_ties, match, with_buffers_of
from ztk.checkpoint.folder import LATEST, checkpoints, open_manifest, resolve
from ztk.checkpoint.groups import check_second_moments
from ztk.checkpoint.manifest import BUFFER, Manifest, manifest_hash
from ztk.checkpoint.model import ModelInfo, persistent_buffers, restore_control
from ztk.checkpoint.nodes import Holders, Nodes, borrowed_files
from ztk.checkpoint.reader import StateReader
from ztk.checkpoint.rng import restore_rng
from ztk.checkpoint.shares import ranges_of, shares_of, with_entries, without_entries
from ztk.checkpoint.torch_optimizer import check_progress, restore_progress
from ztk.core.policies.machine import place_of
from ztk.core.runtime.part import Part
from ztk.optim.states import FROZEN, MASTER
from ztk.train.engine import Engine
from ztk.zero.buckets.context import AVERAGE


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """The result of a load. data_state, extra: the values given to `save`. step: number of optimizer steps.

    same_world: whether the number of ranks is unchanged, in which case random number generators were restored too.
    read_bytes: bytes that this rank read.
    kept: parameters and buffers of the model that kept their values. unused: names of the checkpoint that were not loaded. Both are empty
    except with `only`, `strict=False` and checkpoints of only the trained parameters.
    passed_over: faults of later checkpoints; see `load_newest`.
    notes: sentences about an average of the weights that only one side has, and about states whose format differs.
    """

    path: Path
    step: int
    data_state: Any
    extra: Any
    saved_world_size: int
    same_world: bool
    read_bytes: int
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(
    engine: Engine,
    *,
    path: str | os.PathLike,
    weights_only: bool = False,
    only: Sequence[str] | None = None,
    strict: bool = True,
    local: bool = False,
) -> LoadReport:
    """Sets the engine's state from a checkpoint saved under any stage, tier, precision, bucket size and number of ranks.

    A collective call.

    Each rank reads only its own ranges, one block of a file at a time.

    path: a step folder, or a folder of checkpoints or a run folder, whose latest checkpoint is loaded.
    weights_only: sets only parameters and buffers. The optimizer restarts and the counters stay. A moving average restarts from the
    loaded weights, as it does with a checkpoint without one.
    only: shell patterns such as "*.lora_*" of the parameters and buffers to set. The others keep their values and optimizer states. Needs
    weights_only=True.
    strict: with False, sets the names that both sides have; see `kept` and `unused` in the report. Shapes must always be equal. Needs
    weights_only=True.
    local: every node has its own folder, at its own `path`, of a run that saved with local=True.

    Raises:
        CheckpointError: a ValueError, the same on all ranks, for a missing, truncated or damaged checkpoint (DamagedCheckpoint), or one
            of another program, model or optimizer. If the error came after some state was set, load another checkpoint before training.
    """
    comm, options = engine.process.comm, LoadOptions(weights_only=weights_only, only=only, strict=strict)
    everything, chosen = None, None
    with agreed(comm, error=CheckpointError):
        if comm.rank == 0:
            step = resolve(path)
            everything = open_manifest(step)
            save = (manifest_hash(step) if local else "", secrets.token_hex(4))
            chosen = (without_entries(everything), os.path.relpath(step, path), *save)
    head, place, digest, token = comm.broadcast_object(chosen, label="manifest")
    nodes = holders = None
    if local:
        head = replace(head, path=os.path.normpath(Path(path, place)))
        nodes = Nodes.of(comm, Path(head.path).parent, error=CheckpointError)
        holders = Holders.find(Path(head.path), manifest=head, digest=digest, nodes=nodes, comm=comm)
    info = ModelInfo.gather(engine)
    with agreed(comm, error=CheckpointError):
        head = with_buffers_of(info, manifest=head)
        matched = match(head, info=info, options=options)
        names = engine.zero.state_names
        if not weights_only and head.state_names is not None:  # names the fix where states differ, too
            check_progress(engine, manifest=head)
        check_fits(head, state_names=names, info=info, options=options, matched=matched)
        if not weights_only:
            check_second_moments(engine, manifest=head)
    wanted = comm.collect_objects(ranges_of(engine, manifest=head, info=info), label="ranges of a load")
    shares = None if wanted is None or everything is None else shares_of(everything, wanted=wanted)
    manifest = with_entries(head, entries=comm.distribute_objects(shares, label="files of a load"))
    borrowed = nullcontext({})
    if nodes is not None and holders is not None:
        borrowed = borrowed_files(manifest, holders=holders, nodes=nodes, comm=comm, token=token)
    with borrowed as copies, StateReader(manifest, copies=copies) as reader:
        with agreed(comm, error=CheckpointError):
            if comm.rank == 0:
                if holders is None:
                    reader.check_files()
                check_ties(manifest, info=info, reader=reader)
        same_world = manifest.world_size == comm.size
        with agreed(comm, error=CheckpointError):
            source = _state_source(reader, parts=engine.zero.parts, weights_only=weights_only)
            rounded = engine.zero.state.load(source, keep=frozenset(matched.kept))
            _load_buffers(engine, reader=reader, keep=matched.kept)
            rng = reader.rng_states(comm.rank) if same_world and not weights_only else None
        restore_progress(engine, manifest=None if weights_only else manifest, reader=reader, keep=matched.kept)
        engine.zero.state.share_parameters()
        rounded = sum(comm.gather_objects(rounded))
        if not weights_only:
            _restore_progress(engine, manifest=manifest)
            if rng is not None:
                restore_rng(rng, device=engine.process.device)
    return LoadReport(
        path=Path(manifest.path),
        step=manifest.step,
        data_state=manifest.data,
        extra=manifest.extra,
        saved_world_size=manifest.world_size,
        same_world=same_world,
        read_bytes=reader.read_bytes,
        kept=matched.kept,
        unused=matched.unused,
        notes=(
            *_notes(manifest, names=names, weights_only=weights_only),
            *(() if weights_only else _notes_of_states(manifest, kept=engine.zero.kept_states, rounded=rounded)),
        ),
    )


def load_newest(
    engine: Engine,
    *,
    folder: str | os.PathLike,
    check_older: Callable[[Path], None] | None = None,
    local: bool = False,
) -> LoadReport | None:
    """Sets the engine's state from the latest checkpoint of `folder`. Returns None if there never was one. A collective call.

    If a checkpoint is damaged, the newest intact one is loaded instead: `passed_over` of the report names the file and the fault, and
    rank 0 issues a RuntimeWarning.

    check_older: called on every rank with a checkpoint that would be loaded in place of a damaged one; raises ValueError if the run must
        not continue from it.
    local: every node has its own `folder`. A checkpoint of rank 0's folder that other nodes lack counts as damaged.

    Raises:
        CheckpointError: all checkpoints are damaged, `check_older` refuses one, or the error would be the same for an older checkpoint,
            such as another model.
    """
    comm = engine.process.comm
    listed = comm.gather_objects(_candidates(Path(folder)) if comm.rank == 0 or local else ([], []))
    found, faults = listed[0]
    if not found and (others := [rank for rank, (theirs, _) in enumerate(listed) if theirs]):
        raise CheckpointError(
            f"{folder}: {place_of(others[0])} has {listed[others[0]][0][0]}, and {place_of(0)} has no checkpoint; bring back the folder there, "
            "or move the others away to start again"
        )
    for name in found:
        path = Path(folder, name)
        if faults and check_older is not None:
            try:
                check_older(path)
            except ValueError as error:
                raise CheckpointError(
                    f"{path} is the newest complete checkpoint, because {'; '.join(faults)}; the run does not continue from it: {error}"
                ) from error
        try:
            report = load(engine, path=path, local=local)
        except DamagedCheckpoint as error:
            faults.append(str(error))
            continue
        if faults and comm.rank == 0:
            warnings.warn(f"continues from {path} because {'; '.join(faults)}", RuntimeWarning, stacklevel=2)
        return replace(report, passed_over=tuple(faults))
    if faults:
        raise CheckpointError(
            f"{folder} has no complete checkpoint to continue from: {'; '.join(faults)}; to start again, move that folder away"
        )
    return None


def _candidates(folder: Path) -> tuple[list[str], list[str]]:
    """Returns (checkpoints in `folder`, the one in `latest` first and then newest to oldest; faults of `latest`)."""
    newest_first = checkpoints(folder)[::-1]
    if not newest_first and not (folder / LATEST).exists():
        return [], []
    try:
        latest = resolve(folder)
    except CheckpointError as error:
        return [path.name for path in newest_first], [str(error)]
    return [os.path.relpath(path, folder) for path in (latest, *(path for path in newest_first if path != latest))], []


def _state_source(reader: StateReader, *, parts: Mapping[str, Part], weights_only: bool) -> Callable[..., Tensor]:
    """Returns the `read` of `ModelState.load`. A trained parameter may be loaded as a frozen one and, with `weights_only`, vice versa."""

    def read(*, name: str, kind: str, start: int, stop: int) -> Tensor:
        if kind == AVERAGE and (weights_only or not reader.has(name=name, kind=AVERAGE)):
            kind = MASTER
        if kind in (MASTER, FROZEN):
            kind = MASTER if reader.has(name=name, kind=MASTER) else FROZEN
        elif weights_only:
            return torch.zeros(stop - start)
        return reader.read(name=name, kind=kind, start=start, stop=stop, part=parts.get(name))

    return read


def _notes(manifest: Manifest, *, names: Sequence[str], weights_only: bool) -> Iterator[str]:
    """Yields notes about averages of the weights. names: the engine's states."""
    saved = AVERAGE in (manifest.state_names or ()) and not weights_only
    if AVERAGE in names and not saved:
        yield f"the average of the weights starts from the weights of {manifest.path}"
    elif saved and AVERAGE not in names:
        yield f"the average of the weights in {manifest.path} is left out: this run keeps none"


def _notes_of_states(manifest: Manifest, *, kept: Mapping[str, str], rounded: int) -> Iterator[str]:
    """Yields notes about state formats. kept: the engine's formats; see `StateFormat.described`. rounded: number of groups of 8-bit
    states.
    """
    saved = manifest.layout.get("states") or dict.fromkeys(("master", *(manifest.state_names or ())), "float32")
    common = [name for name in kept if name in saved]
    if any(kept[name] != saved[name] for name in common):
        yield (
            f"{manifest.path} keeps {_words(saved, names=common)}, and this run {_words(kept, names=common)}: states with fewer bits are "
            "rounded once, all others are equal"
        )
    elif rounded:
        yield (
            f"{rounded} groups of 32 8-bit states of {manifest.path} are rounded once: this topology cuts parameters in another way, and "
            "other elements share a scale"
        )


def _words(kept: Mapping[str, str], *, names: Sequence[str]) -> str:
    """Formats states, for example as "master: float32, exp_avg: bfloat16"."""
    return ", ".join(f"{name}: {kept[name]}" for name in names)


def _load_buffers(engine: Engine, *, reader: StateReader, keep: Sequence[str]) -> None:
    for name, buffer in persistent_buffers(engine.module):
        if name in keep:
            continue
        kind = next(kind for kind in (BUFFER, MASTER, FROZEN) if reader.has(name=name, kind=kind))
        value = reader.read(name=name, kind=kind, start=0, stop=buffer.numel())
        buffer.data.copy_(value.view(buffer.shape))


def _restore_progress(engine: Engine, *, manifest: Manifest) -> None:
    """Sets step control and counters to their values in the saved run."""
    scaling = engine.control.scaling
    alike = scaling.dynamic == manifest.layout["dynamic_loss_scale"]
    alike = alike and (scaling.dynamic or manifest.control["loss_scale"] == scaling.initial)
    restore_control(engine.control.state, values=manifest.control, with_scaling=alike)
    counters = manifest.counters
    engine.global_steps = counters["global_steps"]
    same = counters["accumulation_steps"] == engine.accumulation_steps
    engine.micro_steps = counters["micro_steps"] if same else engine.global_steps * engine.accumulation_steps
