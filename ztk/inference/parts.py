"""A file of equally laid out layers: a layer as named ranges of bytes, a layer over memory that reads fill, and the writer."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES
from ztk.inference.products import Affine, Product
from ztk.inference.quantised import Int4Product, Int8Product
from ztk.inference.weights import Layer, Mlp
from ztk.zero.offload.engine import Transfer
from ztk.zero.offload.pool import AlignedRegion

NORM, LAYERS = "norm", "layers.bin"
_KINDS: dict[str, type[Product]] = {"stored": Product, "int8": Int8Product, "int4": Int4Product}
_ALIGNMENT = 64  # bytes: of a vector of the processor, and of torch's own memory
Values = Mapping[str, Product | Affine]  # products and norms of a layer by path, in memory order
Built = TypeVar("Built")  # type of a layer in the model: `Layer`, or `Values` themselves


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A product or norm without its values. path: `qkv`, `mlp.gate` or `experts.3.up`. shape: [out, in], or [C] of a norm. front: as of
    `Product`."""

    path: str
    kind: str
    shape: tuple[int, ...]
    has_bias: bool
    front: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One tensor of a layer. offset: from the layer's first byte."""

    path: str
    offset: int
    nbytes: int


@dataclass(kw_only=True, eq=False)
class LayerBuffer(Generic[Built]):
    """A layer over `memory`, uint8 [bytes of a layer], which is filled by reads.

    number: of the layer that it has or is about to have, or None. under_way: the read that fills it.
    """

    layer: Built
    memory: Tensor
    region: AlignedRegion
    number: int | None = None
    under_way: Transfer | None = None


def items_of(values: Values) -> list[Item]:
    """The items of a layer."""
    return [item_of(path, value=value) for path, value in values.items()]


def values_of(layer: Layer) -> Values:
    """Its products and norms by path."""
    return dict(_leaves(layer))


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


def lay_out(values: Values) -> tuple[list[Part], int]:
    """The ranges of a layer's tensors, one after the other, and the layer's bytes, a multiple of 4096."""
    found, at = [], 0
    for path, tensor in _memory(values):
        at = _up(at, _ALIGNMENT)
        found.append(Part(path=path, offset=at, nbytes=tensor.nbytes))
        at += tensor.nbytes
    return found, _up(at, PAGE_BYTES)


def layer_buffer(items: list[Item], *, build: Callable[[Values], Built]) -> LayerBuffer[Built]:
    """A layer of zeros over one page-aligned region, so that a read of all its bytes is one request. build: see `LayerFile`."""
    values = {item.path: blank(item) for item in items}
    parts, nbytes = lay_out(values)
    region, by_path = AlignedRegion(nbytes=nbytes, pin=False), dict(_memory(values))
    for part in parts:
        own, (path, _, name) = by_path[part.path], part.path.rpartition(".")
        memory = region.bytes[part.offset : part.offset + part.nbytes].view(own.dtype).view(own.shape)
        _adopt(values[path], name=name, memory=memory)
    return LayerBuffer(layer=build(values), memory=region.bytes, region=region)


def write_layer(values: Values) -> Iterator[tuple[int, Tensor]]:
    """(offset, uint8 [bytes]) of every tensor of a layer, in the file's order."""
    parts, _ = lay_out(values)
    by_path = dict(_memory(values))
    for part in parts:
        yield part.offset, bytes_of(by_path[part.path])


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
        found.update(bytes_of(tensor).numpy())
    return found.hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _leaves(layer: Layer) -> Iterator[tuple[str, Product | Affine]]:
    for own in fields(layer):
        value = getattr(layer, own.name)
        if isinstance(value, Product | Affine):
            yield own.name, value
        for group, mlp in _mlps(own.name, value=value):
            for part in fields(mlp):
                product = getattr(mlp, part.name)
                if product is not None:
                    yield f"{group}.{part.name}", product


def _mlps(name: str, *, value: object) -> Iterator[tuple[str, Mlp]]:
    if isinstance(value, Mlp):
        yield name, value
    elif isinstance(value, list):
        for number, mlp in enumerate(value):
            yield f"{name}.{number}", mlp


def _memory(values: Values) -> Iterator[tuple[str, Tensor]]:
    for path, value in values.items():
        for name, tensor in tensors_of(value).items():
            yield f"{path}.{name}", tensor


def _adopt(value: Product | Affine, *, name: str, memory: Tensor) -> None:
    if isinstance(value, Product):
        value.adopt({name: memory})
    else:
        setattr(value, name, memory)


def _up(at: int, multiple: int) -> int:
    return -(-at // multiple) * multiple
