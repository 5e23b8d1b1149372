"""Exports checkpoints to other formats, one range of a tensor at a time.

Formats: a safetensors folder for Hugging Face, one state_dict file, or a folder of torch.distributed.checkpoint. Parameters get the
requested dtype, buffers keep theirs.
"""

import json
import math
import os
import secrets
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ztk.checkpoint.architecture import adapter_view, is_turned, merges, scale_of, transformers_view
from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.folder import discard, resolve, sync_folder, write_file
from ztk.checkpoint.groups import torch_param_groups
from ztk.checkpoint.manifest import BUFFER, Manifest, TensorInfo, read_manifest
from ztk.checkpoint.reader import StateReader
from ztk.checkpoint.sources import RANGE_ELEMENTS, SafetensorsSource, load_plain, reason_of
from ztk.checkpoint.tensorfile import TensorSpec, check_tensors, write_tensors
from ztk.checkpoint.torch_optimizer import decode_all, states_of_parameters
from ztk.core.policies.records import run_folder, weight_files
from ztk.core.precision.names import DTYPES
from ztk.data.subword import read_settings, token_text
from ztk.nn.lora import adapter_of, is_adapter
from ztk.optim.states import FROZEN, MASTER
from ztk.zero.buckets.context import AVERAGE

SHARD_BYTES = 5 << 30  # bytes per exported file, the default of Hugging Face
_READ_BYTES = 256 << 20  # read at once when a folder of torch.distributed.checkpoint is compared


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """Summary of a written export."""

    path: Path
    files: int
    nbytes: int


