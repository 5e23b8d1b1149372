"""Verifies every byte of a checkpoint and lists its faults; describes a checkpoint."""

import time
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.folder import every_checkpoint
from ztk.checkpoint.manifest import BUFFER, RNG, Manifest, read_manifest
from ztk.checkpoint.reader import StateReader
from ztk.core.precision.names import DTYPES
from ztk.optim.states import FROZEN, MASTER


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """faults: one message per damaged range, missing file or missing range; empty if the checkpoint is complete."""

    path: Path
    faults: tuple[str, ...]
    nbytes: int
    seconds: float


def verify(path: str | Path) -> VerifyReport:
    """Checks one step folder: the manifest's hash, each file's length and header, each block's checksum.

    Also checks that every state is complete and present exactly once.
    """
    start, path = time.perf_counter(), Path(path)
    faults, nbytes = [], 0
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        faults.append(str(error))
    else:
        nbytes = manifest.nbytes
        faults += _gaps(manifest)
        with StateReader(manifest) as reader:
            faults += reader.faults()
    return VerifyReport(path=path, faults=tuple(faults), nbytes=nbytes, seconds=time.perf_counter() - start)


def verify_all(path: str | Path) -> list[VerifyReport]:
    """Runs `verify` for every checkpoint of `path`, oldest step first. Raises CheckpointError if there is none."""
    return [verify(step) for step in every_checkpoint(Path(path))]


def _gaps(manifest: Manifest) -> list[str]:
    """Returns messages for state that no file has, or that several have."""
    covered: Counter[tuple[str, str]] = Counter()
    for file in manifest.files:
        for entry in file.entries:
            if entry.kind != RNG:
                covered[entry.kind, entry.name] += entry.stop - entry.start
    faults = []
    for kind, info in [*_expected(manifest), *((BUFFER, info) for info in manifest.buffers)]:
        elements = covered[kind, info.name]
        if elements != prod(info.shape):
            faults.append(f"{manifest.path}: {kind} of {info.name} has {elements} of {prod(info.shape)} elements")
    return faults


def _expected(manifest: Manifest):
    """Yields (kind, info) of all parameter state."""
    for info in manifest.parameters:
        if not info.trainable:
            yield FROZEN, info
        else:
            yield from ((kind, info) for kind in (MASTER, *(manifest.state_names or ())))


def describe(manifest: Manifest, *, with_parameters: bool = False) -> str:
    """Describes the content of a checkpoint as text."""
    layout = " ".join(f"{key}={value}" for key, value in manifest.layout.items())
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    rows = {
        "checkpoint": manifest.path,
        "step": manifest.step,
        "created": created,
        "saved by": f"{manifest.world_size} ranks, {layout}" if manifest.layout else f"{manifest.world_size} ranks",
        "versions": " ".join(f"{key} {value}" for key, value in manifest.versions.items()),
        "size": f"{manifest.nbytes / 1e6:.1f} MB in {len(manifest.files)} files",
        "parameters": f"{manifest.num_parameters:,} in {len(manifest.parameters)} tensors",
        "optimizer states": "none" if manifest.state_names is None else ", ".join(manifest.state_names) or "stateless",
        "step control": " ".join(f"{key}={value}" for key, value in manifest.control.items()),
        "metric": manifest.metric,
        "data": manifest.data,
        "extra": manifest.extra,
    }
    lines = [f"{key:18}{value}" for key, value in rows.items() if value not in (None, "", {})]
    if with_parameters:
        for info in [*manifest.parameters, *manifest.buffers]:
            shape, frozen = "x".join(map(str, info.shape)) or "scalar", "" if info.trainable else "  not trained"
            lines.append(f"  {info.name:50} {shape:20} {str(DTYPES[info.dtype])[6:]}{frozen}")
        lines += [f"  {name:50} tied to {canonical}" for name, canonical in manifest.tied.items()]
    return "\n".join(lines)
