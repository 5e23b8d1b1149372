"""Weights packed once, in the engine's own form, into a folder from which layers are read one at a time.

[Note: Packed folders]
`layers.bin` has the layers one after the other, each with the same layout and a multiple of 4096 bytes, as in memory: int4
as it is multiplied, fp32 and int8 in oneDNN's layout, so that nothing is converted when a layer is read. `rest.bin` has embedding, positions,
last norm, head and rotary tables. `packed.json` describes both and is written last; the folder gets its name when it is complete.

The layouts of oneDNN and int4 depend on the processor and on the build of torch. So the manifest has a digest of the layout of a known
weight of every shape, and a folder from another kind of processor is refused. The embedding is mapped, not read: only rows that are used
are in memory. Parameters have any floating-point dtype.
"""

import json
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.core.policies.offload import PAGE_BYTES
from ztk.inference.calibration import Calibration
from ztk.inference.cut import Cut
from ztk.inference.describe import Description, Subject
from ztk.inference.layer_file import LAYERS, LayerFile, LayerWriter
from ztk.inference.parts import (
    NORM,
    Item,
    LayerBuffer,
    assemble,
    blank,
    bytes_of,
    item_of,
    layout_digest,
    tensors_of,
    values_of,
)
from ztk.inference.placement import Placement
from ztk.inference.products import Affine, Product
from ztk.inference.weights import Layer, WeightReader, Weights

MANIFEST, REST = "packed.json", "rest.bin"
VERSION = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RestPart:
    """A tensor of `rest.bin`. dtype: torch's name without `torch.`."""

    name: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """An opened folder of packed weights. weights: the format. items: of each layer. layer_bytes: of one layer in the file. key: the source
    of the weights. extra: notes of the caller of `pack`."""

    path: Path
    weights: str
    description: Description
    items: list[Item]
    layer_bytes: int
    head: Item
    rest: list[RestPart]
    key: str
    extra: dict[str, Any]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all layers and the head, norms and padding included."""
        return self.description.layers * self.layer_bytes + self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the head."""
        return sum(part.nbytes for part in self.rest if part.name.startswith("head."))

    @property
    def rest_bytes(self) -> int:
        """Bytes in memory in addition to the layers, without the embedding, which is mapped."""
        return sum(part.nbytes for part in self.rest if part.name != "embedding")

    @property
    def file(self) -> LayerFile[Layer]:
        """The layers."""
        return LayerFile(
            folder=self.path,
            count=self.description.layers,
            items=self.items,
            nbytes=self.layer_bytes,
            build=assemble,
        )

    def read_rest(self) -> tuple[Weights, Subject]:
        """Everything but the layers, and the description with its rotary tables."""
        found = {part.name: tensor for part, tensor in self._rest_tensors()}
        head = blank(self.head)
        assert isinstance(head, Product), "the head is a product"
        for name, tensor in tensors_of(head).items():
            bytes_of(tensor).copy_(bytes_of(found[f"head.{name}"]))
        tables = [
            (found[f"tables.{number}.cos"], found[f"tables.{number}.sin"])
            for number in range(sum(name.endswith(".cos") for name in found))
        ]
        norm = _affine(found, name="norm")
        assert norm is not None, "every family has a last norm"
        weights = Weights(
            embedding=found["embedding"],
            positions=found.get("positions"),
            embedding_norm=_affine(found, name="embedding_norm"),
            layers=[],
            norm=norm,
            head=head,
        )
        return weights, Subject(description=self.description, tables=tables)

    def read_layer(self, number: int) -> LayerBuffer[Layer]:
        """One layer, in memory of its own, read through the page cache. Raises ValueError where the file ends."""
        buffer = self.file.buffer()
        with open(self.path / LAYERS, "rb", buffering=0) as file:
            file.seek(number * self.layer_bytes)
            view = memoryview(buffer.memory.numpy())
            while len(view) > 0:
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"{self.path / LAYERS} ends inside layer {number}: pack the model again")
                view = view[count:]
        buffer.number = number
        return buffer

    def _rest_tensors(self) -> Iterator[tuple[RestPart, Tensor]]:
        with open(self.path / REST, "rb") as file:
            # Copy on write: torch requires writable memory, although it is never written.
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        for part in self.rest:
            memory = mapped[part.offset : part.offset + part.nbytes]
            is_copied_elsewhere = part.name.startswith("head.")  # into its product
            memory = memory if part.name == "embedding" or is_copied_elsewhere else memory.clone()
            yield part, memory.view(getattr(torch, part.dtype)).view(part.shape)


