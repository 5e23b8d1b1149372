"""Names in a checkpoint folder, and file operations that always leave a complete checkpoint.

[Note: Commit]
    step-000120.tmp-1f3a/   rank files and the manifest are written and synced here; never loaded
    step-000120/            the same folder after one rename, so always complete
    latest                  a file with the name of the folder to resume from, replaced by one rename
A folder is renamed to a `.tmp-` name before it is removed, so that a kill during the removal leaves nothing that looks complete. The
next save removes such leftovers. If a step is saved again (after a resume from an earlier step), its folder is called step-000120.2,
because a folder cannot be replaced atomically; then the older one is removed.
"""

import os
import platform
import re
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.manifest import Manifest, read_manifest
from ztk.checkpoint.tensorfile import fsync, write_at
from ztk.core.policies.records import LATEST, step_number
from ztk.core.policies.records import step_folders as checkpoints

_LEFTOVER = re.compile(r"(step-\d{6,}(\.\d+)?|latest)\.tmp-[0-9a-f]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """The checkpoints to keep: the `keep` newest (all, if None), every `keep_every`-th step (if not 0), and with `keep_best` the
    one with the smallest metric. The newest is always kept.

    Raises:
        ValueError: a number is out of range.
    """

    keep: int | None = 2
    keep_every: int = 0
    keep_best: bool = False

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"checkpoint.keep={self.keep}: must be at least 1, or null to keep all")
        if self.keep_every < 0:
            raise ValueError(f"checkpoint.keep_every={self.keep_every}: must be 0 (off) or a number of steps")


def step_of(folder: Path) -> int:
    """Returns the step in a checkpoint folder's name."""
    found = step_number(folder.name)
    assert found is not None, folder
    return found[0]


def resolve(path: str | os.PathLike) -> Path:
    """Returns the step folder of `path`: itself, or the latest one of a folder of checkpoints, of a run folder, or of a folder of tags.

    `engine.save_checkpoint` of ztk.deepspeed writes folders of tags.

    Raises:
        CheckpointError: there is none, or `latest` names one that does not exist.
    """
    path = Path(path)
    if not path.is_dir():
        reason = "is a file, not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {reason}; {usable(path.parent)}")
    if not checkpoints(path) and (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    found = checkpoints(path)
    if not found and not (path / LATEST).exists():
        read_manifest(path)  # raises an error that describes `path`
        return path
    pointer = path / LATEST
    if not pointer.exists():  # a kill came between the first rename and the first write of `latest`
        return found[-1]
    name = read_pointer(pointer)
    return path / name if step_number(name) else resolve(path / name)


def read_pointer(pointer: Path) -> str:
    """Reads the folder name in a file `latest` and checks that the folder exists next to it.

    Raises:
        CheckpointError: the file is empty or names no such folder. The message lists usable checkpoints.
    """
    name = pointer.read_bytes().decode(errors="replace").strip()
    if name and Path(name).name == name and name != ".." and (pointer.parent / name).is_dir():
        return name
    fault = f"names {name!r}, which does not exist" if name else "is empty"
    raise CheckpointError(f"{pointer} {fault}; {usable(pointer.parent)}")


def every_checkpoint(path: Path) -> list[Path]:
    """Returns all step folders of `path`, which is as for `resolve`.

    Raises:
        CheckpointError: there is none.
    """
    found = checkpoints(path) or checkpoints(path / "checkpoints")
    if not found and (path / LATEST).is_file():
        found = [step for tag in sorted(path.iterdir()) for step in checkpoints(tag)]
    return found or [resolve(path)]


def open_manifest(path: Path) -> Manifest:
    """Calls `read_manifest`. Its errors also list the usable checkpoints.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    try:
        return read_manifest(path)
    except CheckpointError as error:
        raise type(error)(f"{error}; {usable(path.parent, without=path)}") from error


def usable(folder: Path, *, without: Path | None = None) -> str:
    """Lists the checkpoints of `folder` that look complete (valid manifest, files of the right length), as part of a sentence."""
    own = checkpoints(folder)
    if not own and folder.is_dir():  # a folder of tags: ztk's tags contain a step folder, DeepSpeed's contain the files
        own = sorted(tag for tag in folder.iterdir() if tag.is_dir() and (checkpoints(tag) or _is_of_deepspeed(tag)))
    good = [path.name for path in own if path != without and _looks_complete(path)]
    return f"still usable in {folder}: {', '.join(reversed(good))}" if good else f"{folder} has no other checkpoint"


def _is_of_deepspeed(path: Path) -> bool:
    return any(path.glob("*_model_states.pt"))


def _looks_complete(path: Path) -> bool:
    if not step_number(path.name):
        return _is_of_deepspeed(path) or any(map(_looks_complete, checkpoints(path)))
    try:
        manifest = read_manifest(path)
        return all(
            manifest.host_of(number) not in (None, platform.node()) or (path / file.file).stat().st_size == file.nbytes
            for number, file in enumerate(manifest.files)
        )
    except (CheckpointError, OSError):
        return False


def prepare(temporary: Path) -> None:
    """Removes the leftovers of killed saves and creates the temporary folder of this save. Raises OSError."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for child in temporary.parent.iterdir():
        if _LEFTOVER.fullmatch(child.name):
            shutil.rmtree(child) if child.is_dir() else child.unlink()
    temporary.mkdir()


def free_number(folder: Path, *, step: int) -> int:
    """Returns the number of the next save of `step`. 1: the folder has none."""
    return next(number for number in count(1) if not os.path.exists(folder / _name_of(step, number=number)))


def temporary_of(folder: Path, *, step: int, number: int, token: str) -> Path:
    """Returns the folder in which save `number` of `step` is written."""
    return folder / f"{_name_of(step, number=number)}.tmp-{token}"


def final_of(temporary: Path) -> Path:
    """Returns the folder of the complete checkpoint."""
    return temporary.with_name(temporary.name.rpartition(".tmp-")[0])


def _name_of(step: int, *, number: int) -> str:
    return f"step-{step:06d}" if number == 1 else f"step-{step:06d}.{number}"


def commit(temporary: Path) -> Path:
    """Makes a folder with synced files the latest checkpoint. See [Note: Commit]. Raises OSError."""
    final = final_of(temporary)
    sync_folder(temporary)
    os.rename(temporary, final)
    sync_folder(final.parent)
    try:
        _point_to(final, token=temporary.name.rpartition(".tmp-")[2])
    except OSError:
        final.rename(temporary)  # a save that is reported as failed must leave no checkpoint
        raise
    sync_folder(final.parent)
    return final


def _point_to(final: Path, *, token: str) -> None:
    """Replaces `latest` atomically."""
    pointer = final.parent / f"{LATEST}.tmp-{token}"
    try:
        write_file(pointer, data=f"{final.name}\n".encode())
        os.replace(pointer, final.parent / LATEST)
    except OSError:
        pointer.unlink(missing_ok=True)
        raise


def prune(newest: Path, *, retention: Retention, token: str) -> list[Path]:
    """Removes and returns checkpoints that `retention` does not keep, and older ones of the same step. Raises OSError."""
    if retention.keep is None:
        return []
    manifests: dict[Path, Manifest] = {}
    for path in checkpoints(newest.parent):
        try:
            manifests[path] = read_manifest(path)
        except CheckpointError:
            continue  # damaged; the user decides
    by_age = sorted(manifests, key=lambda path: (path == newest, manifests[path].created), reverse=True)
    kept = {newest, *by_age[: retention.keep]}
    if retention.keep_every:
        kept.update(path for path in by_age if manifests[path].step % retention.keep_every == 0)
    measured = [path for path in by_age if manifests[path].metric is not None]
    if retention.keep_best and measured:
        # pyrefly: ignore[no-matching-overload]  # files in `measured` have one
        kept.add(min(measured, key=lambda path: manifests[path].metric))
    replaced = {path for path in by_age if path != newest and manifests[path].step == manifests[newest].step}
    removed = [path for path in by_age if path not in kept or path in replaced]
    for path in removed:
        discard(path, token=token)
    return removed


def withdraw(path: Path, *, token: str) -> None:
    """Removes a committed checkpoint, and lets `latest` name the newest of the others. Raises OSError."""
    others = [other for other in checkpoints(path.parent) if other != path]
    if others:
        _point_to(others[-1], token=token)
    else:
        (path.parent / LATEST).unlink(missing_ok=True)
    discard(path, token=token)


def discard(path: Path, *, token: str) -> None:
    """Removes a folder so that a kill leaves no part that looks complete. See [Note: Commit]."""
    if ".tmp-" not in path.name:
        path = path.rename(path.with_name(f"{path.name}.tmp-{token}"))
        sync_folder(path.parent)
    shutil.rmtree(path)


def write_file(path: Path, *, data: bytes) -> None:
    """Writes and syncs a new file. An OSError contains the file's name."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_at(fd, data=memoryview(data), offset=0, path=path)
        fsync(fd, path=path)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Syncs the folder's entries."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync(fd, path=path)
    finally:
        os.close(fd)
