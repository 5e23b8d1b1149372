"""Unpacks a GGUF file into a transformers folder: safetensors, config.json, tokenizer, chat template and end tokens.

F32, F16 and BF16 values keep their dtype. Quantised blocks are widened to float32, exactly as in the package gguf.
"""

import errno
import importlib
import json
import logging
import os
import re
import secrets
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ztk.checkpoint.folder import sync_folder
from ztk.checkpoint.gguf.families import as_transformers, config_of, to_transformers
from ztk.checkpoint.gguf.general import write_general
from ztk.checkpoint.gguf.tokenizer import write_tokenizer
from ztk.checkpoint.tensorfile import TensorSpec, write_tensors

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SOURCE = "gguf.json"  # identifies the file from which a folder was made


def model_folder(path: str) -> str:
    """Returns `path`, or for a file FILE.gguf the folder FILE.gguf.unpacked. Creates the folder, and renews it if the file has changed.

    Raises:
        ValueError: the file is not supported, or the folder cannot be written.
    """
    file = Path(path).expanduser()
    if file.suffix != SUFFIX or not file.is_file():
        return path
    folder, state = file.with_name(f"{file.name}.unpacked"), file.stat()
    source = {"bytes": state.st_size, "modified": state.st_mtime_ns}
    if _is_made_from(source, folder=folder):
        return str(folder)
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        unpack(file, to=temporary)
        (temporary / _SOURCE).write_text(json.dumps(source), encoding="utf-8")
        _place(temporary, folder=folder, source=source)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ValueError(
            f"{file} is unpacked into the folder next to it, and {file.parent} cannot be written: copy the file to another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)


def _is_made_from(source: dict[str, int], *, folder: Path) -> bool:
    try:
        return json.loads((folder / _SOURCE).read_text(encoding="utf-8")) == source
    except (OSError, ValueError):
        return False


def _place(temporary: Path, *, folder: Path, source: dict[str, int]) -> None:
    """Renames the new folder, unless another process was faster; its folder may already be in use."""
    if _is_made_from(source, folder=folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not _is_made_from(source, folder=folder):
            raise


def unpack(file: str | os.PathLike, *, to: str | os.PathLike) -> None:
    """Writes the new folder `to`, one tensor in memory at a time, and logs the widened formats.

    Raises:
        ValueError: `to` exists, the package gguf is not installed, or the file is not supported.
    """
    library, folder, named = gguf_library(), Path(to), str(file)
    if folder.exists():
        raise ValueError(f"{folder} exists; name another place, or remove it first")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", named):
        raise ValueError(
            f"{named}: is one of several parts, which are not read: join them with llama-gguf-split --merge"
        )
    try:
        reader = library.GGUFReader(named)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{named}: is not a complete GGUF file ({error})") from None
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(metadata, shapes={tensor.name: _shape(tensor) for tensor in reader.tensors}, file=named)
    tensors = _places(reader.tensors, file=named)
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    widened = [f"{count} of {kind}" for kind, count in kinds.items() if kind not in _DTYPES]
    dtype = torch.float32 if widened else _DTYPES[reader.tensors[0].tensor_type.name]
    folder.mkdir(parents=True)
    write_tokenizer(metadata, folder=folder, file=named)
    write_general(reader.fields, folder=folder)
    _write_weights(tensors, config=config, path=folder / "model.safetensors")
    ends = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{own}_token_id") for name, own in _ENDS}
    written = config | ends | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    sync_folder(folder)
    if widened:
        logger.warning("%s: %s tensors are widened to float32", named, ", ".join(widened))


_ENDS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def gguf_library() -> Any:
    """Imports the package gguf. Raises ValueError if it is not installed."""
    try:
        library = importlib.import_module("gguf")
        importlib.import_module("gguf.quants")
    except ImportError:
        raise ValueError('GGUF files need the package gguf: pip install "ztk[gguf]"') from None
    return library


def _places(tensors: list[Any], *, file: str) -> dict[str, Any]:
    """Returns name in the folder -> tensor of the file."""
    found = {}
    for tensor in tensors:
        name = to_transformers(tensor.name)
        if name is None:
            raise ValueError(
                f"{file}: the tensor {tensor.name} has no place in a model of its family; convert the model again"
            )
        found[name] = tensor
    return found


def _write_weights(tensors: dict[str, Any], *, config: dict[str, Any], path: Path) -> None:
    specs = [
        TensorSpec(key=name, dtype=_DTYPES.get(tensor.tensor_type.name, torch.float32), shape=_shape(tensor))
        for name, tensor in tensors.items()
    ]

    def values(name: str) -> list[Tensor]:
        return [as_transformers(values_of(tensors[name]), name=tensors[name].name, config=config)]

    write_tensors(path, specs=specs, ranges=values)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def values_of(tensor: Any) -> Tensor:
    """Returns the values of one tensor of a file, in its shape: float32, or the dtype of the file."""
    kind = tensor.tensor_type.name
    if kind in _DTYPES:
        flat = np.array(tensor.data).reshape(-1).view(np.uint8)
        return torch.from_numpy(flat).view(_DTYPES[kind]).view(_shape(tensor))
    wide = gguf_library().quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(wide, dtype=np.float32)).view(_shape(tensor))
