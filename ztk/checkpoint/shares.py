"""The part of a manifest that a rank needs to load: the entries that overlap the ranges that it reads.

A manifest of 405B on 1,024 ranks is about 1 GB, of which a rank needs a thousandth. So rank 0 alone reads it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import prod

from ztk.checkpoint.manifest import OPTIMIZER, RNG, Entry, Manifest
from ztk.checkpoint.model import ModelInfo, persistent_buffers
from ztk.core.runtime.boxes import Box, boxes_of
from ztk.core.runtime.part import Part
from ztk.train.engine import Engine

Ranges = dict[str, tuple[int, int]]  # name -> from its first to behind its last element, of the flat full tensor
Entries = dict[int, list[Entry]]  # by the number of their file


def without_entries(manifest: Manifest) -> Manifest:
    """Returns `manifest` with empty lists of entries."""
    return replace(manifest, files=[replace(file, entries=[]) for file in manifest.files])


def with_entries(manifest: Manifest, *, entries: Entries) -> Manifest:
    """Returns `manifest` with these entries in place of its own."""
    files = [replace(file, entries=entries.get(number, [])) for number, file in enumerate(manifest.files)]
    return replace(manifest, files=files)


def ranges_of(engine: Engine, *, manifest: Manifest, info: ModelInfo) -> Ranges:
    """Returns the ranges that this rank reads, under the checkpoint's names. A range may have gaps. Rank 0 also compares tied parameters."""
    found: Ranges = {}

    def add(name: str, start: int, stop: int) -> None:
        first, last = found.get(name, (start, stop))
        found[name] = (min(first, start), max(last, stop))

    for name, part, start, stop in engine.zero.state.loaded():
        if start < stop:
            add(manifest.tied.get(name, name), *_span(part, start=start, stop=stop))
    for name, buffer in persistent_buffers(engine.module):
        add(manifest.tied.get(name, name), 0, max(1, buffer.numel()))
    shapes = {saved.name: saved.shape for saved in manifest.parameters} if engine.process.rank == 0 else {}
    for pair in info.tied.items():
        if all(name in shapes for name in pair):
            for name in pair:
                add(manifest.tied.get(name, name), 0, prod(shapes[name]))
    return found


def shares_of(manifest: Manifest, *, wanted: list[Ranges]) -> list[Entries]:
    """Returns each rank's entries: entries of its `wanted` ranges, its generators' states, and the states of an optimizer of full
    parameters, which every rank reads."""
    shapes = {info.name: tuple(info.shape) for info in (*manifest.parameters, *manifest.buffers)}
    by_name: dict[str, list[tuple[int, int, int, Entry]]] = defaultdict(list)
    common: Entries = defaultdict(list)
    for number, file in enumerate(manifest.files):
        for entry in file.entries:
            if entry.kind == OPTIMIZER:
                common[number].append(entry)
            elif entry.kind != RNG:
                by_name[entry.name].append((*_span_of(entry, shape=shapes.get(entry.name)), number, entry))
    spans = {name: _Spans(listed) for name, listed in by_name.items()}
    shares = []
    for rank, ranges in enumerate(wanted):
        share: Entries = defaultdict(list, {number: list(entries) for number, entries in common.items()})
        own = manifest.files[rank].entries if rank < len(manifest.files) else []
        if generators := [entry for entry in own if entry.kind == RNG]:
            share[rank] += generators
        for name, (start, stop) in ranges.items():
            for number, entry in spans[name].overlapping(start, stop) if name in spans else ():
                share[number].append(entry)
        shares.append(dict(share))
    return shares


class _Spans:
    """The entries of one name, by the range of the flat full tensor that they span."""

    def __init__(self, listed: list[tuple[int, int, int, Entry]]) -> None:
        self._listed = sorted(listed, key=lambda item: item[:3])
        self._starts = [start for start, _, _, _ in self._listed]
        self._most = list(accumulate((stop for _, stop, _, _ in self._listed), max))  # the largest stop so far

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, Entry]]:
        """Yields the number of the file and the entry of those that overlap [start, stop)."""
        first, last = bisect_left(self._most, start + 1), bisect_left(self._starts, stop)
        yield from ((number, entry) for _, end, number, entry in self._listed[first:last] if end > start)


def _span_of(entry: Entry, *, shape: tuple[int, ...] | None) -> tuple[int, int]:
    if entry.box is None or shape is None:
        return entry.start, max(entry.stop, entry.start + 1)  # also of an empty buffer
    corner, size = zip(*entry.box, strict=True) if entry.box else ((), ())
    return _span(Part(full_shape=shape, start=tuple(corner), shape=tuple(size)), start=entry.start, stop=entry.stop)


def _span(part: Part, *, start: int, stop: int) -> tuple[int, int]:
    """The range of the flat full tensor from the first to behind the last of a part's elements [start, stop)."""
    full = Box(start=(0,) * len(part.full_shape), shape=part.full_shape)
    found = [box.moved(part.start) for box in boxes_of(part.shape, start=start, stop=stop)]
    firsts = [box.first_in(full) for box in found]
    return min(firsts, default=0), max(
        (first + box.span_in(full) for first, box in zip(firsts, found, strict=True)), default=0
    )
