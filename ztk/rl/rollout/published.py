"""The weights of a step for servers: files of full tensors that rank 0 sends, or shards that every rank offers.

[Note: Shards of a step]
A rank writes the elements that it would save into a checkpoint, in the model's dtype, into files of its own, and offers them by `Offer`. A
server's ranks pull the boxes that they compute with, whatever the layouts are, so no rank gathers a parameter. The files stay mapped while a
transfer goes on with them, also after they are removed, so training does not wait for a slow server.
"""

import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ztk.core.runtime.boxes import Box, boxes_of
from ztk.core.runtime.comm.pulls import Held, Offer
from ztk.rl.rollout.cached import Merged
from ztk.rl.rollout.clients import Channel, Owner, Weights
from ztk.train.engine import Engine

_PART_BYTES = 1 << 26  # of a file of weights, unless a tensor is larger
Save = Callable[[dict[str, Tensor], Path], None]
Open = Callable[[Path], Any]  # a file of safetensors, as its `safe_open`
Shapes = dict[str, tuple[int, ...]]


class Publisher(Protocol):
    """Makes the weights of a step available. shapes: shapes of the full parameters by name."""

    shapes: Shapes

    def publish(self, version: str) -> Weights | None:
        """Replaces the earlier version. Returns None on all ranks but 0. A collective call."""
        ...

    def close(self) -> None:
        """Removes the files. Idempotent."""
        ...


class Files:
    """Full tensors, written by rank 0 one at a time, with adapters merged. folder: holds the files. save: writes safetensors."""

    def __init__(self, engine: Engine, *, folder: Path, save: Save) -> None:
        self._source, self._folder, self._save = Merged(engine), folder, save
        self._leads = engine.comm.rank == 0
        self.shapes: Shapes = {name: tuple(value.shape) for name, value in self._source.full_parameters()}

    def publish(self, version: str) -> Weights | None:
        if not self._leads:
            for _ in self._source.full_parameters():
                pass
            return None
        folder, before = self._folder / version, [*self._folder.glob("*")]
        for _ in _written(self._source.full_parameters(), folder=folder, save=self._save):
            pass
        _remove(before)
        return folder

    def close(self) -> None:
        if self._leads:
            _remove([self._folder])


class Shards:
    """Each rank's own elements, see [Note: Shards of a step]. Where adapters are merged, rank 0 offers full tensors.

    folder: holds a rank's files. save, opens: write and open safetensors. channels: to the servers.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        folder: Path,
        save: Save,
        opens: Open,
        channels: Sequence[Channel],
        timeout_seconds: float,
    ) -> None:
        self._engine, self._folder, self._save, self._opens = engine, folder / f"rank{engine.comm.rank}", save, opens
        self._is_merged = any(hasattr(module, "adapter_is_off") for module in engine.module.modules())
        own = {name: shape for name, shape, _, _ in self._values()}
        self.shapes: Shapes = {
            name: shape for theirs in engine.comm.gather_objects(own) for name, shape in theirs.items()
        }
        self.offer = Offer(timeout_seconds=timeout_seconds)
        place = Owner(
            node=socket.gethostname(), host=_host_to(channels), port=self.offer.port, secret=self.offer.secret
        )
        self._owners = engine.comm.gather_objects(place)

    def publish(self, version: str) -> Weights | None:
        before, kinds = [*self._folder.glob("*")], list[tuple[str, tuple[int, ...], list[Box]]]()

        def numbered() -> Iterator[tuple[str, Tensor]]:
            for name, shape, boxes, value in self._values():
                kinds.append((name, shape, boxes))
                yield str(len(kinds) - 1), value

        held = list[Held]()
        for path, keys in _written(numbered(), folder=self._folder / version, save=self._save):
            file = self._opens(path)
            for key in keys:
                name, shape, boxes = kinds[int(key)]
                held += _held(name, full_shape=shape, boxes=boxes, read=partial(file.get_tensor, key))
        self.offer.publish(version, held=held)
        _remove(before)
        self._engine.comm.gather_objects(None)  # every rank offers them now
        return self._owners if self._engine.comm.rank == 0 else None

    def _values(self) -> Iterator[tuple[str, tuple[int, ...], list[Box], Tensor]]:
        """Name, full shape, boxes and flat values of this rank's elements, valid until the next ones. A collective call."""
        if self._is_merged:
            for name, value in Merged(self._engine).full_parameters():
                if self._engine.comm.rank == 0:
                    shape = tuple(value.shape)
                    yield name, shape, [Box(start=(0,) * len(shape), shape=shape)], value.detach().flatten()
            return
        for shard in self._engine.zero.state.parameters():
            part = shard.part
            boxes = [box.moved(part.start) for box in boxes_of(part.shape, start=shard.start, stop=shard.stop)]
            yield shard.name, part.full_shape, boxes, shard.value

    def close(self) -> None:
        self.offer.close()
        _remove([self._folder])
        with suppress(OSError):  # other ranks have not removed theirs
            self._folder.parent.rmdir()


def _written(values: Iterable[tuple[str, Tensor]], *, folder: Path, save: Save) -> Iterator[tuple[Path, list[str]]]:
    """Writes tensors into files of `folder`, and yields the path and the names of each."""
    folder.mkdir(parents=True, exist_ok=True)
    part, size, count = dict[str, Tensor](), 0, 0

    def saved() -> tuple[Path, list[str]]:
        path = folder / f"{count:05}.safetensors"
        save(part, path)
        return path, list(part)

    for name, value in values:
        part[name] = value.detach().to("cpu", copy=True).contiguous()
        size += part[name].nbytes
        if size >= _PART_BYTES:
            yield saved()
            part, size, count = {}, 0, count + 1
    if part:
        yield saved()


def _held(
    name: str, *, full_shape: tuple[int, ...], boxes: Sequence[Box], read: Callable[[], Tensor]
) -> Iterator[Held]:
    """The boxes of a tensor, whose elements follow each other in the flat tensor that `read` returns."""
    dtype, first = read().dtype, 0

    def values(first: int, box: Box) -> Tensor:
        return read()[first : first + box.numel].view(box.shape)

    for box in boxes:
        yield Held(name=name, full_shape=full_shape, box=box, dtype=dtype, read=partial(values, first, box))
        first += box.numel


def _host_to(channels: Sequence[Channel]) -> str:
    """The address of this machine from which it reaches the first server whose name is known."""
    for channel in channels:
        with suppress(OSError):
            return channel.own_host()
    return socket.gethostname()


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
