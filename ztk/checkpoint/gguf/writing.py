"""Writes a checkpoint or a transformers folder as one GGUF file, with tokenizer, chat template and end tokens."""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ztk.checkpoint.architecture import merges, transformers_view
from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.export import ExportReport, Weights, full_manifest, new_file, run_tokenizer
from ztk.checkpoint.folder import resolve
from ztk.checkpoint.gguf.families import as_gguf, check_places, metadata_of, to_gguf
from ztk.checkpoint.gguf.general import Value, add_general, read_general
from ztk.checkpoint.gguf.reading import gguf_library
from ztk.checkpoint.gguf.tokenizer import read_tokenizer
from ztk.checkpoint.sources import SafetensorsSource
from ztk.core.policies.records import run_folder, weight_files

KINDS = ("F16", "BF16", "F32", "Q8_0", "Q4_0", "Q4_1")
_HEADS = (
    "token_embd.weight",
    "output.weight",
)  # 8 bits in 4-bit formats, because their errors affect the logits directly


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """A model in a checkpoint or in a transformers folder. tokenizer: folder with its files. full: name -> tensor in its shape. general: the
    keys that describe it; see `read_general`.
    """

    general: dict[str, Value]
    config: dict[str, Any]
    tokenizer: Path
    names: list[str]
    full: Callable[[str], Tensor]


