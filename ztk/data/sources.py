"""Lists the files of a corpus: the user's, by default the standard library's source."""

import contextlib
import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Excluded because installed packages differ between machines, and the tests are larger than the library itself.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Metadata that save_to_disk of datasets writes next to its arrow files.
_NOT_TEXT = frozenset({"dataset_info.json", "state.json", "dataset_dict.json"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of a corpus with its state when it was listed."""

    path: Path
    size: int  # bytes
    modified: int  # nanoseconds since 1970

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file to be read in the block. Raises ValueError if it cannot be read."""
        try:
            with open(self.path, "rb") as source:
                yield source
        except OSError as error:
            raise ValueError(
                f"data.path={self.path}: cannot be read ({error.strerror}); grant access or leave it out"
            ) from error

    def has_changed(self) -> bool:
        """Whether size or modification time differ from the listing."""
        status = self.path.stat()
        return (status.st_size, status.st_mtime_ns) != (self.size, self.modified)


def standard_library() -> list[SourceFile]:
    """Returns the Python files of the running interpreter's standard library without tests, in sorted order.

    Raises:
        ValueError: there are none.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [_source(path) for path in _walk(root, skip=_NOT_LIBRARY) if path.suffix == ".py"]
    if not found:
        raise ValueError(
            f"data.path: the standard library at {root} has no .py files; name text files with data.path=..."
        )
    return found


def named_files(paths: Sequence[str]) -> list[SourceFile]:
    """Returns the files of `paths`: files, folders (recursively, without hidden names) and globs (** allowed).

    The metadata files of `datasets` are left out. The order of entries is kept, and files inside a folder or glob are sorted. A file
    named twice counts once.

    Raises ValueError for a path that is missing, matches nothing, or cannot be read.
    """
    found: dict[Path, SourceFile] = {}
    for path in (path for entry in paths for path in _expand(entry)):
        found.setdefault(path.resolve(), _source(path))
    return list(found.values())


def _expand(entry: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        if files := list(_walk(path, skip=frozenset())):
            return files
        raise ValueError(f"data.path={entry}: the folder has no files; name a folder or files with text in them")
    if not glob.has_magic(entry):
        raise ValueError(f"data.path={entry}: no such file or folder (looked from {Path.cwd()}); check the spelling")
    matches = sorted(glob.glob(str(path), recursive=True))
    files = [match for match in map(Path, matches) if match.is_file()]
    if not files:
        raise ValueError(
            f"data.path={entry}: the pattern matches no file (looked from {Path.cwd()}); quote it and check it"
        )
    return files


def _walk(root: Path, *, skip: frozenset[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(
            f"data.path={error.filename}: cannot be listed ({error.strerror}); grant access or leave it out"
        )

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
        notes = _NOT_TEXT if "dataset_dict.json" in names or any(name.endswith(".arrow") for name in names) else ()
        shown = sorted(name for name in names if not name.startswith(".") and name not in notes)
        yield from (path for name in shown if (path := Path(folder, name)).is_file())


def _source(path: Path) -> SourceFile:
    if not os.access(path, os.R_OK):
        raise ValueError(f"data.path={path}: cannot be read; grant access (chmod +r) or leave it out")
    status = path.stat()
    return SourceFile(path=path, size=status.st_size, modified=status.st_mtime_ns)
