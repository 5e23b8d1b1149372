"""Full fp32 weights from a checkpoint folder of ztk or of DeepSpeed (ZeRO stages 1 to 3), without an engine and without GPUs.

    state = get_fp32_state_dict_from_zero_checkpoint("checkpoints")
    python zero_to_fp32.py checkpoints weights          # the script that every save leaves next to the checkpoints

Buffers have the dtype of the file.
"""

import argparse
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from ztk.checkpoint.deepspeed import DeepSpeedSource
from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.export import RANGE_ELEMENTS, files_of
from ztk.checkpoint.folder import read_pointer, resolve, usable
from ztk.checkpoint.manifest import BUFFER, Manifest, read_manifest
from ztk.checkpoint.reader import StateReader
from ztk.core.precision.names import DTYPES
from ztk.deepspeed.tools import device
from ztk.deepspeed.tools.log import logger
from ztk.optim.states import FROZEN, MASTER

SCRIPT = "zero_to_fp32.py"  # its name next to the checkpoints
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LazyTensor:
    """A tensor that is not loaded yet; `contiguous()` reads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: Callable[[], Iterator[Tensor]]  # flat, in order

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def contiguous(self) -> Tensor:
        """Reads the tensor into main memory, in its own shape. Raises CheckpointError for damaged files."""
        full, done = torch.empty(prod(self.shape), dtype=self.dtype), 0
        for values in self.ranges():
            full[done : done + values.numel()] = values
            done += values.numel()
        return full.view(self.shape)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor | LazyTensor]:
    """Returns name -> fp32 weight in its full shape, including persistent buffers and tied names. Non-floating buffers keep their dtype.

    checkpoint_dir: the folder that was given to `save_checkpoint`. tag: defaults to the content of its file `latest`.
    lazy_mode: reads a value when its `contiguous()` is called, so that the values need not be in memory together.

    Raises ValueError without `latest`, FileNotFoundError without the tag's folder, and CheckpointError for damaged files and for a
    `latest` that names no checkpoint.
    """
    state = _open(_tag_folder(Path(checkpoint_dir), tag=tag), exclude_frozen=exclude_frozen_parameters)
    return state if lazy_mode else _read(state, dtype=torch.float32)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike, tag: str | None = None
) -> nn.Module:
    """Moves `model` to the CPU, loads the fp32 weights into it and returns it. Values that the checkpoint lacks do not change.

    Not for an engine's model.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike,
    output_dir: str | os.PathLike,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights as files of torch.save, or of safetensors, in the layout of the Hugging Face hub.

    dtype: dtype of floating-point weights, which is float32, float16 or bfloat16. max_shard_size: bytes, or a text such as "5GB", or None
    for one file. It also bounds the memory in use. A safetensors file has tied weights under their first name only.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters, lazy_mode=True
    )
    if safe_serialization:
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        state = {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    named = list(tied.values())  # tied names are in the same file
    sizes = [state[names[0]].nbytes for names in named]
    files = files_of(sizes, limit=_bytes(max_shard_size), stem=stem, ending=ending)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map, total = {}, 0
    for name, numbers in files.items():
        names = [key for number in numbers for key in named[number]]
        shard = _read({key: state[key] for key in names}, dtype=_dtype(dtype))
        _save(shard, path=folder / name, safe=safe_serialization)
        weight_map |= dict.fromkeys(names, name)
        total += sum(tensor.nbytes for tensor in {id(t): t for t in shard.values()}.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / f"{stem}.{ending}.index.json").write_text(text + "\n", encoding="utf-8")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike,
    output_dir: str | os.PathLike,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Runs `convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def leave_script(folder: Path) -> None:
    """Writes the runnable script into a folder of checkpoints."""
    path = folder / SCRIPT
    path.write_text(
        "#!/usr/bin/env python\n"
        '"""python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR: full fp32 weights from this folder. Needs ztk; see --help."""\n\n'
        "from ztk.deepspeed.zero_to_fp32 import main\n\n"
        'if __name__ == "__main__":\n'
        "    main()\n"
    )
    path.chmod(0o755)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line of DeepSpeed's script."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description="full fp32 weights out of a ZeRO checkpoint")
    parser.add_argument(
        "checkpoint_dir", help="the folder that was given to save_checkpoint, such as path/checkpoint-12"
    )
    parser.add_argument("output_dir", help="where to write pytorch_model.bin or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="the largest file, digits and a unit such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch.save")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint, such as global_step1; default: the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="say more")
    args = parser.parse_args(argv)
    if args.debug:
        logger.setLevel(logging.DEBUG)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )


def _tag_folder(folder: Path, *, tag: str | None) -> Path:
    if tag is None:
        pointer = folder / "latest"
        if not pointer.is_file():
            raise ValueError(f"{folder} has no file `latest`; give the tag of a checkpoint in it")
        tag = read_pointer(pointer)
    if not (folder / tag).is_dir():
        raise FileNotFoundError(f"the folder {folder / tag} does not exist; {usable(folder)}")
    return folder / tag


def _open(folder: Path, *, exclude_frozen: bool) -> dict[str, LazyTensor]:
    """Returns parameters and buffers in order, with tied names as the same object."""
    if any(folder.glob("*_optim_states.pt")):
        state, tied = _of_deepspeed(folder, exclude_frozen=exclude_frozen)
    elif any(folder.glob("*_model_states.pt")):
        raise CheckpointError(
            f"{folder} was saved by DeepSpeed without ZeRO: its *_model_states.pt hold the full weights"
        )
    else:
        state, tied = _of_ztk(folder, exclude_frozen=exclude_frozen)
    return state | {name: state[other] for name, other in tied.items() if other in state}


def _of_deepspeed(folder: Path, *, exclude_frozen: bool) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    source = DeepSpeedSource(folder)
    kinds = (MASTER, BUFFER) if exclude_frozen else (MASTER, FROZEN, BUFFER)
    state = {}
    for key, shape in source.shapes().items():
        if key[0] in kinds:
            own = next(iter(source.ranges(key)), torch.empty(0)).dtype
            dtype = torch.float32 if own.is_floating_point else own
            state[key[1]] = LazyTensor(shape=shape, dtype=dtype, ranges=partial(source.ranges, key))
    return state, source.tied


def _of_ztk(folder: Path, *, exclude_frozen: bool) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    manifest = read_manifest(resolve(folder))
    with StateReader(manifest) as reader:
        reader.check_files()
    kinds = {info.name: MASTER if info.trainable else FROZEN for info in manifest.parameters}
    if exclude_frozen:
        kinds = {name: kind for name, kind in kinds.items() if kind == MASTER}
    kinds |= {info.name: BUFFER for info in manifest.buffers}
    infos = {info.name: info for info in [*manifest.parameters, *manifest.buffers]}
    state = {}
    for name, kind in kinds.items():
        own, shape = DTYPES[infos[name].dtype], tuple(infos[name].shape)
        state[name] = LazyTensor(
            shape=shape,
            dtype=torch.float32 if own.is_floating_point else own,
            ranges=partial(_ranges, manifest, name=name, kind=kind, numel=prod(shape)),
        )
    return state, dict(manifest.tied)


def _ranges(manifest: Manifest, *, name: str, kind: str, numel: int) -> Iterator[Tensor]:
    with StateReader(manifest) as reader:
        for start in range(0, numel, RANGE_ELEMENTS):
            yield reader.read(name=name, kind=kind, start=start, stop=min(start + RANGE_ELEMENTS, numel))


def _read(state: dict[str, LazyTensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    full: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in full:
            value = tensor.contiguous()
            full[id(tensor)] = value.to(dtype) if value.is_floating_point() else value
    return {name: full[id(tensor)] for name, tensor in state.items()}


def _save(shard: dict[str, Tensor], *, path: Path, safe: bool) -> None:
    if safe:
        from safetensors.torch import save_file

        save_file(shard, path, metadata={"format": "pt"})
    else:
        torch.save(shard, path)


def _bytes(size: str | int | None) -> int | None:
    if size is None or isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", size.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"max_shard_size={size!r}: must be digits and a unit, such as 5GB")
    return int(found[1]) * _UNITS[found[2].upper()]


def _dtype(word: str | torch.dtype) -> torch.dtype:
    dtype = device.DTYPES.get(str(word).lower().removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype={word!r}: must be float32, float16 or bfloat16")
    return dtype


if __name__ == "__main__":
    main()
