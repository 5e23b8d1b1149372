"""Checkpoints in a folder of every node: `checkpoint.local=true`.

[Note: Own folders]
The step folder of a node has the files of the node's ranks and the whole manifest. So the files of all nodes, copied into one folder, are an
ordinary checkpoint. A rank may need entries of other nodes' files: buffers, parts that several ranks hold and one saves, all states at stage
0, and other ranges in another layout. Before a load the nodes that have these entries send them, and the nodes that need them keep them in
a temporary folder until the load has ended. A checkpoint counts if every file is on some node next to the same manifest.
"""

import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ztk.checkpoint.errors import CheckpointError, DamagedCheckpoint, agreed
from ztk.checkpoint.manifest import Manifest, StateFile, manifest_hash
from ztk.checkpoint.reader import StateReader
from ztk.checkpoint.tensorfile import fsync, write_at
from ztk.core.policies.records import LATEST
from ztk.core.precision.names import DTYPES
from ztk.core.runtime import Comm
from ztk.core.runtime.host_memory import view_bytes

CHUNK_BYTES = 64 << 20  # of memory on every rank

Ranges = list[tuple[int, int]]  # of bytes, sorted, without overlaps


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The ranks that have the same folder. hosts: the host of each rank. first: for each rank, the lowest one with the same folder."""

    rank: int
    hosts: list[str]
    first: list[int]

    @property
    def is_first(self) -> bool:
        """Whether this rank keeps its node's folder."""
        return self.first[self.rank] == self.rank

    @staticmethod
    def of(comm: Comm, folder: Path, *, error: type[Exception]) -> "Nodes":
        """Compares the folders of all ranks, and makes missing ones. A collective call. Raises `error` on all ranks."""
        key = (platform.node(), 0, 0)
        with agreed(comm, error=error):
            folder.mkdir(parents=True, exist_ok=True)
            found = folder.stat()
            key = (platform.node(), found.st_dev, found.st_ino)
        keys = comm.gather_objects(key)
        return Nodes(rank=comm.rank, hosts=[host for host, _, _ in keys], first=[keys.index(key) for key in keys])


def check_own(folder: Path, *, nodes: Nodes, comm: Comm, token: str, error: type[Exception]) -> None:
    """Checks that no two nodes see the same folder. A collective call. token: the same on all ranks, and differs for every call.

    Raises:
        error: they do.
    """
    probe, is_made = folder / f"{LATEST}.tmp-{token}", False  # the next save removes it after a kill
    try:
        with agreed(comm, error=error):
            if nodes.is_first:
                try:
                    probe.touch(exist_ok=False)
                except FileExistsError:
                    raise error(
                        f"checkpoint.local=true: another node sees the folder {folder} of this one, too; leave the key out, or name a folder "
                        "on each node's own disk (hydra.run.dir=FOLDER)"
                    ) from None
                is_made = True
    finally:
        if is_made:
            probe.unlink(missing_ok=True)


def spread_file(path: Path, *, nodes: Nodes, comm: Comm, error: type[Exception]) -> None:
    """Writes rank 0's file to `path` of all other nodes. A collective call. Raises `error` on all ranks."""
    size = comm.broadcast_object(path.stat().st_size if comm.rank == 0 else None, label="size of a manifest")
    with agreed(comm, error=error):
        out = path if nodes.is_first and comm.rank else None
        fault = _copy([(0, size)], nbytes=size, source=0, path=path if comm.rank == 0 else None, out=out, comm=comm)
        if fault is not None:
            raise fault


def held_files(folder: Path, *, manifest: Manifest, digest: str) -> tuple[list[int], str]:
    """Returns the numbers of the files that a node has of a checkpoint, and why it lacks others.

    digest: hash of the manifest, without which files of the same names are another checkpoint's.
    """
    own = manifest_hash(folder)
    if own != digest:
        return [], "has another checkpoint of this name" if own else "has no such checkpoint"
    with os.scandir(folder) as found:
        sizes = {entry.name: entry.stat().st_size for entry in found}
    held = [number for number, file in enumerate(manifest.files) if sizes.get(file.file) == file.nbytes]
    cut = [file.file for file in manifest.files if sizes.get(file.file, file.nbytes) != file.nbytes]
    return held, f"has {cut[0]} with {sizes[cut[0]]} bytes" if cut else "does not have it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holders:
    """Where the files of a checkpoint are. own: numbers of the files in this node's folder. rank: the rank that sends each file."""

    own: frozenset[int]
    rank: dict[int, int]

    @staticmethod
    def find(folder: Path, *, manifest: Manifest, digest: str, nodes: Nodes, comm: Comm) -> "Holders":
        """Collects the files of all nodes, and checks their headers. manifest: entries are not needed. A collective call.

        Raises:
            DamagedCheckpoint: no node has a file, or a header is damaged.
        """
        with agreed(comm, error=DamagedCheckpoint):
            own, why = held_files(folder, manifest=manifest, digest=digest)
            if nodes.is_first:
                with StateReader(replace(manifest, files=[manifest.files[number] for number in own])) as reader:
                    reader.check_files()
        everyone = comm.gather_objects((own, why) if nodes.is_first else ((), ""))
        rank: dict[int, int] = {}
        for other, (numbers, _) in enumerate(everyone):
            for number in numbers:
                rank.setdefault(number, other)
        missing = [number for number in range(len(manifest.files)) if number not in rank]
        if missing:
            raise DamagedCheckpoint(_missing(missing, folder=folder, manifest=manifest, nodes=nodes, everyone=everyone))
        return Holders(own=frozenset(own), rank=rank)


