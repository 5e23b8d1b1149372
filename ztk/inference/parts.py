"""Equally laid out layers in a file or in main memory: a layer as named ranges of bytes, a layer over memory that is filled, and the writer."""

import copy
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES
from ztk.core.runtime.system_memory import available_memory
from ztk.inference.kernel_products import RowsProduct
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
    """A product or norm without its values. path: `qkv`, `mlp.gate` or `experts.3.up`. kind: a format, or the dtype and number of stacked
    weights of the kernels' products. shape: [out, in], or [C] of a norm. front: the same as in `Product`."""

    path: str
    kind: str
    shape: tuple[int, ...]
    has_bias: bool
    front: int = 0


@dataclass(kw_only=True, eq=False)
class LayerBuffer(Generic[Built]):
    """A layer over `memory`, uint8 [bytes of a layer], which is filled by reads or copies.

    region: owns the memory, or None on a GPU. number: the layer's that it has or is about to have, or None. under_way: the read that fills it.
    """

    layer: Built
    memory: Tensor
    region: AlignedRegion | None
    number: int | None = None
    under_way: Transfer | None = None


def items_of(values: Values) -> list[Item]:
    """The items of a layer."""
    return [item_of(path, value=value) for path, value in values.items()]


def item_of(path: str, *, value: Product | Affine) -> Item:
    """A product or norm without its values."""
    if isinstance(value, RowsProduct):
        stacked = list(value.weight.shape[:-2])
        kind = f"{value.weight.dtype} {stacked}"
        return Item(path=path, kind=kind, shape=value.shape, has_bias=value.bias is not None, front=value.front)
    if isinstance(value, Product):
        kind = next(name for name, cls in _KINDS.items() if type(value) is cls)
        return Item(path=path, kind=kind, shape=value.shape, has_bias="bias" in value.tensors(), front=value.front)
    return Item(path=path, kind=NORM, shape=tuple(value.weight.shape), has_bias=value.bias is not None)


def blank(item: Item) -> Product | Affine:
    """A product or norm of zeros."""
    bias = torch.zeros(item.shape[0]) if item.has_bias else None
    affine = Affine(weight=torch.zeros(item.shape), bias=bias, start=item.front)
    return affine if item.kind == NORM else _KINDS[item.kind](affine)


def shapes_of(values: Values) -> Callable[[Item], Product | Affine]:
    """Like `blank`, for the products and norms of a layer of any format, whose memory is not kept. Tensors of the results have no values."""
    found = {path: _without_memory(value) for path, value in values.items()}
    return lambda item: copy.copy(found[item.path])


def _without_memory(value: Product | Affine) -> Product | Affine:
    own = copy.copy(value)
    adopt(
        own,
        {name: torch.empty(part.shape, dtype=part.dtype, device="meta") for name, part in tensors_of(value).items()},
    )
    return own


def adopt(value: Product | Affine, tensors: Mapping[str, Tensor]) -> None:
    """Replaces memory of a product or norm by tensors [*] of the same shapes and dtypes."""
    if isinstance(value, Product):
        value.adopt(tensors)
        return
    for name, tensor in tensors.items():
        setattr(value, name, tensor)


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
    """`count` layers of `items`, each of `nbytes`, a multiple of 4096: `layers.bin` in `folder`, or `held`, regions of main memory.

    build: makes a layer from its products and norms by path. blank: makes a product or norm whose tensors have the right shapes.
    """

    folder: Path | None
    count: int
    items: list[Item]
    nbytes: int
    build: Callable[[Values], Built]
    blank: Callable[[Item], Product | Affine] = blank
    held: list[AlignedRegion] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Of the file."""
        assert self.folder is not None, "the layers are in a file"
        return self.folder / LAYERS

    def buffer(self, *, pin: bool = False) -> LayerBuffer[Built]:
        """A layer of zeros over one page-aligned region of its own, so that a read of all its bytes is one request. pin: page-lock it."""
        region = AlignedRegion(nbytes=self.nbytes, pin=pin)
        return LayerBuffer(layer=self.over(region.bytes), memory=region.bytes, region=region)

    def device_buffer(self, device: torch.device) -> LayerBuffer[Built]:
        """A layer of zeros in one allocation of a device."""
        memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        return LayerBuffer(layer=self.over(memory), memory=memory, region=None)

    def over(self, memory: Tensor) -> Built:
        """A layer whose tensors are in `memory`, uint8 [bytes of a layer]."""
        values = {item.path: self.blank(item) for item in self.items}
        for path, name, offset, own in lay_out(values)[0]:
            adopt(values[path], {name: memory[offset : offset + own.nbytes].view(own.dtype).view(own.shape)})
        return self.build(values)


class LayerWriter:
    """Writes `count` layers into `layers.bin` of an existing folder, or into main memory without one; a context, at whose end all are written.

    pin: page-lock that memory.

    Raises:
        ValueError: the disk or the memory is too small, or a layer is not built as the first one.
    """

    def __init__(self, folder: Path | None, *, count: int, pin: bool = False) -> None:
        self._folder, self._count, self._pin = folder, count, pin
        self._file = None if folder is None else open(folder / LAYERS, "wb")
        self._number, self.items, self.nbytes = 0, list[Item](), 0
        self._held = list[AlignedRegion]()
        self._shapes: Callable[[Item], Product | Affine] = blank

    def write(self, values: Values) -> None:
        """The next layer."""
        if self._number == 0:
            self.items, self.nbytes = items_of(values), lay_out(values)[1]
            if any(isinstance(value, RowsProduct) for value in values.values()):
                self._shapes = shapes_of(values)
            self._check_space()
        if items_of(values) != self.items:
            raise ValueError(
                f"offload: layer {self._number} is not built as the first one, and layers that are streamed are built alike; leave "
                "offload out"
            )
        if self._file is None:
            self._held.append(AlignedRegion(nbytes=self.nbytes, pin=self._pin))
        for _, _, offset, tensor in lay_out(values)[0]:
            own = flat_bytes(tensor)
            if self._file is None:
                self._held[-1].bytes[offset : offset + len(own)].copy_(own)
            else:
                self._file.seek(self._number * self.nbytes + offset)
                self._file.write(own.cpu().numpy())
        self._number += 1

    def file(self, build: Callable[[Values], Built]) -> LayerFile[Built]:
        """The written layers. build: the same as in `LayerFile`."""
        assert self._number == self._count, "every layer is written"
        return LayerFile(
            folder=self._folder,
            count=self._count,
            items=self.items,
            nbytes=self.nbytes,
            build=build,
            blank=self._shapes,
            held=self._held,
        )

    def __enter__(self) -> "LayerWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None:
            return
        with self._file:
            if kind is None:
                assert self._number == self._count, "every layer is written"
                self._file.truncate(self._count * self.nbytes)
                self._file.flush()
                os.fsync(
                    self._file.fileno()
                )  # on some filesystems, direct reads miss data that is only in the page cache

    def _check_space(self) -> None:
        needed = self._count * self.nbytes
        if self._folder is None:
            if needed > (free := available_memory()):
                raise ValueError(
                    f"offload=cpu: {free} bytes of main memory are free, and the layers need {needed}: use offload=nvme, or fewer bits"
                )
            return
        if needed > (free := shutil.disk_usage(self._folder).free):
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
    stacked, mlp = (Mlp(**mlps[name]) if name in mlps else None for name in ("experts", "mlp"))
    return Layer(**own, mlp=mlp, experts=experts or stacked)


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