class Weights:
    """The full weights of a checkpoint by name: master weights, then persistent buffers. Tied names appear once.

    A checkpoint of adapters leaves out frozen weights; they are read from the folder that it names as its base.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        dtype: torch.dtype | None,
        names: Mapping[str, str] | None = None,
        ema: bool = False,
        is_merged: bool = False,
    ) -> None:
        """dtype: the dtype of floating-point parameters. Defaults to the model's compute dtype.
        names: own name -> exported name of the tensors to export. Defaults to all tensors under their own names.
        ema: exports the moving average of trained parameters.
        is_merged: merges adapters: exports W + alpha / rank B A, summed in float32, in place of W, and leaves out A and B.

        Raises CheckpointError if the checkpoint has no average, or if its base is not where the checkpoint names it.
        """
        self._base, self._left_out = (_base_of(manifest) if is_merged else None), frozenset(manifest.left_out)
        if ema and AVERAGE not in (manifest.state_names or ()):
            raise CheckpointError(
                f"{manifest.path} has no average of the weights: train with ema.decay=0.999, or ask for the weights"
            )
        self._trained = AVERAGE if ema else MASTER
        self._reader, self._dtype = StateReader(manifest), dtype
        infos = {info.name: info for info in [*manifest.parameters, *manifest.buffers]}
        self._adapters: dict[str, TensorInfo] = {}
        if is_merged:
            self._adapters = {name: info for name, info in infos.items() if is_adapter(name)}
            names = {
                own: other
                for own, other in (names or dict(zip(infos, infos, strict=True))).items()
                if own not in self._adapters
            }
            self._scale = scale_of(manifest) if self._adapters else 0.0
            self._is_turned = bool(self._adapters) and is_turned(manifest)
        self._infos = infos if names is None else {other: infos[own] for own, other in names.items()}
        self._buffers = {info.name for info in manifest.buffers}

    @property
    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(key=name, dtype=self._dtype_of(info), shape=tuple(info.shape))
            for name, info in self._infos.items()
        ]

    def _dtype_of(self, info: TensorInfo) -> torch.dtype:
        own = DTYPES[info.dtype]
        return self._dtype if self._dtype is not None and info.name not in self._buffers else own

    def ranges(self, name: str) -> Iterator[Tensor]:
        """Yields the flat values of `name` in order."""
        numel = prod(self._infos[name].shape)
        for start in range(0, numel, RANGE_ELEMENTS):
            yield self.read(name, start=start, stop=min(start + RANGE_ELEMENTS, numel))

    def full(self, name: str) -> Tensor:
        """Returns `name` in its shape."""
        info = self._infos[name]
        flat, start = torch.empty(prod(info.shape), dtype=self._dtype_of(info)), 0
        for values in self.ranges(name):
            flat[start : start + values.numel()] = values
            start += values.numel()
        return flat.view(info.shape)

    def read(self, name: str, *, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the flat values of `name`.

        Raises ValueError for values that the dtype of the export cannot hold.
        """
        info = self._infos[name]
        values = self._stored(info, start=start, stop=stop)
        below = self._adapters.get(adapter_of(info.name)[0])
        if below is not None:
            values = values.float() + self._product(info, below=below, start=start, stop=stop)
        found = values.to(self._dtype_of(info))
        if found.dtype is not values.dtype and (found.isinf() & values.isfinite()).any():
            raise ValueError(
                f"{info.name} has values up to {float(values.abs().max()):.4g}, which {str(found.dtype).removeprefix('torch.')} cannot hold; "
                "use --dtype fp32"
            )
        return found

    def _stored(self, info: TensorInfo, *, start: int, stop: int) -> Tensor:
        if self._base is not None and info.name in self._left_out:
            return self._base.full(info.name).view(-1)[start:stop]
        kind = BUFFER if info.name in self._buffers else self._trained if info.trainable else FROZEN
        return self._reader.read(name=info.name, kind=kind, start=start, stop=stop)

    def _product(self, info: TensorInfo, *, below: TensorInfo, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of flat scale * B A. below: A, [rank, in]."""
        rank, width = below.shape
        if self._is_turned:  # the weight is [in, out]
            above = self._adapters[adapter_of(info.name)[1]]
            down, up = (
                self._stored(one, start=0, stop=prod(one.shape)).float().view(one.shape) for one in (below, above)
            )
            return (up @ down * self._scale).T.flatten()[start:stop]
        first, last = start // width, -(-stop // width)  # row numbers
        above = self._adapters[adapter_of(info.name)[1]]
        down = self._stored(below, start=0, stop=rank * width).float().view(rank, width)
        up = self._stored(above, start=first * rank, stop=last * rank).float().view(-1, rank)
        return (up @ down * self._scale).flatten()[start - first * width : stop - first * width]

    def close(self) -> None:
        self._reader.close()


def export_safetensors(
    path: str | os.PathLike,
    *,
    to: str | os.PathLike,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    own_names: bool = False,
    ema: bool = False,
) -> ExportReport:
    """Writes `to/model-00001-of-0000N.safetensors` with `to/model.safetensors.index.json`, or one `to/model.safetensors`, and
    `config.json`.

    A dense native decoder becomes a LlamaForCausalLM with merged adapters, unless `own_names` is set. A transformers model keeps its
    names and configuration. A "config" in the checkpoint's `extra` replaces either configuration. The run's tokenizer is copied, if there
    is one, and the configuration then lists its special tokens, such as the end of a text.

    path: the same as for `load`.
    dtype: the weights' dtype. Defaults to the model's compute dtype.
    shard_bytes: largest size of a file.
    ema: exports the moving average in place of the weights.

    The files are read again and compared with the written values before the folder gets its name.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks weights, or the average, or a file differs from the written values.
        ValueError: `to` exists, or `dtype` cannot hold a value.
    """
    manifest = full_manifest(path, is_merged=not own_names)
    names, config = None, None
    if not own_names:
        names, config = transformers_view(manifest, dtype=dtype or DTYPES[manifest.parameters[0].dtype])
    if isinstance(manifest.extra, dict) and "config" in manifest.extra:
        config = manifest.extra["config"]
    is_merged = not own_names and merges(manifest)
    weights = Weights(manifest, dtype=dtype, names=names, ema=ema, is_merged=is_merged)
    with closing(weights), _new_folder(Path(to)) as folder:
        sizes = [spec.nbytes for spec in weights.specs]
        numbers = files_of(sizes, limit=shard_bytes, stem="model", ending="safetensors")
        files = {name: [weights.specs[number] for number in own] for name, own in numbers.items()}
        nbytes = 0
        for name, specs in files.items():
            written = write_tensors(folder / name, specs=specs, ranges=weights.ranges)
            check_tensors(written, specs=specs)
            nbytes += written.nbytes
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for specs in files.values() for spec in specs)},
                "weight_map": {spec.key: name for name, specs in files.items() for spec in specs},
            }
            _write_json(folder / "model.safetensors.index.json", value=index)
        _copy_tokenizer(resolve(path), to=folder)
        if config is not None:
            ends = {key: value for key, value in special_tokens(folder).items() if config.get(key) is None}
            _write_json(folder / "config.json", value=config | ends)
        if generation := (manifest.model or {}).get("generation"):
            _write_json(folder / "generation_config.json", value=generation)
    return ExportReport(path=Path(to), files=len(files), nbytes=nbytes)


def _copy_tokenizer(step: Path, *, to: Path) -> None:
    """Copies the tokenizer of the run that wrote the checkpoint `step`, if it has one."""
    folder = run_tokenizer(step)
    for file in [] if folder is None else sorted(folder.iterdir()):
        shutil.copyfile(file, to / file.name)


def run_tokenizer(step: Path) -> Path | None:
    """Returns the tokenizer folder of the run that wrote the checkpoint `step`, or None."""
    run = run_folder(step)
    return run / "tokenizer" if run is not None and (run / "tokenizer").is_dir() else None


def special_tokens(folder: Path) -> dict[str, int]:
    """Returns `eos_token_id`, `bos_token_id` and `pad_token_id`, as far as the tokenizer in `folder` defines them."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return {}
    named, stored = read_settings(folder), json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = stored.get("model", {}).get("vocab")
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    known |= {token["content"]: token["id"] for token in stored.get("added_tokens") or ()}
    found = {}
    for key in ("eos_token", "bos_token", "pad_token"):
        text = token_text(named.get(key))
        if text in known:
            found[f"{key}_id"] = known[text]
    return found


def export_adapter(
    path: str | os.PathLike,
    *,
    to: str | os.PathLike,
    dtype: torch.dtype | None = None,
    adapter: str = "default",
    ema: bool = False,
) -> ExportReport:
    """Writes `to/adapter_model.safetensors` and `to/adapter_config.json` for `peft.PeftModel.from_pretrained(base, to)`.

    path: the same as for `load`. A checkpoint of only the trained parameters is enough.

    Raises:
        CheckpointError: the checkpoint is damaged or the model had no such adapter.
        ValueError: `to` exists.
    """
    manifest = read_manifest(resolve(path))
    names, config = adapter_view(manifest, adapter=adapter)
    weights = Weights(manifest, dtype=dtype, names=names, ema=ema)
    with closing(weights), _new_folder(Path(to)) as folder:
        written = write_tensors(folder / "adapter_model.safetensors", specs=weights.specs, ranges=weights.ranges)
        check_tensors(written, specs=weights.specs)
        _write_json(folder / "adapter_config.json", value=config)
    return ExportReport(path=Path(to), files=1, nbytes=written.nbytes)


def export_state_dict(
    path: str | os.PathLike, *, to: str | os.PathLike, dtype: torch.dtype | None = None, ema: bool = False
) -> ExportReport:
    """Writes one file for `torch.load(to, weights_only=True)`: a state_dict with tied names.

    The format is a pickle, so all weights are in memory at once. The file is read again before it gets its name.

    Raises:
        CheckpointError: as of `export_safetensors`, or the file differs from the written values.
        ValueError: as of `export_safetensors`.
    """
    manifest, to = full_manifest(path), Path(to)
    with new_file(to) as temporary, closing(Weights(manifest, dtype=dtype, ema=ema)) as weights:
        state = {spec.key: weights.full(spec.key) for spec in weights.specs}
        state |= {name: state[canonical] for name, canonical in manifest.tied.items()}
        torch.save(state, temporary)
        found = load_plain(temporary)
        if found.keys() != state.keys() or not all(_is_same(found[name], other=value) for name, value in state.items()):
            raise CheckpointError(
                f"{temporary} differs from its value before the write: write it again on another disk"
            )
    return ExportReport(path=to, files=1, nbytes=to.stat().st_size)


def export_torch_distributed(path: str | os.PathLike, *, to: str | os.PathLike) -> ExportReport:
    """Writes a folder that `torch.distributed.checkpoint.load` reads into any sharding.

    Keys are named as in FSDP2's `get_state_dict`: fp32 weights and persistent buffers as "model.NAME", optimizer states as
    "optim.state.NAME.KIND", the step as "optim.state.NAME.step", and the hyperparameters, with rates before the schedule's factor, as
    "optim.param_groups". So `dcp.load` and `set_state_dict` continue the run with torch's optimizer. Weights appear under each of their
    tied names. Tensors are collected in a temporary file instead of memory. The folder is read again before it gets its name. Raises as
    `export_safetensors`.
    """
    from torch.distributed import checkpoint as dcp

    manifest, to = full_manifest(path), Path(to)
    with _new_folder(to) as folder:
        scratch = folder.with_name(f"{folder.name}.scratch")
        try:
            state = dict(_on_disk(manifest, scratch=scratch)) | _small_state(manifest)
            state |= {f"model.{tied}": state[f"model.{name}"] for tied, name in manifest.tied.items()}
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True), no_dist=True)
            _check_distributed(folder, state=state)
        finally:
            scratch.unlink(missing_ok=True)
    files = list(to.iterdir())
    return ExportReport(path=to, files=len(files), nbytes=sum(file.stat().st_size for file in files))


