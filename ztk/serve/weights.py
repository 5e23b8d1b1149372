"""New weights for a running server: files of a folder, parts that arrive by HTTP and are files until all have come, or tensors that it pulls.

They are read one tensor at a time, on every rank that shares the model. A rank reads only the rows or columns that it keeps.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ztk.core.runtime.boxes import Box
from ztk.core.runtime.comm.pulls import SCHEME, pulled
from ztk.inference import UnreadModel
from ztk.inference.module_model import is_own_family
from ztk.serve.models import Opened
from ztk.serve.values import BadRequest, shown

_PREFIX, _NAMED, _HEADER_BYTES = ".incoming-", 5, 1 << 24  # folders of parts; names in an error; of a file
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names
_PULL_SECONDS = 60.0  # without a tensor, until an owner counts as gone

# Shapes and safetensors' names of dtypes, by the names of tensors.
Kinds = Mapping[str, tuple[list[int], str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The parameters that new weights must have. module: without memory. parameters: by name, without values, in the dtype that the engine
    reads.
    """

    module: nn.Module
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, opened: Opened) -> "Expected":
        """Of a model that was just opened.

        Raises:
            ValueError: a model whose weights cannot be replaced.
        """
        module = opened.module.module if isinstance(opened.module, UnreadModel) else opened.module
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"serve.weights_path with {opened.name}, whose packed weights are final: name the model that was packed, or leave it out"
            )
        if not is_own_family(module):
            raise ValueError(
                f"serve.weights_path with {opened.name}, which runs its own modules: new weights are for families that ztk computes itself; "
                "leave it out"
            )
        return cls(module=module, parameters={name: own.to("meta") for name, own in module.named_parameters()})

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters in fp32, with their names."""
        return sum(4 * own.numel() + 1024 for own in self.parameters.values()) + _HEADER_BYTES

    @contextmanager
    def opened(self, source: str) -> Iterator[UnreadModel]:
        """The weights of a folder's files, or of addresses of offered tensors, read one by one while the context is open.

        Raises BadRequest as `check`, and ConnectionError as `pulled`.
        """
        with ExitStack() as stack:
            if source.startswith(SCHEME):
                offered = stack.enter_context(pulled(source, timeout_seconds=_PULL_SECONDS))
                kinds = {
                    name: (list(shape), _DTYPES.get(dtype, str(dtype)))
                    for name, (shape, dtype) in offered.shapes.items()
                }
                self.check([kinds])
                tensors: _Tensors = offered
            else:
                files = [stack.enter_context(_open(path)) for path in _files_of(Path(source))]
                self.check(map(_kinds_of, files))
                tensors = _Files({name: file for file in files for name in file.keys()})  # noqa: SIM118
            yield UnreadModel(module=self.module, state=Unread(tensors, parameters=self.parameters))

    def check(self, parts: Iterable[Kinds], *, before: Collection[str] | None = None) -> list[str]:
        """Returns the names of the tensors in these parts. before: names of earlier parts, if others follow.

        Raises BadRequest for tensors that the model does not have or has in another shape, for other dtypes, for a tensor that has come before
        and, without `before`, for missing ones.
        """
        found, faults = list[str](), list[str]()
        for part in parts:
            for name, (shape, dtype) in part.items():
                faults += self._faults(name, shape=shape, dtype=dtype)
                if name in found or name in (before or ()):
                    faults.append(f"{name} comes twice")
                found.append(name)
        if before is None:
            faults += [f"{name} is missing" for name in self.parameters if name not in found]
        if faults:
            more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
            raise BadRequest(f"these weights do not fit the model: {'; '.join(faults[:_NAMED])}{more}")
        return found

    def _faults(self, name: str, *, shape: list[int], dtype: str) -> Iterator[str]:
        own = self.parameters.get(name)
        if own is None:
            yield f"{shown(name)} is no parameter of the model"
        elif list(own.shape) != shape:
            yield f"{name} has the shape {shape} instead of {list(own.shape)}"
        elif dtype not in _DTYPES.values():
            yield f"{name} has the dtype {dtype} instead of {', '.join(_DTYPES.values())}"


class _Tensors(Protocol):
    """Tensors that are read in parts. read_bytes: bytes of the values that were read so far."""

    read_bytes: int

    def part(self, name: str, *, box: Box) -> Tensor: ...

    def largest(self, name: str, *, box: Box, axis: int) -> Tensor: ...


class _Files:
    """Tensors of opened files, by name."""

    def __init__(self, places: Mapping[str, Any]) -> None:
        self._places, self.read_bytes = places, 0

    def part(self, name: str, *, box: Box) -> Tensor:
        file = self._places[name]
        is_full = list(box.shape) == file.get_slice(name).get_shape()
        # A copy: a file may change or go.
        found = (file.get_tensor(name) if is_full else file.get_slice(name)[box.slices]).clone()
        self.read_bytes += found.nbytes
        return found

    def largest(self, name: str, *, box: Box, axis: int) -> Tensor:
        return self._places[name].get_tensor(name)[box.slices].abs().amax(axis)


class Unread(Mapping[str, Tensor]):
    """The parameters of new weights, read on access, in full or in parts, in the dtypes of `parameters`."""

    def __init__(self, tensors: _Tensors, *, parameters: Mapping[str, Tensor]) -> None:
        """tensors: with the names, shapes and any dtypes of `parameters`."""
        self._tensors, self._parameters = tensors, parameters

    @property
    def read_bytes(self) -> int:
        """Bytes of the values that were read so far."""
        return self._tensors.read_bytes

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._parameters[name].shape)

    def part(self, name: str, *, box: Box) -> Tensor:
        if not box.numel:
            return torch.empty(box.shape, dtype=self._parameters[name].dtype)
        return self._tensors.part(name, box=box).to(self._parameters[name].dtype)

    def largest(self, name: str, *, box: Box, axis: int) -> Tensor:
        return self._tensors.largest(name, box=box, axis=axis).to(self._parameters[name].dtype)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape_of(name)
        return self.part(name, box=Box(start=(0,) * len(shape), shape=shape))

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class Incoming:
    """The version that is on its way into a server. Methods may be called in any thread, one at a time.

    folder: has the folders that requests may name. Parts that arrive by HTTP are in a folder of their own there, which ends with the process.
    """

    def __init__(self, expected: Expected, *, folder: str) -> None:
        self.expected, self._root = expected, Path(folder).resolve()
        self._root.mkdir(parents=True, exist_ok=True)
        self._drop_left()
        self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._root))
        self._lock = os.open(self._own, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._number, self._names = 0, set[str]()
        self.version: str | None = None

    def begin(self, version: str) -> None:
        """Starts a version. Parts of an earlier one that was not taken are dropped."""
        self.drop()
        self.version = version
        self._folder.mkdir(parents=True)

    @property
    def _folder(self) -> Path:
        return self._own / "parts"

    @property
    def folder(self) -> str:
        """With the parts so far. Raises BadRequest for missing ones."""
        with self.expected.opened(str(self._folder)):
            return str(self._folder)

    def new_file(self, version: str) -> Path:
        """A path for another part, without the ending that counts. Raises BadRequest for a version that has not begun."""
        self.check(version)
        self._number += 1
        return self._folder / f"{self._number}.part"

    def check(self, version: str) -> None:
        """Raises BadRequest for a version that has not begun."""
        if version != self.version:
            begun = "none has begun" if self.version is None else f"{self.version} has begun"
            raise BadRequest(f"version {shown(version)}: {begun}; POST it to /v1/weights first", status=409)

    def add(self, path: Path, *, version: str) -> None:
        """Counts a complete part of the version. Raises BadRequest for tensors that do not fit or have come before."""
        self.check(version)
        with _open(path) as file:
            names = self.expected.check([_kinds_of(file)], before=self._names)
        path.rename(path.with_suffix(".safetensors"))
        self._names.update(names)

    def named(self, path: str) -> str:
        """The folder that a request names, with weights that fit. Raises BadRequest for another one."""
        folder = (self._root / path).resolve()
        if not folder.is_relative_to(self._root) or not folder.is_dir():
            raise BadRequest(f"path={shown(path)}: no folder below serve.weights_path={self._root}", param="path")
        for file in _files_of(folder):
            if not file.resolve().is_relative_to(self._root):
                raise BadRequest(f"path={shown(path)}: {file.name} is a link to a file elsewhere", param="path")
        with self.expected.opened(str(folder)):
            return str(folder)

    def drop(self) -> None:
        """Drops the version and its parts."""
        self.version, self._names = None, set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Removes the folder of parts. Idempotent."""
        shutil.rmtree(self._own, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)

    def _drop_left(self) -> None:
        """Removes folders of parts whose process was killed."""
        for left in self._root.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                lock = os.open(left, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(lock)


def _files_of(folder: Path) -> list[Path]:
    """The files in a folder. Raises BadRequest if there are none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise BadRequest(f"{folder.name}: no tensors have come; send them as safetensors")
    return found


def _kinds_of(file: Any) -> Kinds:
    """Of an opened file."""
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A file of safetensors. Raises BadRequest for another one."""
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadRequest(f"these are no safetensors: {error}") from None
    with file as opened:
        yield opened
