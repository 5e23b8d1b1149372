"""`manifest.json`: the contents of a checkpoint and the file of each range. It is written last and contains its own hash."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ztk.checkpoint.errors import CheckpointError, DamagedCheckpoint

FORMAT = "ztk-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_PREFIX = b'{"sha256":"'
_MIDDLE = b'",\n"manifest":'
_SUFFIX = b"}\n"

BUFFER = "buffer"  # kind of a module's persistent buffer
RNG = "rng"  # kind of a rank's random number generators
OPTIMIZER = "optimizer"  # kind of the tensors of an optimizer of full parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The range [start, stop) of flat state `kind` of `name`, at byte `offset` of its file, with a crc32 per block.

    box: `[first index, size]` per dimension of the rank's part of the parameter (tensor and expert parallelism). The range then counts
    the elements of the part; with None it counts those in the full parameter.
    """

    name: str
    kind: str
    dtype: str  # safetensors name
    start: int
    stop: int
    offset: int
    crc32: list[int]
    box: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFile:
    """One rank's file. `header_crc32` covers the bytes before the first tensor."""

    file: str
    nbytes: int
    header_nbytes: int
    header_crc32: int
    entries: list[Entry]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A full parameter or buffer of the model."""

    name: str
    shape: list[int]
    dtype: str  # compute dtype of the parameter
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """control: the step control's device scalars by name (step, loss scale and so on; "nan" and "inf" as strings).
    state_names: the optimizer's states in addition to "master", or None for a checkpoint without optimizer states.
    tied: other name -> canonical name.
    layout: the sharding of the saving run, for information only.
    data, extra: JSON values from the training program.
    model: the model's description; see `ztk.checkpoint.architecture`.
    groups: the optimizer's hyperparameters, each set with its parameters' names under "params".
    torch_optimizer: the state of a torch optimizer; see `ztk.checkpoint.torch_optimizer`.
    missed_updates: parameter -> number of updates that it missed, for ztk's own optimizers. Only parameters that missed any.
    left_out: frozen parameters that a checkpoint of trained parameters omits.
    """

    step: int
    created: float  # seconds since 1970
    versions: dict[str, str]
    world_size: int
    layout: dict[str, Any]
    state_names: list[str] | None
    control: dict[str, Any]
    counters: dict[str, int]
    data: Any
    extra: Any
    metric: float | None
    block_bytes: int
    tied: dict[str, str]
    parameters: list[TensorInfo]
    buffers: list[TensorInfo]
    files: list[StateFile]
    model: dict[str, Any] | None = None
    groups: list[dict[str, Any]] | None = None
    torch_optimizer: dict[str, Any] | None = None
    missed_updates: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    format: str = FORMAT
    version: int = VERSION
    path: str = field(default="", compare=False)  # the folder it was read from

    @property
    def nbytes(self) -> int:
        """Bytes of all state files."""
        return sum(file.nbytes for file in self.files)

    @property
    def num_parameters(self) -> int:
        return sum(prod(info.shape) for info in self.parameters)

    def host_of(self, number: int) -> str | None:
        """Returns the host that has file `number` in a folder of its own, or None for a checkpoint in one shared folder."""
        hosts = self.layout.get("hosts")
        return hosts[number] if isinstance(hosts, list) and number < len(hosts) else None


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the file's bytes. Every byte is covered by the hash or has a fixed value."""
    content = asdict(manifest)
    del content["path"]
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX + hashlib.sha256(text).hexdigest().encode() + _MIDDLE + text + _SUFFIX


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a step folder.

    Raises:
        DamagedCheckpoint: it is missing or damaged.
        CheckpointError: it has another version.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{path} is missing: {_what_it_is(folder)}") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    start = len(_PREFIX) + 64
    is_complete = data.startswith(_PREFIX) and data[start : start + len(_MIDDLE)] == _MIDDLE and data.endswith(_SUFFIX)
    text = data[start + len(_MIDDLE) : -len(_SUFFIX)]
    if not is_complete or hashlib.sha256(text).hexdigest().encode() != data[len(_PREFIX) : start]:
        raise DamagedCheckpoint(
            f"{path} is truncated, damaged or not a manifest of ztk (its hash does not fit its content)"
        )
    content = json.loads(text)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format {content.get('format')} version {content.get('version')}; "
            f"this is ztk with format {FORMAT} version {VERSION}: load it with the version of ztk that wrote it"
        )
    try:
        return _decode(content, path=str(folder))
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} lacks a key or has one that this version does not know: {error}") from error


def manifest_hash(folder: Path) -> str:
    """Returns the hash in the manifest of a step folder, without a check of its content, or "" if there is none. It names the save: nodes
    with folders of their own have the same manifest.
    """
    try:
        with open(folder / MANIFEST, "rb") as file:
            return file.read(len(_PREFIX) + 64)[len(_PREFIX) :].decode(errors="replace")
    except OSError:
        return ""


def _decode(content: dict[str, Any], *, path: str) -> Manifest:
    files = [
        StateFile(**{**file, "entries": [Entry(**entry) for entry in file["entries"]]}) for file in content["files"]
    ]
    infos = {key: [TensorInfo(**info) for info in content[key]] for key in ("parameters", "buffers")}
    return Manifest(**{**content, "files": files, **infos, "path": path})


def _what_it_is(folder: Path) -> str:
    """Describes a folder without a manifest, for the error message."""
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return f"{folder} is a file, not a checkpoint folder"
    names = {child.name for child in folder.iterdir()}
    if ".metadata" in names:
        return "this is a torch.distributed.checkpoint folder; bring it in with `python -m ztk.checkpoint import`"
    if "model.safetensors" in names or "model.safetensors.index.json" in names:
        return "this is a Hugging Face folder; bring it in with `python -m ztk.checkpoint import`"
    if "latest" in names or any("mp_rank_" in name for name in names):
        return "this is a folder of DeepSpeed; bring it in with `python -m ztk.checkpoint import`"
    return "this is not a ztk checkpoint, or one that was not completely written"