def _check_distributed(folder: Path, *, state: Mapping[str, object]) -> None:
    """Reads the folder of `dcp.save` in parts, and compares it with `state`. Raises CheckpointError if a value differs."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException

    for keys in _parts(state):
        found = {key: _emptied(state[key]) for key in keys}
        try:
            dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(
                f"{folder}: cannot be read again, {reason_of(error)}: write it again on another disk"
            ) from None
        for key in keys:
            if not _are_same(found[key], other=state[key]):
                raise CheckpointError(
                    f"{folder}: {key} differs from its value before the write: write it again on another disk"
                )


def _parts(state: Mapping[str, object]) -> Iterator[list[str]]:
    """Yields the keys in parts of `_READ_BYTES`, or of one larger value."""
    part, nbytes = [], 0
    for key, value in state.items():
        size = value.nbytes if isinstance(value, Tensor) else 0
        if part and nbytes + size > _READ_BYTES:
            yield part
            part, nbytes = [], 0
        part.append(key)
        nbytes += size
    if part:
        yield part


def _emptied(value: Any) -> Any:
    """Returns lists and mappings of the same form, with tensors of zeros and None in place of other values."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, Mapping):
        return {key: _emptied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_emptied, value))
    return None


def _are_same(value: Any, *, other: Any) -> bool:
    """Returns whether two values have the same bits in all their tensors, and equal other parts."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return _is_same(value, other=other)
    if type(value) is not type(other):
        return False
    if isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_are_same(value[key], other=inner) for key, inner in other.items())
    if isinstance(other, list | tuple | deque):
        return len(value) == len(other) and all(
            _are_same(one, other=inner) for one, inner in zip(value, other, strict=True)
        )
    return value == other or (isinstance(other, float) and math.isnan(value) and math.isnan(other))


def _small_state(manifest: Manifest) -> dict[str, object]:
    """Returns the small state of torch's optimizers: everything except tensors of the parameters' shapes. All states of an optimizer of
    full parameters."""
    if manifest.state_names is None:
        return {}
    if manifest.torch_optimizer is not None and "whole" in manifest.torch_optimizer:
        with StateReader(manifest) as reader:
            states = states_of_parameters(manifest, reader=reader)
        return {f"optim.state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    if manifest.torch_optimizer is not None:
        return {
            f"optim.state.{name}.{key}": value
            for entry in manifest.torch_optimizer["parameters"]
            for name in entry["params"]
            for key, value in decode_all(entry["scalars"]).items()
        }
    steps, missed = float(manifest.control.get("step", manifest.step)), manifest.missed_updates
    trained = [info.name for info in manifest.parameters if info.trainable]
    small: dict[str, object] = {
        f"optim.state.{name}.step": torch.tensor(steps - missed.get(name, 0)) for name in trained
    }
    if groups := torch_param_groups(manifest.groups or []):
        small["optim.param_groups"] = groups
    return small


def _on_disk(manifest: Manifest, *, scratch: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, full tensor) of weights, buffers and moments, stored in a memory-mapped file."""
    wanted = [(BUFFER, info, f"model.{info.name}") for info in manifest.buffers]
    for info in manifest.parameters:
        wanted.append((MASTER if info.trainable else FROZEN, info, f"model.{info.name}"))
        if info.trainable:
            kinds = manifest.state_names or ()
            wanted += [(kind, info, f"optim.state.{info.name}.{kind}") for kind in kinds]
    nbytes = sum(
        8 * prod(info.shape) for _, info, _ in wanted
    )  # 8: the itemsize of the widest dtype; every tensor is aligned
    memory, offset = torch.from_file(str(scratch), shared=True, size=max(nbytes, 1), dtype=torch.uint8), 0
    with StateReader(manifest) as reader:
        for kind, info, key in wanted:
            dtype = reader.dtype(name=info.name, kind=kind)
            numel = prod(info.shape)
            flat = memory[offset : offset + numel * dtype.itemsize].view(dtype)
            for start in range(0, numel, RANGE_ELEMENTS):
                stop = min(start + RANGE_ELEMENTS, numel)
                flat[start:stop].copy_(reader.read(name=info.name, kind=kind, start=start, stop=stop))
            offset += 8 * numel
            yield key, flat.view(info.shape)


