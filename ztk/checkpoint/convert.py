"""Converts other formats to ztk checkpoints."""

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ztk.checkpoint import folder as folders
from ztk.checkpoint.architecture import renamed
from ztk.checkpoint.bits import BLOCK_BYTES
from ztk.checkpoint.deepspeed import DeepSpeedSource
from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.llama import FROM_LLAMA, decoder_config
from ztk.checkpoint.manifest import BUFFER, MANIFEST, Manifest, TensorInfo, encode_manifest
from ztk.checkpoint.shardfile import Slice, describe_file, file_name
from ztk.checkpoint.sources import Key, SafetensorsSource, Source, StateDictSource, TorchDistributedSource
from ztk.checkpoint.tensorfile import TensorSpec, write_tensors
from ztk.core.policies.records import weight_files
from ztk.optim.states import FROZEN, MASTER

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of a Llama, which may store tied weights twice
_NOT_MOMENTS = (MASTER, FROZEN, BUFFER)
_CONTROL = {
    "loss_scale": 1.0,
    "good_steps": -1.0,
    "hysteresis_left": 1.0,
    "skipped_steps": 0.0,
    "found_inf": 0.0,
    "grad_norm": 0.0,
}


def import_checkpoint(
    path: str | os.PathLike,
    *,
    to: str | os.PathLike,
    rename: Mapping[str, str] | None = None,
    as_decoder: bool = False,
) -> Path:
    """Writes `to/step-N` from a source that `open_source` recognises, and returns that folder.

    rename: regular expression -> replacement. All are applied to every name, in order.
    as_decoder: converts a Llama of transformers to the native decoder, with the decoder's configuration in the manifest.

    The result has fp32 weights. It has optimizer states if all parameters with states have the same kinds; otherwise load it with
    `weights_only=True`. If some parameters have states, a parameter without states counts as frozen, or as tied if its values equal
    another parameter's.

    Raises:
        CheckpointError: the source cannot be read or is inconsistent.
    """
    source, model = open_source(path), _model_of(Path(path), as_decoder=as_decoder)
    plan = _plan(source, rename=(rename or {}) | (FROM_LLAMA if as_decoder else {}), model=model)
    if len(set(plan.places.values())) != len(plan.places):
        raise CheckpointError(f"{path}: after renaming, several tensors have the same name")
    to, token = Path(to), secrets.token_hex(4)
    number = folders.free_number(to, step=source.step)
    temporary = folders.temporary_of(to, step=source.step, number=number, token=token)
    folders.prepare(temporary)
    try:
        manifest = _write(source, temporary=temporary, plan=plan)
        folders.write_file(temporary / MANIFEST, data=encode_manifest(manifest))
        return folders.commit(temporary)
    except BaseException:
        if temporary.exists():
            folders.discard(temporary, token="")
        raise


def open_source(path: str | os.PathLike) -> Source:
    """Opens a safetensors file or folder, a torch.save file, or a folder of torch.distributed.checkpoint or DeepSpeed.

    Raises:
        CheckpointError: `path` is none of these.
    """
    path = Path(path)
    if _is_own(path):
        raise CheckpointError(f"{path} is a checkpoint of ztk already: load it as it is")
    if (path / "latest").is_file() or any(path.glob("*_optim_states.pt")):
        return DeepSpeedSource(path)
    if path.is_file() and path.suffix == ".safetensors":
        return SafetensorsSource([path])
    if path.is_file():
        return StateDictSource(path)
    if (path / ".metadata").is_file():
        return TorchDistributedSource(path)
    if files := weight_files(path):
        return SafetensorsSource(files)
    raise CheckpointError(
        f"{path} cannot be imported: it is neither a .safetensors file, a folder with model.safetensors or its index, a "
        "file of torch.save, nor a folder of torch.distributed.checkpoint or DeepSpeed"
    )


def _is_own(path: Path) -> bool:
    try:
        folders.resolve(path)
    except CheckpointError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The tensors to import. places: key of the source -> kind and name in the checkpoint. kinds: the optimizer's states, if any."""

    places: dict[Key, Key]
    kinds: list[str] | None
    tied: dict[str, str]
    model: dict[str, Any] | None


