"""Other formats into a checkpoint of ztk."""

import json
import os
import secrets
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from ztk.checkpoint import folder as folders
from ztk.checkpoint.architecture import renamed
from ztk.checkpoint.bits import BLOCK_BYTES
from ztk.checkpoint.deepspeed import DeepSpeedSource
from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.manifest import BUFFER, MANIFEST, Manifest, TensorInfo, encode_manifest
from ztk.checkpoint.shardfile import Slice, describe_file, file_name
from ztk.checkpoint.sources import (
    FROZEN,
    MASTER,
    Key,
    SafetensorsSource,
    Source,
    StateDictSource,
    TorchDistributedSource,
)
from ztk.checkpoint.tensorfile import TensorFileWriter, TensorSpec

_NOT_MOMENTS = (MASTER, FROZEN, BUFFER)
_CONTROL = {
    "loss_scale": 1.0,
    "good_steps": 0.0,
    "hysteresis_left": 1.0,
    "skipped_steps": 0.0,
    "found_inf": 0.0,
    "grad_norm": 0.0,
}


def import_checkpoint(
    path: str | os.PathLike, *, to: str | os.PathLike, rename: Mapping[str, str] | None = None
) -> Path:
    """Writes `to/step-N` from what `open_source` recognises, and returns that folder.

    rename: regular expression -> replacement, applied to every name in this order. The result holds weights, in fp32, and the
    optimizer states if the source has the same ones for every parameter; without them it is loaded with `weights_only=True`.
    Raises CheckpointError for a source that cannot be read or does not fit together.
    """
    source = open_source(path)
    names = {key: (key[0], renamed(key[1], rename=rename or {})) for key in source.shapes()}
    if len(set(names.values())) != len(names):
        raise CheckpointError(f"{path}: after renaming, several tensors have the same name")
    kinds = _state_names(source)
    to, token = Path(to), secrets.token_hex(4)
    temporary = folders.prepare(to, step=source.step, token=token)
    try:
        manifest = _write(source, temporary=temporary, names=names, kinds=kinds, rename=rename or {})
        folders.write_file(temporary / MANIFEST, data=encode_manifest(manifest))
        return folders.commit(temporary)
    except BaseException:
        if temporary.exists():
            folders.discard(temporary, token="")
        raise


def open_source(path: str | os.PathLike) -> Source:
    """Recognises what `path` is: a safetensors file or folder, a torch.save file, a torch.distributed.checkpoint folder, one of DeepSpeed.

    Raises CheckpointError for anything else.
    """
    path = Path(path)
    if (path / "latest").is_file() or any(path.glob("*_optim_states.pt")):
        return DeepSpeedSource(path)
    if path.is_file() and path.suffix == ".safetensors":
        return SafetensorsSource([path])
    if path.is_file():
        return StateDictSource(path)
    if (path / ".metadata").is_file():
        return TorchDistributedSource(path)
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return SafetensorsSource([path / name for name in names])
    if single.is_file():
        return SafetensorsSource([single])
    raise CheckpointError(
        f"{path} is nothing that can be imported: neither a .safetensors file, a folder with model.safetensors or its index, a "
        "file of torch.save, nor a folder of torch.distributed.checkpoint or DeepSpeed"
    )


def _state_names(source: Source) -> list[str] | None:
    """The optimizer's states if every parameter has the same ones."""
    shapes = source.shapes()
    parameters = [name for kind, name in shapes if kind == MASTER]
    kinds = list(dict.fromkeys(kind for kind, _ in shapes if kind not in _NOT_MOMENTS))
    whole = all(shapes.get((kind, name)) == shapes[MASTER, name] for kind in kinds for name in parameters)
    return kinds if kinds and whole else None


def _write(
    source: Source, *, temporary: Path, names: dict[Key, Key], kinds: list[str] | None, rename: Mapping[str, str]
) -> Manifest:
    slices = {
        key: Slice(kind=key[0], name=names[key][1], dtype=torch.float32, start=0, stop=prod(shape))
        for key, shape in source.shapes().items()
        if key[0] in (*_NOT_MOMENTS, *(kinds or ()))
    }
    specs = [TensorSpec(key=part.key, dtype=part.dtype, shape=(part.stop,)) for part in slices.values()]
    writer = TensorFileWriter(temporary / file_name(0), specs=specs, metadata={"format": "pt"})
    try:
        for key, part in slices.items():
            for values in source.stretches(key):
                writer.append(part.key, value=values.float())
        writer.finish()
    finally:
        writer.close()
    return Manifest(
        step=source.step,
        created=time.time(),
        versions={"torch": torch.__version__},
        world_size=1,
        layout={"dynamic_loss_scale": source.dynamic_loss_scale},
        state_names=kinds,
        control={"step": float(source.step), **_CONTROL, **source.control},
        counters={"micro_steps": source.step, "global_steps": source.step, "accumulation_steps": 1},
        data=None,
        extra=None,
        metric=None,
        block_bytes=BLOCK_BYTES,
        tied={renamed(name, rename=rename): renamed(other, rename=rename) for name, other in source.tied.items()},
        parameters=_infos(source, names=names, kinds=(MASTER, FROZEN)),
        buffers=_infos(source, names=names, kinds=(BUFFER,)),
        files=[describe_file(writer, slices=list(slices.values()))],
    )


def _infos(source: Source, *, names: dict[Key, Key], kinds: tuple[str, ...]) -> list[TensorInfo]:
    return [
        TensorInfo(name=names[key][1], shape=list(shape), dtype="F32", trainable=key[0] == MASTER)
        for key, shape in source.shapes().items()
        if key[0] in kinds
    ]
