"""Reads weights and optimizer states in other formats, one range of one tensor at a time. Values keep the dtype of the files."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ztk.checkpoint.errors import CheckpointError
from ztk.optim.states import MASTER

RANGE_ELEMENTS = 4 << 20  # elements in memory at a time

Key = tuple[str, str]
_OPTIMIZER_KEY = re.compile(r"(?:optim|optimizer|optimizer_state)\.state\.(?P<name>.+)\.(?P<kind>[a-z_]+)")


class Source(Protocol):
    """Named tensors. A key is (kind, name), with the kind "master", a state of the optimizer, "parameter" (frozen) or "buffer".

    control: the scalars of the step control in the source.
    """

    step: int
    control: dict[str, float]
    dynamic_loss_scale: bool
    tied: dict[str, str]

    def shapes(self) -> dict[Key, tuple[int, ...]]: ...

    def ranges(self, key: Key) -> Iterator[Tensor]: ...  # flat, in order


class _Weights:
    """A source with weights only."""

    step = 0
    dynamic_loss_scale = False

    def __init__(self) -> None:
        self.control: dict[str, float] = {}
        self.tied: dict[str, str] = {}


class SafetensorsSource(_Weights):
    """Weights in safetensors files, which stay memory-mapped.

    Raises:
        CheckpointError: a file is missing, truncated or of another format.
    """

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is missing, truncated or not a safetensors file: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        self._last: tuple[str, Tensor] | None = None

    def has(self, name: str) -> bool:
        """Returns whether the files have a tensor of this name."""
        return name in self._files

    def shapes(self) -> dict[Key, tuple[int, ...]]:
        return {(MASTER, name): tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def full(self, name: str) -> Tensor:
        """Returns a tensor in its shape. The last one stays in memory, because its ranges are read one after the other."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._files[name].get_tensor(name))
        return self._last[1]

    def ranges(self, key: Key) -> Iterator[Tensor]:
        yield from self.full(key[1]).view(-1).split(RANGE_ELEMENTS)


def load_plain(path: Path) -> Any:
    """Loads tensors, containers and plain values from a file of `torch.save`, on the CPU and memory-mapped.

    Does not run code in the file.

    Raises:
        CheckpointError: the file cannot be read, or contains anything else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip, pickle and value errors all mean a damaged file
        raise CheckpointError(
            f"{path} is not a file of torch.save that contains only tensors and plain values: {reason_of(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """Explains why `torch.load(weights_only=True)` or torch.distributed.checkpoint failed. Drops torch's advice to run the file's
    code.
    """
    text = str(error)
    if "TorchScript archives" in text:
        return "it is a TorchScript archive, which contains code and is not read"
    if named := re.search(r"GLOBAL (\S+)", text):
        return f"it names {named[1]}, which is code and is not run"
    return "it cannot be unpickled" if "weights_only" in text else text


class StateDictSource(_Weights):
    """Weights in a file of `torch.save`: a state_dict, or a dict with one under "model" or "state_dict".

    Raises:
        CheckpointError: the file cannot be read or contains no state_dict.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        loaded = load_plain(path)
        for key in ("model", "state_dict"):
            if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
                loaded = loaded[key]
        if not isinstance(loaded, dict) or not any(isinstance(value, Tensor) for value in loaded.values()):
            raise CheckpointError(f"{path} contains no state_dict")
        self._tensors = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}

    def shapes(self) -> dict[Key, tuple[int, ...]]:
        return {(MASTER, name): tuple(value.shape) for name, value in self._tensors.items()}

    def ranges(self, key: Key) -> Iterator[Tensor]:
        yield from self._tensors[key[1]].contiguous().view(-1).split(RANGE_ELEMENTS)


class TorchDistributedSource(_Weights):
    """A folder of torch.distributed.checkpoint, as written by FSDP2 and torchtitan.

    Keys are "model.NAME" or "NAME", and "optim.state.NAME.KIND" for optimizer states. One tensor is in memory at a time.

    Raises:
        CheckpointError: its metadata cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        super().__init__()
        self._path = path
        try:
            metadata = _safe_reader(path).read_metadata().state_dict_metadata
        except Exception as error:  # a pickle may raise any error
            raise CheckpointError(f"{path / '.metadata'} cannot be read: {error}") from error
        self._tensors = {key: value for key, value in metadata.items() if isinstance(value, TensorStorageMetadata)}
        self._keys: dict[Key, str] = {}
        for key in self._tensors:
            if match := _OPTIMIZER_KEY.fullmatch(key):
                self._keys[match["kind"], match["name"]] = key
            elif not key.startswith(("optim", "lr_scheduler", "dataloader", "train_state")):
                self._keys[MASTER, key.removeprefix("model.")] = key
        steps = [key for (kind, _), key in self._keys.items() if kind == "step"]
        self.step = int(self._load(steps[0])) if steps else 0
        self._keys = {key: value for key, value in self._keys.items() if key[0] != "step"}

    def _load(self, key: str) -> Tensor:
        from torch.distributed.checkpoint import CheckpointException, load

        meta = self._tensors[key]
        state = {key: torch.empty(meta.size, dtype=meta.properties.dtype)}
        try:
            load(state, storage_reader=_safe_reader(self._path), planner=_tensor_planner(), no_dist=True)
        except CheckpointException as error:  # the library wraps all errors in this class, which is a BaseException
            raise CheckpointError(f"{key} in {self._path} cannot be read: {reason_of(error)}") from error
        return state[key]

    def shapes(self) -> dict[Key, tuple[int, ...]]:
        return {key: tuple(self._tensors[name].size) for key, name in self._keys.items()}

    def ranges(self, key: Key) -> Iterator[Tensor]:
        yield self._load(self._keys[key]).contiguous().view(-1)


_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("_codecs", "encode"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles `.metadata` without running code from it: creates only torch's records, sizes and dtypes."""

    def find_class(self, module: str, name: str) -> object:
        if module in _METADATA_MODULES and "." not in name:
            found = super().find_class(module, name)
            is_record = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            if is_record and found.__module__ == module:
                return found
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in such a file and is not run")


def _safe_reader(path: Path):
    """Returns a `FileSystemReader` that reads its metadata with `_MetadataUnpickler`."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *args: object, **kwargs: object):
            del args, kwargs
            with open(path / ".metadata", "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(path)


def _tensor_planner():
    """Returns a `DefaultLoadPlanner` for tensors only, because it would unpickle other entries without restrictions."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item, value) -> None:
            raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor and is not read")

    return Planner()