def full_manifest(path: str | os.PathLike, *, is_merged: bool = False) -> Manifest:
    """Reads the manifest and checks that the checkpoint contains all parameters.

    is_merged: the export merges adapters into their base. Parameters that the checkpoint leaves out are then added from its base.

    Raises:
        CheckpointError: it contains only the trained parameters, or its base is not there.
    """
    manifest = read_manifest(resolve(path))
    if manifest.left_out and not (is_merged and merges(manifest)):
        raise CheckpointError(
            f"{manifest.path} contains only the trained parameters and lacks {len(manifest.left_out)} frozen ones such as "
            f"{manifest.left_out[0]}: export it merged, as safetensors or GGUF, or with --adapter"
        )
    base = _base_of(manifest)
    return manifest if base is None else _with_base(manifest, base=base)


def _base_of(manifest: Manifest) -> SafetensorsSource | None:
    """Returns the weights of the recorded base, or None if the checkpoint has all weights. Raises CheckpointError if they are not there."""
    if not manifest.left_out:
        return None
    named = ((manifest.model or {}).get("adapters") or {}).get("default", {}).get("base_model_name_or_path")
    files = weight_files(named) if isinstance(named, str) and os.path.isabs(named) and os.path.isdir(named) else []
    if not files:
        raise CheckpointError(
            f"{manifest.path} has adapters of the base {named}, which is no folder with safetensors files: copy the base there, or use "
            "--adapter"
        )
    source = SafetensorsSource(files)
    if lacking := [name for name in manifest.left_out if not source.has(name)]:
        raise CheckpointError(
            f"{manifest.path}: the base {named} lacks {lacking[0]} and {len(lacking) - 1} more: it is another model, or use --adapter"
        )
    return source


def _with_base(manifest: Manifest, *, base: SafetensorsSource) -> Manifest:
    """Returns the manifest with the parameters that the checkpoint leaves out; `left_out` still names them."""
    shapes, dtype = base.shapes(), manifest.parameters[0].dtype
    frozen = [
        TensorInfo(name=name, shape=list(shapes[MASTER, name]), dtype=dtype, trainable=False)
        for name in manifest.left_out
    ]
    return replace(manifest, parameters=[*frozen, *manifest.parameters])


def _is_same(value: Tensor, *, other: Tensor) -> bool:
    """Returns whether two tensors have the same bytes, dtype and shape."""
    if value.dtype is not other.dtype or value.shape != other.shape:
        return False
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (value, other)))


@contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `to` at the end and removed after an error.

    Raises:
        ValueError: `to` exists.
    """
    temporary = _temporary_beside(to)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        os.rename(temporary, to)
        sync_folder(to.parent)
    except BaseException:
        discard(temporary, token="")
        raise


@contextmanager
def new_file(to: Path) -> Iterator[Path]:
    """Yields a temporary path whose file is renamed to `to` at the end and removed after an error.

    Raises:
        ValueError: `to` exists.
    """
    temporary = _temporary_beside(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.rename(temporary, to)
    finally:
        temporary.unlink(missing_ok=True)


def _write_json(path: Path, *, value: object) -> None:
    write_file(path, data=json.dumps(value, indent=2).encode())


def _temporary_beside(to: Path) -> Path:
    if to.exists():
        raise ValueError(f"{to} exists; name another place, or remove it first")
    return to.with_name(f"{to.name}.tmp-{secrets.token_hex(4)}")


def files_of(sizes: Sequence[int], *, limit: int | None, stem: str, ending: str) -> dict[str, list[int]]:
    """Distributes consecutive tensors over files of at most `limit` bytes, or one file for None. A larger tensor gets its own file.

    sizes: bytes of the tensors. Returns the files' names in the layout of the Hugging Face hub -> positions in `sizes`.
    """
    groups: list[list[int]] = [[]]
    filled = 0
    for number, nbytes in enumerate(sizes):
        if limit is not None and groups[-1] and filled + nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += nbytes
    if len(groups) == 1:
        return {f"{stem}.{ending}": groups[0]}
    return {f"{stem}-{i + 1:05d}-of-{len(groups):05d}.{ending}": group for i, group in enumerate(groups)}
