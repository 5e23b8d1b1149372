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
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ztk.inference.calibration import Calibration
from ztk.inference.cut import Cut
from ztk.inference.describe import Description, Subject
from ztk.inference.parts import (
    LAYERS,
    NORM,
    Item,
    LayerBuffer,
    LayerFile,
    LayerWriter,
    assemble,
    blank,
    item_of,
    layout_digest,
    tensors_of,
)
from ztk.inference.placement import Placement
from ztk.inference.products import Affine, Product
from ztk.inference.weights import Layer, WeightReader, Weights, values_of
from ztk.zero.offload.slot import flat_bytes

MANIFEST, REST = "packed.json", "rest.bin"
VERSION = 6


@dataclass(frozen=True, kw_only=True)
class Packed:
    """An opened folder of packed weights. weights: the format. items: parts of each layer. layer_bytes: size of one layer in the file.
    rest_bytes: bytes in memory in addition to the layers, without the embedding, which is mapped; head_bytes of them are the head's. key:
    the source of the weights. extra: notes of the caller of `pack`."""

    path: Path
    weights: str
    description: Description
    items: list[Item]
    layer_bytes: int
    head: Item
    head_bytes: int
    rest_bytes: int
    key: str
    extra: dict[str, Any]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all layers and the head, norms and padding included."""
        return self.description.layers * self.layer_bytes + self.head_bytes

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
        rest = torch.load(self.path / REST, mmap=True, weights_only=True)
        head, embedding = blank(self.head), rest.pop("embedding")
        assert isinstance(head, Product), "the head is a product"
        for name, tensor in tensors_of(head).items():
            flat_bytes(tensor).copy_(flat_bytes(rest["head"][name]))
        rest = tree_map_only(Tensor, Tensor.clone, rest | {"head": None})
        tables = rest.pop("tables")
        norms = {name: None if parts is None else Affine(**parts) for name, parts in rest.pop("norms").items()}
        weights = Weights(**rest | norms | {"embedding": embedding, "layers": [], "head": head})
        return weights, Subject(description=self.description, tables=tables)

    def read_layer(self, number: int) -> LayerBuffer[Layer]:
        """One layer, in memory of its own, read through the page cache. Raises ValueError where the file ends."""
        buffer = self.file.buffer()
        with open(self.path / LAYERS, "rb") as file:
            file.seek(number * self.layer_bytes)
            if file.readinto(buffer.memory.numpy()) < self.layer_bytes:
                raise ValueError(f"{self.path / LAYERS} ends inside layer {number}: pack the model again")
        buffer.number = number
        return buffer


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
        head_bytes=manifest["head_bytes"],
        rest_bytes=manifest["rest_bytes"],
        key=manifest["key"],
        extra=manifest["extra"],
    )
    expected = {LAYERS: packed.description.layers * packed.layer_bytes, REST: manifest["file_bytes"]}
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
    items, rest = writer.items, reader.rest()
    norms = {"norm": rest.norm, "embedding_norm": rest.embedding_norm}
    held = {
        "positions": rest.positions,
        "norms": {name: None if norm is None else tensors_of(norm) for name, norm in norms.items()},
        "head": rest.head.tensors(),
        "tables": subject.tables,
    }
    with open(folder / REST, "wb") as file:
        torch.save(tree_map_only(Tensor, _alone, held | {"embedding": rest.embedding}), file)
        file.flush()
        os.fsync(file.fileno())
        nbytes = file.tell()
    head = item_of("head", value=rest.head)
    return {
        "version": VERSION,
        "description": asdict(of),
        "items": [asdict(item) for item in items],
        "layer_bytes": writer.nbytes,
        "head": asdict(head),
        "head_bytes": sum(tensor.nbytes for tensor in held["head"].values()),
        "rest_bytes": sum(tensor.nbytes for tensor in tree_leaves(held) if tensor is not None),
        "file_bytes": nbytes,
        "layouts": _layouts([*items, head]),
        "torch": torch.__version__,
    }


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without the rest of its storage, which would be saved with it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _layouts(items: list[Item]) -> dict[str, str]:
    shapes = {f"{item.kind} {list(item.shape)}": item for item in items if item.kind != NORM}
    return {name: layout_digest(item) for name, item in shapes.items()}