def _missing(
    missing: Sequence[int],
    *,
    folder: Path,
    manifest: Manifest,
    nodes: Nodes,
    everyone: Sequence[tuple[Sequence[int], str]],
) -> str:
    hosts = [manifest.host_of(number) or "another node" for number in missing]
    named = ", ".join(f"{manifest.files[number].file} of {host}" for number, host in zip(missing, hosts, strict=True))
    whys = [
        f"{nodes.hosts[rank]} {why}" for rank, (_, why) in enumerate(everyone) if why and nodes.hosts[rank] in hosts
    ]
    absent = [f"{host} has no rank" for host in dict.fromkeys(hosts) if host not in nodes.hosts]
    return (
        f"{folder}: no node has {named:.200} ({'; '.join([*whys, *absent]):.400}); start the ranks on the nodes that saved it, or copy the "
        "folders of these nodes into one that all nodes share, and continue from that with checkpoint.local=false"
    )


@contextmanager
def borrowed_files(
    manifest: Manifest, *, holders: Holders, nodes: Nodes, comm: Comm, token: str
) -> Iterator[dict[str, Path]]:
    """Context with the entries of `manifest`, this rank's, that its node lacks: name of a file -> a temporary copy with these entries alone.
    A collective call.

    Raises:
        CheckpointError: a file cannot be read, or a copy cannot be written.
    """
    folder = Path(manifest.path)
    temporary = folder.with_name(f"{folder.name}.tmp-{token}")
    needs = {
        number: _ranges(file)
        for number, file in enumerate(manifest.files)
        if file.entries and number not in holders.own
    }
    everyone = comm.gather_objects(needs)
    of_node = [rank for rank, first in enumerate(nodes.first) if first == nodes.first[nodes.rank]]
    try:
        with agreed(comm, error=CheckpointError):
            faults = []
            for number in sorted({number for each in everyone for number in each}):
                name, source = manifest.files[number].file, holders.rank[number]
                takes = nodes.is_first and any(number in everyone[rank] for rank in of_node)
                fault = _copy(
                    _union([span for each in everyone for span in each.get(number, ())]),
                    nbytes=manifest.files[number].nbytes,
                    source=source,
                    path=folder / name if comm.rank == source else None,
                    out=temporary / name if takes else None,
                    comm=comm,
                )
                faults += [fault] if fault is not None else []
            if faults:
                raise faults[0]
        yield {manifest.files[number].file: temporary / manifest.files[number].file for number in needs}
    finally:
        if nodes.is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def _copy(
    ranges: Ranges, *, nbytes: int, source: int, path: Path | None, out: Path | None, comm: Comm
) -> OSError | None:
    """Sends ranges of a file of `nbytes` bytes to all ranks, and creates files with them. A collective call, so errors are returned.

    path: the file, on rank `source`. out: the new file, on ranks that need it. A part that cannot be read is sent as zeros.
    """
    fault: OSError | None = None
    reads = writes = -1
    try:
        reads = -1 if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if out is not None:
            out.parent.mkdir(exist_ok=True)
            writes = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.truncate(writes, nbytes)
    except OSError as error:
        fault = error
    for begin, end in ranges:
        for at in range(begin, end, CHUNK_BYTES):
            piece = torch.zeros(min(CHUNK_BYTES, end - at), dtype=torch.uint8)
            try:
                if reads >= 0:
                    os.preadv(reads, [view_bytes(piece)], at)
            except OSError as error:
                fault = error
            piece = piece.to(comm.device)
            comm.broadcast(piece, source=source, label="bytes of a checkpoint", kind="scalars").wait()
            try:
                if out is not None and writes >= 0:
                    write_at(writes, data=view_bytes(piece.cpu()), offset=at, path=out)
            except OSError as error:
                fault = error
    try:
        if out is not None and writes >= 0:
            fsync(writes, path=out)
    except OSError as error:
        fault = error
    for fd in (reads, writes):
        if fd >= 0:
            os.close(fd)
    return fault


def _ranges(file: StateFile) -> Ranges:
    """The bytes of a file's entries, and of its header, which a reader checks."""
    spans = [(0, file.header_nbytes)]
    for entry in file.entries:
        spans.append((entry.offset, entry.offset + (entry.stop - entry.start) * DTYPES[entry.dtype].itemsize))
    return _union(spans)


def _union(spans: Iterable[tuple[int, int]]) -> Ranges:
    merged: Ranges = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged
