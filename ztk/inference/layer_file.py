"""A file of equally laid out layers, one after the other: the writer, and the data that readers need."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from ztk.inference.parts import Built, Item, LayerBuffer, Values, items_of, lay_out, layer_buffer, write_layer

LAYERS = "layers.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFile(Generic[Built]):
    """`layers.bin` in `folder`: `count` layers of `items`, each of `nbytes`, a multiple of 4096. build: makes a layer from its products and
    norms by path."""

    folder: Path
    count: int
    items: list[Item]
    nbytes: int
    build: Callable[[Values], Built]

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.folder / LAYERS

    def buffer(self) -> LayerBuffer[Built]:
        """A layer of zeros in memory of its own."""
        return layer_buffer(self.items, build=self.build)


class LayerWriter:
    """Writes `count` layers into `layers.bin` of an existing folder; a context, at whose end all are written.

    Raises:
        ValueError: the disk is too small, or a layer is not built as the first one.
    """

    def __init__(self, folder: Path, *, count: int) -> None:
        self._folder, self._count = folder, count
        self._file = open(folder / LAYERS, "wb")
        self._number, self.items, self.nbytes = 0, list[Item](), 0

    def write(self, values: Values) -> None:
        """The next layer."""
        if self._number == 0:
            self.items, self.nbytes = items_of(values), lay_out(values)[1]
            self._check_space()
        if items_of(values) != self.items:
            raise ValueError(
                f"offload=nvme: layer {self._number} is not built as the first one, and layers that are streamed are built alike; leave "
                "offload out"
            )
        for offset, memory in write_layer(values):
            self._file.seek(self._number * self.nbytes + offset)
            self._file.write(memory.numpy())
        self._number += 1

    def __enter__(self) -> "LayerWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                assert self._number == self._count, "every layer is written"
                self._file.truncate(self._count * self.nbytes)
                self._file.flush()
                os.fsync(
                    self._file.fileno()
                )  # on some filesystems, direct reads miss data that is only in the page cache

    def _check_space(self) -> None:
        needed, free = self._count * self.nbytes, shutil.disk_usage(self._folder).free
        if needed > free:
            raise ValueError(
                f"{self._folder.parent} has {free} bytes free, and the packed layers need {needed}: free some, or name another disk"
            )