class FolderTaken(ValueError):
    """The target folder exists already, perhaps because another process was faster."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} exists already: name a new folder, or remove it")


def pack(
    folder: str | os.PathLike,
    *,
    subject: Subject,
    state: Mapping[str, Tensor],
    weights: str,
    cut: Cut | None = None,
    calibration: Sequence[int] = (),
    key: str = "",
    extra: dict[str, Any] | None = None,
    extra_files: Sequence[tuple[Path, str]] = (),
) -> Packed:
    """Writes a model's weights in the format `weights` into the new `folder`. `state`, parameters of any shape, is read
    one layer at a time.

    cut: a tensor-parallel rank's part, to write only that. calibration: tokens, as in `InferencePolicy`. key, extra: stored in the manifest.
    extra_files: files and folders to copy into the folder, each with its new name.

    Raises:
        FolderTaken: the folder exists and has something in it.
        ValueError: the disk is too small, some layers have no experts in a model with experts, or as `collect`.
    """
    if subject.description.dense_layers:
        raise ValueError(
            f"offload=nvme: {len(subject.description.dense_layers)} of the {subject.description.layers} layers have no experts, and "
            "layers that are streamed are built alike; leave offload out"
        )
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FolderTaken(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        options = {"description": subject.description, "placement": Placement(kind=weights), "cut": cut}
        inputs = Calibration(calibration, subject=subject, state=state) if calibration else None
        reader = WeightReader(state, inputs=inputs, **options)
        manifest = _write(partial, subject=subject, reader=reader)
        manifest |= {"weights": weights, "key": key, "extra": extra or {}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for original, name in extra_files:
            (shutil.copytree if original.is_dir() else shutil.copyfile)(original, partial / name)
        try:
            partial.rename(target)  # takes the place of an empty folder
        except OSError:
            if target.exists():
                raise FolderTaken(target) from None
            raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return open_packed(target)


def open_packed(folder: str | os.PathLike) -> Packed:
    """Opens a folder that `pack` has written, and checks its sizes and that this processor has the layout of its weights.

    Raises:
        ValueError: it is no such folder, it is incomplete, or it was packed for another kind of processor or build of torch.
    """
    path = Path(folder)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(
            f"{path} has no {MANIFEST}: pack a model with python -m ztk.serve pack FOLDER {path}"
        ) from None
    if manifest["version"] != VERSION:
        raise ValueError(f"{path} was packed by another version of ztk: pack the model again")
    description = manifest["description"]
    for name in ("windows", "tables", "dense_layers"):
        description[name] = tuple(description[name])
    packed = Packed(
        path=path,
        weights=manifest["weights"],
        description=Description(**description),
        items=[Item(**item | {"shape": tuple(item["shape"])}) for item in manifest["items"]],
        layer_bytes=manifest["layer_bytes"],
        head=Item(**manifest["head"] | {"shape": tuple(manifest["head"]["shape"])}),
        rest=[RestPart(**part | {"shape": tuple(part["shape"])}) for part in manifest["rest"]],
        key=manifest["key"],
        extra=manifest["extra"],
    )
    expected = {LAYERS: packed.description.layers * packed.layer_bytes, REST: manifest["rest_bytes"]}
    for name, nbytes in expected.items():
        found = (path / name).stat().st_size if (path / name).is_file() else 0
        if found != nbytes:
            raise ValueError(f"{path / name} has {found} bytes, not {nbytes}: pack the model again")
    if _layouts([*packed.items, packed.head]) != manifest["layouts"]:
        raise ValueError(
            f"{path} was packed for another kind of processor or build of torch, which lays weights out differently: pack the model again here"
        )
    return packed


def _write(folder: Path, *, subject: Subject, reader: WeightReader) -> dict[str, Any]:
    of = subject.description
    with LayerWriter(folder, count=of.layers) as writer:
        for number in range(of.layers):
            writer.write(values_of(reader.layer(number)))
    items = writer.items
    rest, at = reader.rest(), 0
    parts = []
    with open(folder / REST, "wb") as file:
        for name, tensor in _rest_of(rest, subject=subject):
            at = -(-at // PAGE_BYTES) * PAGE_BYTES
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            parts.append(RestPart(name=name, offset=at, nbytes=tensor.nbytes, dtype=dtype, shape=shape))
            file.seek(at)
            file.write(bytes_of(tensor.contiguous()).numpy())
            at += tensor.nbytes
        file.flush()
        os.fsync(file.fileno())
    head = item_of("head", value=rest.head)
    return {
        "version": VERSION,
        "description": asdict(of),
        "items": [asdict(item) for item in items],
        "layer_bytes": writer.nbytes,
        "head": asdict(head),
        "rest": [asdict(part) for part in parts],
        "rest_bytes": at,
        "layouts": _layouts([*items, head]),
        "torch": torch.__version__,
    }


def _rest_of(rest: Weights, *, subject: Subject) -> Iterator[tuple[str, Tensor]]:
    yield "embedding", rest.embedding
    if rest.positions is not None:
        yield "positions", rest.positions
    for name, norm in (("embedding_norm", rest.embedding_norm), ("norm", rest.norm)):
        if norm is not None:
            yield from ((f"{name}.{part}", tensor) for part, tensor in tensors_of(norm).items())
    yield from ((f"head.{part}", tensor) for part, tensor in rest.head.tensors().items())
    for number, (cos, sin) in enumerate(subject.tables):
        yield f"tables.{number}.cos", cos
        yield f"tables.{number}.sin", sin


def _affine(found: Mapping[str, Tensor], *, name: str) -> Affine | None:
    if f"{name}.weight" not in found:
        return None
    return Affine(weight=found[f"{name}.weight"], bias=found.get(f"{name}.bias"))


def _layouts(items: list[Item]) -> dict[str, str]:
    shapes = {f"{item.kind} {list(item.shape)}": item for item in items if item.kind != NORM}
    return {name: layout_digest(item) for name, item in shapes.items()}
