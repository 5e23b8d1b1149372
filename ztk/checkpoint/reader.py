"""Reads any range of any state of a checkpoint by offset, and verifies the checksums of all bytes that it uses.

Values keep their saved dtype; generator states are uint8.
"""

import os
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ztk.checkpoint.errors import CheckpointError, DamagedCheckpoint
from ztk.checkpoint.folder import usable
from ztk.checkpoint.manifest import BUFFER, RNG, Entry, Manifest, StateFile
from ztk.core.precision.names import DTYPES
from ztk.core.runtime.boxes import Box, boxes_of
from ztk.core.runtime.host_memory import view_bytes
from ztk.core.runtime.part import Part

CACHED_BLOCKS = 8  # per kind of state; neighbouring ranges share a block
OPEN_FILES = 64
_CHUNK = 1 << 20  # elements read at a time if the saved parts are cut differently


class StateReader:
    """Opens files on first use. In addition to the result it needs memory for CACHED_BLOCKS blocks, and temporarily for _CHUNK
    elements.
    """

    def __init__(self, manifest: Manifest, *, copies: Mapping[str, Path] | None = None) -> None:
        """copies: name of a file -> the file to read in its place; see `borrowed_files`."""
        self._manifest, self._folder, self._copies = manifest, Path(manifest.path), copies or {}
        self._entries: dict[tuple[str, str], list[tuple[Entry, StateFile]]] = defaultdict(list)
        for file in manifest.files:
            for entry in file.entries:
                if entry.kind != RNG:
                    self._entries[entry.kind, entry.name].append((entry, file))
        for ranges in self._entries.values():
            ranges.sort(key=lambda span: span[0].start)
        self._files: OrderedDict[str, int] = OrderedDict()
        self._blocks: OrderedDict[tuple[str, int, int], memoryview] = OrderedDict()
        self.read_bytes = 0

    def check_files(self) -> None:
        """Checks the lengths and headers of all files.

        Raises:
            DamagedCheckpoint: a file is truncated or its header is damaged.
        """
        for file in self._manifest.files:
            self._open(file)

    def has(self, *, name: str, kind: str) -> bool:
        """Returns whether the checkpoint has state `kind` of `name`."""
        return (kind, self._manifest.tied.get(name, name)) in self._entries

    def dtype(self, *, name: str, kind: str) -> torch.dtype:
        """Returns the stored dtype."""
        return DTYPES[self._entries[kind, self._manifest.tied.get(name, name)][0][0].dtype]

    def read(self, *, name: str, kind: str, start: int, stop: int, part: Part | None = None) -> Tensor:
        """Returns elements [start, stop) of flat state `kind` of `name`, in its stored dtype, on the CPU.

        part: counts elements of this part of the full tensor, which the files may divide in another way.

        Raises:
            CheckpointError: the checkpoint lacks elements or is damaged.
        """
        name = self._manifest.tied.get(name, name)
        ranges = self._entries[kind, name]
        if not ranges:
            raise CheckpointError(f"{self._folder}: no {kind} of {name}")
        out = torch.empty(stop - start, dtype=DTYPES[ranges[0][0].dtype])
        if (part is None or part.is_full) and all(entry.box is None for entry, _ in ranges):
            self._read_flat(ranges, name=name, kind=kind, start=start, out=out)
        else:
            self._read_boxes(ranges, name=name, kind=kind, start=start, out=out, part=part)
        return out

    def _read_flat(
        self, ranges: list[tuple[Entry, StateFile]], *, name: str, kind: str, start: int, out: Tensor
    ) -> None:
        reached, stop = start, start + out.numel()
        for entry, file in ranges:
            first, last = max(entry.start, start), min(entry.stop, stop)
            if first < last:
                if first > reached:
                    break
                self._copy(entry, file=file, first=first, out=out[first - start : last - start])
                reached = last
        if reached < stop:
            raise CheckpointError(f"{self._folder}: elements from {reached} on of {kind} of {name} are in no file")

    def _read_boxes(
        self,
        ranges: list[tuple[Entry, StateFile]],
        *,
        name: str,
        kind: str,
        start: int,
        out: Tensor,
        part: Part | None,
    ) -> None:
        """Reads a part that the files divide differently: copies the overlap with each entry."""
        full_shape = self._shape(name, kind=kind)
        part, missing, at = part or Part.everything(full_shape), out.numel(), 0
        for box in boxes_of(part.shape, start=start, stop=start + out.numel()):
            target = out[at : at + box.numel]
            wanted, at = box.moved(part.start), at + box.numel
            for entry, file in ranges:
                missing -= self._copy_overlap(entry, file=file, full_shape=full_shape, wanted=wanted, target=target)
        if missing:
            raise CheckpointError(
                f"{self._folder}: {missing} of {out.numel()} elements of {kind} of {name} are in no file or in several"
            )

    def _copy_overlap(
        self, entry: Entry, *, file: StateFile, full_shape: tuple[int, ...], wanted: Box, target: Tensor
    ) -> int:
        """Copies the overlap of `entry` with box `wanted` into `target`, the box's flat elements. Returns the number of elements."""
        corner, shape = zip(*entry.box, strict=True) if entry.box else ((0,) * len(full_shape), full_shape)
        copied, offset = 0, entry.start
        for held in boxes_of(tuple(shape), start=entry.start, stop=entry.stop):
            outer, first = held.moved(tuple(corner)), offset
            offset += held.numel
            common = outer.overlap(wanted)
            for piece in common.rows(outer=outer, limit=_CHUNK) if common else ():
                begin = piece.first_in(outer)
                values = torch.empty(piece.span_in(outer), dtype=target.dtype)
                self._copy(entry, file=file, first=first + begin, out=values)
                piece.view(target, outer=wanted, first=0).copy_(piece.view(values, outer=outer, first=begin))
                copied += piece.numel
        return copied

    def _shape(self, name: str, *, kind: str) -> tuple[int, ...]:
        infos = self._manifest.buffers if kind == BUFFER else self._manifest.parameters
        return tuple(next(info.shape for info in infos if info.name == name))

    def rng_states(self, rank: int) -> dict[str, Tensor]:
        """Returns the result of `ztk.checkpoint.rng.rng_states` on `rank`."""
        file = self._manifest.files[rank]
        states = {}
        for entry in file.entries:
            if entry.kind == RNG:
                states[entry.name] = torch.empty(entry.stop, dtype=DTYPES[entry.dtype])
                self._copy(entry, file=file, first=0, out=states[entry.name])
        return states

    def faults(self) -> list[str]:
        """Reads everything. Returns a message for each missing or truncated file and for each damaged block."""
        found, scratch = [], memoryview(bytearray(self._manifest.block_bytes))
        for file in self._manifest.files:
            try:
                self._open(file)
            except CheckpointError as error:
                found.append(str(error))
                continue
            for entry in file.entries:
                for number in range(len(entry.crc32)):
                    nbytes = _block_nbytes(entry, number=number, size=self._manifest.block_bytes)
                    try:
                        self._read_block(entry, file=file, number=number, into=scratch[:nbytes])
                    except CheckpointError as error:
                        found.append(str(error))
        return found

    def _copy(self, entry: Entry, *, file: StateFile, first: int, out: Tensor) -> None:
        """Copies elements of `entry` from element `first` of its tensor into `out`: full blocks directly, partial blocks through the
        cache.
        """
        itemsize, size = out.itemsize, self._manifest.block_bytes
        begin = (first - entry.start) * itemsize  # in bytes from the entry's start
        end = begin + out.nbytes
        target = view_bytes(out)
        for number in range(begin // size, -(-end // size)):
            low, high = max(begin, number * size), min(end, (number + 1) * size)
            part = target[low - begin : high - begin]
            if high - low == _block_nbytes(entry, number=number, size=size):
                self._read_block(entry, file=file, number=number, into=part)
            else:
                part[:] = self._block(entry, file=file, number=number)[low - number * size : high - number * size]

    def _block(self, entry: Entry, *, file: StateFile, number: int) -> memoryview:
        """Returns the verified block `number` of an entry, from the cache if possible."""
        key = (file.file, entry.offset, number)
        if key not in self._blocks:
            nbytes = _block_nbytes(entry, number=number, size=self._manifest.block_bytes)
            block = memoryview(bytearray(nbytes))
            self._read_block(entry, file=file, number=number, into=block)
            self._blocks[key] = block
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _read_block(self, entry: Entry, *, file: StateFile, number: int, into: memoryview) -> None:
        offset, done = entry.offset + number * self._manifest.block_bytes, 0
        while done < len(into):
            try:
                moved = os.preadv(self._open(file), [into[done:]], offset + done)
            except OSError as error:
                raise self._damaged(file, text=f"cannot be read at byte {offset + done}: {error.strerror}") from error
            if moved == 0:
                raise self._damaged(file, text=f"ends at byte {offset + done} of {file.nbytes}")
            done += moved
        self.read_bytes += done
        if zlib.crc32(into) != entry.crc32[number]:
            raise self._damaged(
                file, text=f"bytes {offset} to {offset + done} ({entry.kind} of {entry.name}) are damaged"
            )

    def _open(self, file: StateFile) -> int:
        """Returns a file descriptor. Checks length and header once per opening."""
        if file.file in self._files:
            self._files.move_to_end(file.file)
            return self._files[file.file]
        path = self._copies.get(file.file, self._folder / file.file)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            host = self._manifest.host_of(next(n for n, each in enumerate(self._manifest.files) if each is file))
            kept = f": {host} kept it (checkpoint.local=true), so copy the files of that node's folder into this one"
            raise self._damaged(file, text=f"is missing{kept if host else ''}") from None
        except OSError as error:
            raise self._damaged(file, text=f"cannot be opened: {error.strerror}") from error
        self._files[file.file] = fd
        length = os.fstat(fd).st_size
        if length != file.nbytes:
            self._drop(file.file)
            raise self._damaged(file, text=f"has {length} bytes instead of {file.nbytes}")
        if zlib.crc32(os.pread(fd, file.header_nbytes, 0)) != file.header_crc32:
            self._drop(file.file)
            raise self._damaged(file, text="has a damaged header")
        if len(self._files) > OPEN_FILES:
            self._drop(next(iter(self._files)))
        return fd

    def _drop(self, name: str) -> None:
        os.close(self._files.pop(name))

    def _damaged(self, file: StateFile, *, text: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self._folder / file.file} {text}; {usable(self._folder.parent, without=self._folder)}"
        )

    def close(self) -> None:
        """Closes all files. Idempotent."""
        for name in list(self._files):
            self._drop(name)

    def __enter__(self) -> "StateReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _block_nbytes(entry: Entry, *, number: int, size: int) -> int:
    """Returns the size of a block. The last block of an entry may be short."""
    return min(size, (entry.stop - entry.start) * DTYPES[entry.dtype].itemsize - number * size)
