"""A file of equally laid out layers: a layer as named ranges of bytes, a layer over memory that reads fill, and the writer."""

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES
from ztk.inference.products import Affine, Product
from ztk.inference.quantised import Int4Product, Int8Product
from ztk.inference.weights import Layer, Mlp, Values
from ztk.zero.offload.io_engine import Transfer
from ztk.zero.offload.pool import AlignedRegion
from ztk.zero.offload.slot import flat_bytes

NORM, LAYERS = "norm", "layers.bin"
_KINDS: dict[str, type[Product]] = {"stored": Product, "int8": Int8Product, "int4": Int4Product}
_ALIGNMENT = 64  # bytes: of a vector of the processor, and of torch's own memory
Built = TypeVar("Built")  # type of a layer in the model: `Layer`, or `Values` themselves


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A product or norm without its values. path: `qkv`, `mlp.gate` or `experts.3.up`. shape: [out, in], or [C] of a norm. front: the same
    as in `Product`."""

    path: str
    kind: str
    shape: tuple[int, ...]
    has_bias: bool
    front: int = 0


@dataclass(kw_only=True, eq=False)
class LayerBuffer(Generic[Built]):
    """A layer over `memory`, uint8 [bytes of a layer], which is filled by reads.

    number: the layer's that it has or is about to have, or None. under_way: the read that fills it.
    """

    layer: Built
    memory: Tensor
    region: AlignedRegion
    number: int | None = None
    under_way: Transfer | None = None


def items_of(values: Values) -> list[Item]:
    """The items of a layer."""
    return [item_of(path, value=value) for path, value in values.items()]


def item_of(path: str, *, value: Product | Affine) -> Item:
    """A product or norm without its values."""
    if isinstance(value, Product):
        kind = next(name for name, cls in _KINDS.items() if type(value) is cls)
        return Item(path=path, kind=kind, shape=value.shape, has_bias="bias" in value.tensors(), front=value.front)
    return Item(path=path, kind=NORM, shape=tuple(value.weight.shape), has_bias=value.bias is not None)


def blank(item: Item) -> Product | Affine:
    """A product or norm of zeros."""
    bias = torch.zeros(item.shape[0]) if item.has_bias else None
    affine = Affine(weight=torch.zeros(item.shape), bias=bias, start=item.front)
    return affine if item.kind == NORM else _KINDS[item.kind](affine)


def tensors_of(value: Product | Affine) -> dict[str, Tensor]:
    """Its memory by name, [*] of any dtype; an opaque part is uint8 [bytes]."""
    if isinstance(value, Product):
        return value.tensors()
    return {"weight": value.weight} if value.bias is None else {"weight": value.weight, "bias": value.bias}


def lay_out(values: Values) -> tuple[list[tuple[str, str, int, Tensor]], int]:
    """The tensors of a layer [*], each with its path, its name and its offset in bytes; and the layer's bytes, a multiple of 4096."""
    found, at = [], 0
    for path, value in values.items():
        for name, tensor in tensors_of(value).items():
            at = _up(at, _ALIGNMENT)
            found.append((path, name, at, tensor))
            at += tensor.nbytes
    return found, _up(at, PAGE_BYTES)


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
        """A layer of zeros over one page-aligned region of its own, so that a read of all its bytes is one request."""
        values = {item.path: blank(item) for item in self.items}
        tensors, nbytes = lay_out(values)
        region = AlignedRegion(nbytes=nbytes, pin=False)
        for path, name, offset, own in tensors:
            memory, value = region.bytes[offset : offset + own.nbytes].view(own.dtype).view(own.shape), values[path]
            if isinstance(value, Product):
                value.adopt({name: memory})
            else:
                setattr(value, name, memory)
        return LayerBuffer(layer=self.build(values), memory=region.bytes, region=region)


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
        for _, _, offset, tensor in lay_out(values)[0]:
            self._file.seek(self._number * self.nbytes + offset)
            self._file.write(flat_bytes(tensor).numpy())
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


def assemble(values: Values) -> Layer:
    """The layer of one of the engine's families, of products and norms by path."""
    own, mlps = {}, {}
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        if group:
            mlps.setdefault(group, {})[name] = value
        else:
            own[path] = value
    experts = [Mlp(**parts) for group, parts in mlps.items() if group.startswith("experts.")]
    mlp = Mlp(**mlps["mlp"]) if "mlp" in mlps else None
    return Layer(**own, mlp=mlp, experts=experts or None)


def layout_digest(item: Item) -> str:
    """Digest of the layout that this processor and build of torch use for a weight of the item's kind and shape."""
    numel = item.shape[0] * item.shape[1]
    pattern = torch.arange(numel, dtype=torch.int64).remainder_(8191).float().view(item.shape)  # 13 bits: exact in fp32
    tensors = _KINDS[item.kind](Affine(weight=pattern)).tensors()
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        found.update(flat_bytes(tensor).numpy())
    return found.hexdigest()


def _up(at: int, multiple: int) -> int:
    return -(-at // multiple) * multiple
