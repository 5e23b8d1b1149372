"""Chooses the checkpoint for an unattended restart."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

from ztk.checkpoint.errors import CheckpointError, DamagedCheckpoint
from ztk.checkpoint.folder import LATEST, checkpoints, resolve
from ztk.checkpoint.load import LoadReport, load
from ztk.checkpoint.subject import Subject


def load_newest(engine: Subject, *, folder: str | os.PathLike) -> LoadReport | None:
    """Sets the engine's state from the latest checkpoint of `folder`. Returns None if there never was one. A collective call.

    If a checkpoint is damaged, the newest intact one is loaded instead: `passed_over` of the report names the file and the fault, and
    rank 0 issues a RuntimeWarning.

    Raises:
        CheckpointError: all checkpoints are damaged, or the error would be the same for an older checkpoint, such as another model.
    """
    comm = engine.process.comm
    found, faults = comm.gather_objects(_candidates(Path(folder)) if comm.rank == 0 else None)[0]
    for path in found:
        try:
            report = load(engine, path=path)
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


def _candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """Returns (checkpoints, the one in `latest` first and then newest to oldest; faults of `latest`)."""
    newest_first = checkpoints(folder)[::-1]
    if not newest_first and not (folder / LATEST).exists():
        return [], []
    try:
        latest = resolve(folder)
    except CheckpointError as error:
        return newest_first, [str(error)]
    return [latest, *(path for path in newest_first if path != latest)], []
