"""What an unattended restart goes on from."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

from ztk.checkpoint.errors import CheckpointError, DamagedCheckpoint
from ztk.checkpoint.folder import LATEST, checkpoints, resolve
from ztk.checkpoint.load import LoadReport, load
from ztk.checkpoint.subject import Subject


def load_newest(engine: Subject, *, folder: str | os.PathLike) -> LoadReport | None:
    """Sets the engine's state from the latest checkpoint of `folder`; None if there never was one. Every rank calls it.

    A damaged checkpoint is passed over for the newest other one: the report's `passed_over` says which file and what is wrong with it, and
    rank 0 warns (RuntimeWarning). Raises CheckpointError if there is none that is whole, and as `load` for what is no damage, such as
    another model: an older checkpoint would not help.
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
            warnings.warn(f"goes on from {path} because {'; '.join(faults)}", RuntimeWarning, stacklevel=2)
        return replace(report, passed_over=tuple(faults))
    if faults:
        raise CheckpointError(
            f"{folder} has no whole checkpoint to go on from: {'; '.join(faults)}; to start anew, move that folder away"
        )
    return None


def _candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """(checkpoints, the one that `latest` names first and then newer before older; what is wrong with `latest`)."""
    newest_first = checkpoints(folder)[::-1]
    if not newest_first and not (folder / LATEST).exists():
        return [], []
    try:
        latest = resolve(folder)
    except CheckpointError as error:
        return newest_first, [str(error)]
    return [latest, *(path for path in newest_first if path != latest)], []