def _model_of(path: Path, *, as_decoder: bool) -> dict[str, Any] | None:
    """Reads the manifest's model description from the `config.json` next to the weights."""
    file = path / "config.json"
    if not file.is_file():
        if as_decoder:
            raise CheckpointError(f"{file} is missing; it has the sizes of the decoder")
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    return {"decoder": decoder_config(config)} if as_decoder else {"transformers": config}


def _plan(source: Source, *, rename: Mapping[str, str], model: dict[str, Any] | None) -> _Plan:
    shapes = source.shapes()
    kinds = _state_names(shapes)
    tied, places = dict(source.tied), {}
    if model and model.get("decoder", {}).get("tie_embeddings") and (MASTER, _HEAD) in shapes:
        tied[_HEAD] = _EMBEDDING
    trained = {name for kind, name in shapes if kind not in _NOT_MOMENTS}
    for kind, name in shapes:
        place = kind
        if kinds and kind == MASTER and name not in trained:
            place = FROZEN
            if twin := _twin(source, name=name, among=trained):
                tied[name] = twin
        if name not in tied and (kind in _NOT_MOMENTS or kinds):
            places[kind, name] = (place, renamed(name, rename=rename))
    names = {renamed(name, rename=rename): renamed(other, rename=rename) for name, other in tied.items()}
    return _Plan(places=places, kinds=kinds, tied=names, model=model)


def _state_names(shapes: Mapping[Key, tuple[int, ...]]) -> list[str] | None:
    """Returns the optimizer's states if every parameter with states has the same kinds, else None."""
    kinds = list(dict.fromkeys(kind for kind, _ in shapes if kind not in _NOT_MOMENTS))
    trained = {name for kind, name in shapes if kind not in _NOT_MOMENTS}
    complete = all(shapes.get((kind, name)) == shapes.get((MASTER, name), ()) for kind in kinds for name in trained)
    return kinds if kinds and complete else None


def _twin(source: Source, *, name: str, among: set[str]) -> str | None:
    """Finds a parameter with equal values. FSDP stores tied weights under all their names, but their states under one."""
    shapes = source.shapes()
    for other in sorted(among):
        if shapes[MASTER, other] == shapes[MASTER, name] and _equal(source, one=(MASTER, name), other=(MASTER, other)):
            return other
    return None


def _equal(source: Source, *, one: Key, other: Key) -> bool:
    parts = zip(source.ranges(one), source.ranges(other), strict=False)
    return all(torch.equal(first, second) for first, second in parts)


def _write(source: Source, *, temporary: Path, plan: _Plan) -> Manifest:
    shapes = source.shapes()
    slices = {
        key: Slice(kind=kind, name=name, dtype=torch.float32, start=0, stop=prod(shapes[key]))
        for key, (kind, name) in plan.places.items()
    }
    specs = [TensorSpec(key=part.key, dtype=part.dtype, shape=(part.stop,)) for part in slices.values()]
    keys = {part.key: key for key, part in slices.items()}
    writer = write_tensors(
        temporary / file_name(0),
        specs=specs,
        ranges=lambda name: (values.float() for values in source.ranges(keys[name])),
    )
    return Manifest(
        step=source.step,
        created=time.time(),
        versions={"torch": torch.__version__},
        world_size=1,
        layout={"dynamic_loss_scale": source.dynamic_loss_scale},
        state_names=plan.kinds,
        control={"step": float(source.step), **_CONTROL, **source.control},
        counters={"micro_steps": source.step, "global_steps": source.step, "accumulation_steps": 1},
        data=None,
        extra=None,
        metric=None,
        block_bytes=BLOCK_BYTES,
        tied=plan.tied,
        model=plan.model,
        parameters=_infos(shapes, plan=plan, kinds=(MASTER, FROZEN)),
        buffers=_infos(shapes, plan=plan, kinds=(BUFFER,)),
        files=[describe_file(writer, slices=list(slices.values()))],
    )


def _infos(shapes: Mapping[Key, tuple[int, ...]], *, plan: _Plan, kinds: tuple[str, ...]) -> list[TensorInfo]:
    return [
        TensorInfo(name=name, shape=list(shapes[key]), dtype="F32", trainable=kind == MASTER)
        for key, (kind, name) in plan.places.items()
        if kind in kinds
    ]
