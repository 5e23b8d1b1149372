"""File systems of folders: the network's, memory, and disks of this machine."""

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "afs",
    "pvfs2",
    "glusterfs",
}
_NETWORK |= {f"fuse.{name}" for name in ("sshfs", "glusterfs", "ceph", "juicefs", "s3fs", "gcsfuse", "goofys")}
_MEMORY = {"tmpfs", "ramfs"}
_OF_JOBS = ("SLURM_TMPDIR", "TMPDIR")  # variables that name a node's own disk, by precedence


def file_system(folder: str | os.PathLike) -> str:
    """The type of the file system that has a folder, such as "ext4", also of one that is not made yet. Empty if it is not known."""
    path, found, kind = Path(os.path.realpath(folder)), Path(), ""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        place = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[1]))
        if path.is_relative_to(place) and len(place.parts) >= len(found.parts):
            found, kind = place, line.split()[2]  # of two mounts at one place the later hides the other
    return kind


def is_on_network(folder: str | os.PathLike) -> bool:
    """Whether the file system of a folder is another machine's."""
    return file_system(folder) in _NETWORK


def node_disk() -> str | None:
    """The folder of $SLURM_TMPDIR or $TMPDIR that is on a disk of this machine, or None."""
    named = [os.environ[name] for name in _OF_JOBS if os.environ.get(name)]
    return next((path for path in named if os.path.isdir(path) and file_system(path) not in _NETWORK | _MEMORY), None)