def export_gguf(
    path: str | os.PathLike, *, to: str | os.PathLike, kind: str = "F16", ema: bool = False
) -> ExportReport:
    """Writes the file `to`, one tensor in memory at a time.

    path: a checkpoint as for `load`, or a folder with config.json and safetensors files.
    kind: storage format of matrices, of `KINDS`, rounded as in the package gguf. With 4-bit kinds, embedding and head are Q8_0. Vectors
    are always F32.
    ema: the same as in `export_safetensors`.

    The file is read again, and compared with the values that were written, before it gets its name.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks weights, or the average, or the file differs from the written values.
        ValueError: `to` exists, gguf is not installed, or GGUF cannot represent the model, its tokenizer or a value.
    """
    if kind not in KINDS:
        raise ValueError(f"--kind {kind}: must be {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    library, target = gguf_library(), Path(to)
    with new_file(target) as temporary, _opened(Path(path), ema=ema) as model:
        written = _write(model, path=temporary, kind=kind, library=library)
        _check_written(temporary, written=written, library=library)
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
        yield _Model(
            general=read_general(path, name=path.resolve().name, library=gguf_library()),
            config=config,
            tokenizer=path,
            names=[name for _, name in source.shapes()],
            full=source.full,
        )
        return
    manifest = full_manifest(path, is_merged=True)
    names, config = transformers_view(manifest, dtype=torch.float32)  # a native decoder becomes a Llama
    if config is None:
        raise ValueError(
            f"--format gguf: {manifest.path} has adapters of peft: merge them (merge_and_unload) and save the model, then export the folder"
        )
    step = resolve(path)
    with closing(Weights(manifest, dtype=torch.float32, names=names, ema=ema, is_merged=merges(manifest))) as weights:
        own = [spec.key for spec in weights.specs]
        general = {"general.name": (["STRING"], (run_folder(step) or step).name)}
        yield _Model(
            general=general, config=config, tokenizer=run_tokenizer(step) or step, names=own, full=weights.full
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """The content of a file. metadata: values that a reader returns. tensors: name -> crc32 of the bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, int]


def _write(model: _Model, *, path: Path, kind: str, library: Any) -> _Written:
    architecture, sizes = metadata_of(model.config)
    writer = library.GGUFWriter(path, architecture)
    tokenizer = read_tokenizer(model.tokenizer, vocabulary=model.config["vocab_size"])
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()} | tokenizer
    try:
        writer.add_type("model")
        add_general(writer, model.general, library=library)
        writer.add_file_type(library.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
        writer.add_quantization_version(library.GGML_QUANT_VERSION)
        for key, value in metadata.items():
            _add(writer, key, value=value)
        tensors = _write_tensors(model, writer=writer, kind=kind, library=library)
    finally:
        writer.close()
    read = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in metadata.items()}
    return _Written(metadata=read | {key: value for key, (_, value) in model.general.items()}, tensors=tensors)


def _check_written(path: Path, *, written: _Written, library: Any) -> None:
    """Reads a file and compares it with the values that were written. Raises CheckpointError for the first difference."""
    try:
        reader = library.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        found = {tensor.name: zlib.crc32(np.ascontiguousarray(tensor.data)) for tensor in reader.tensors}
    except Exception as error:  # the package raises errors of many kinds for a damaged file
        raise CheckpointError(f"{path} cannot be read after it was written ({error}): write it again") from error
    differing = [key for key, value in written.metadata.items() if key not in metadata or metadata[key] != value]
    differing += sorted(name for name, _ in found.items() ^ written.tensors.items())
    if differing:
        raise CheckpointError(
            f"{path}: {differing[0]} differs from its value before the write: write it again on another disk"
        )


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


def _write_tensors(model: _Model, *, writer: Any, kind: str, library: Any) -> dict[str, int]:
    """Writes the sizes of all tensors and then their values. Returns name -> crc32 of the bytes."""
    places = _places(model)

    def stored(place: str) -> Any:
        return _stored(model.full(places[place]), place=place, config=model.config, kind=kind, library=library)

    for place in places:
        value = stored(place)
        own = None if value.dtype != "uint8" else _kind_of(place, kind=kind, library=library)
        writer.add_tensor_info(place, value.shape, value.dtype, value.nbytes, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = {}
    for place in places:
        value = np.ascontiguousarray(stored(place))
        written[place] = zlib.crc32(value)
        writer.write_tensor_data(value)
    return written


def _places(model: _Model) -> dict[str, str]:
    """Returns name in the file -> name in the model. Omits a tied head.

    Raises ValueError for tensors without a place in the file, and for a model that the file would not describe.
    """
    found = {}
    for name in model.names:
        place = to_gguf(name)
        if place is None:
            raise ValueError(f"--format gguf: {name} has no place in a GGUF file; leave --format out")
        found[place] = name
    check_places(found, config=model.config)
    rows = len(model.full(found["token_embd.weight"]))
    if rows != model.config["vocab_size"]:
        raise ValueError(
            f"--format gguf: {found['token_embd.weight']} has {rows} rows and config.json vocab_size={model.config['vocab_size']}; set the "
            "number that is right"
        )
    head = found.get("output.weight")
    if not model.config.get("tie_word_embeddings"):
        if head is None:
            raise ValueError(
                "--format gguf: there is no lm_head.weight, and tie_word_embeddings is false; set it to true"
            )
    elif head is not None:
        if not torch.equal(model.full(head), model.full(found["token_embd.weight"])):
            raise ValueError(
                f"--format gguf: tie_word_embeddings is true, and {head} differs from {found['token_embd.weight']}; set it to false"
            )
        del found["output.weight"]
    return found


def _kind_of(place: str, *, kind: str, library: Any) -> Any:
    is_head = place in _HEADS and kind.startswith("Q4")
    return library.GGMLQuantizationType["Q8_0" if is_head else kind]


def _stored(value: Tensor, *, place: str, config: dict[str, Any], kind: str, library: Any) -> Any:
    """Returns one tensor as the file stores it, a numpy array. Blocks and bfloat16 are uint8 [rows, bytes].

    Raises ValueError for values that are not finite, also after their conversion.
    """
    turned = as_gguf(value.float(), name=place, config=config)
    if not turned.isfinite().all():
        raise ValueError(
            f"--format gguf: {place} has values that are not finite; train again from an earlier checkpoint"
        )
    if turned.dim() < 2 or kind == "F32":
        return turned.numpy()
    chosen = _kind_of(place, kind=kind, library=library)
    block, _ = library.GGML_QUANT_SIZES[chosen]
    if kind == "F16" or turned.shape[1] % block:
        found = read = turned.half().numpy()
    else:
        with np.errstate(all="ignore"):  # numbers that become infinite are refused below
            found = library.quants.quantize(turned.numpy(), chosen)
            read = library.quants.dequantize(found, chosen)
    if not np.isfinite(read).all():
        raise ValueError(
            f"--format gguf: {place} has values up to {float(turned.abs().max()):.4g}, which --kind {kind} cannot hold, because it has numbers "
            "of 16 bits up to 65504; use --kind BF16 or --kind F32"
        )
    return found
