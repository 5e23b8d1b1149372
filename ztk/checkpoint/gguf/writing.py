"""Writes a checkpoint or a transformers folder as one GGUF file, with tokenizer, chat template and end tokens."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.checkpoint.architecture import transformers_view
from ztk.checkpoint.export import ExportReport, Weights, full_manifest, new_file, run_tokenizer
from ztk.checkpoint.folder import resolve
from ztk.checkpoint.gguf.families import as_gguf, metadata_of, to_gguf
from ztk.checkpoint.gguf.reading import gguf_library
from ztk.checkpoint.gguf.tokenizer import read_tokenizer
from ztk.checkpoint.sources import SafetensorsSource
from ztk.core.policies.records import weight_files

KINDS = ("F16", "Q8_0", "Q4_0", "Q4_1")
_HEADS = (
    "token_embd.weight",
    "output.weight",
)  # 8 bits in 4-bit formats, because their errors affect the logits directly


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """A model in a checkpoint or in a transformers folder. tokenizer: folder with its files. full: name -> tensor in its shape."""

    config: dict[str, Any]
    tokenizer: Path
    names: list[str]
    full: Callable[[str], Tensor]


def export_gguf(
    path: str | os.PathLike, *, to: str | os.PathLike, kind: str = "F16", ema: bool = False
) -> ExportReport:
    """Writes the file `to`, one tensor in memory at a time.

    path: a checkpoint as for `load`, or a folder with config.json and safetensors files.
    kind: storage format of matrices, F16, Q8_0, Q4_0 or Q4_1, rounded as in the package gguf. With 4-bit kinds, embedding and head are
    Q8_0. Vectors are always F32.
    ema: as in `export_safetensors`.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks weights, or the average.
        ValueError: `to` exists, gguf is not installed, or GGUF cannot represent the model or its tokenizer.
    """
    if kind not in KINDS:
        raise ValueError(f"--kind {kind}: must be {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    library, target = gguf_library(), Path(to)
    with new_file(target) as temporary, _opened(Path(path), ema=ema) as model:
        _write(model, path=temporary, kind=kind, library=library)
    return ExportReport(path=target, files=1, nbytes=target.stat().st_size)


@contextmanager
def _opened(path: Path, *, ema: bool) -> Iterator[_Model]:
    if (path / "config.json").is_file():
        if ema:
            raise ValueError(f"--ema: {path} has one set of weights; leave it out, or name a checkpoint")
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        files = weight_files(path)
        if not files:
            raise ValueError(f"--format gguf: {path} has no safetensors files; save the model by save_pretrained")
        source = SafetensorsSource(files)
        yield _Model(config=config, tokenizer=path, names=[name for _, name in source.shapes()], full=source.full)
        return
    manifest = full_manifest(path)
    names, config = transformers_view(manifest, dtype=torch.float32)  # a native decoder becomes a Llama
    if config is None:
        raise ValueError(
            f"--format gguf: {manifest.path} has adapters of peft: merge them (merge_and_unload) and save the model, then export the folder"
        )
    is_merged = "decoder" in (manifest.model or {})
    step = resolve(path)
    with closing(Weights(manifest, dtype=torch.float32, names=names, ema=ema, is_merged=is_merged)) as weights:
        own = [spec.key for spec in weights.specs]
        yield _Model(config=config, tokenizer=run_tokenizer(step) or step, names=own, full=weights.full)


def _write(model: _Model, *, path: Path, kind: str, library: Any) -> None:
    architecture, sizes = metadata_of(model.config)
    writer = library.GGUFWriter(path, architecture)
    try:
        writer.add_type("model")
        writer.add_file_type(library.LlamaFileType[f"MOSTLY_{kind}"])
        writer.add_quantization_version(library.GGML_QUANT_VERSION)
        for key, value in sizes.items():
            _add(writer, f"{architecture}.{key}", value=value)
        for key, value in read_tokenizer(model.tokenizer, vocabulary=model.config["vocab_size"]).items():
            _add(writer, key, value=value)
        _write_tensors(model, writer=writer, kind=kind, library=library)
    finally:
        writer.close()


def _add(writer: Any, key: str, *, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tensors(model: _Model, *, writer: Any, kind: str, library: Any) -> None:
    """Writes the sizes of all tensors and then their values."""
    places = _places(model)
    for place, name in places.items():
        stored = _stored(model.full(name), place=place, config=model.config, kind=kind, library=library)
        own = None if stored.dtype != "uint8" else _kind_of(place, kind=kind, library=library)
        writer.add_tensor_info(place, stored.shape, stored.dtype, stored.nbytes, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for place, name in places.items():
        writer.write_tensor_data(
            _stored(model.full(name), place=place, config=model.config, kind=kind, library=library)
        )


def _places(model: _Model) -> dict[str, str]:
    """Returns name in the file -> name in the model. Omits a tied head."""
    found = {}
    for name in model.names:
        place = to_gguf(name)
        if place is None:
            raise ValueError(f"--format gguf: {name} has no place in a GGUF file; leave --format out")
        if place != "output.weight" or not model.config.get("tie_word_embeddings"):
            found[place] = name
    return found


def _kind_of(place: str, *, kind: str, library: Any) -> Any:
    is_head = place in _HEADS and kind.startswith("Q4")
    return library.GGMLQuantizationType["Q8_0" if is_head else kind]


def _stored(value: Tensor, *, place: str, config: dict[str, Any], kind: str, library: Any) -> Any:
    """Returns one tensor as the file stores it, a numpy array. Blocks are uint8 [rows, bytes]."""
    turned = as_gguf(value.float(), name=place, config=config)
    if turned.dim() < 2:
        return turned.numpy()
    chosen = _kind_of(place, kind=kind, library=library)
    block, _ = library.GGML_QUANT_SIZES[chosen]
    if kind == "F16" or turned.shape[1] % block:
        return turned.half().numpy()
    return library.quants.quantize(turned.numpy(), chosen)
