"""`checkpoint`: loads a model's weights from files, before it is cut or streamed.

Accepts a folder of `save_pretrained` (read by the Hugging Face model's class), a folder of `save_checkpoint`, or files of state dicts in
DeepSpeed's form {"checkpoints": [...], "base_dir": ...}, as a dict or a JSON file.
"""

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.sources import load_plain
from ztk.deepspeed.config import read_source
from ztk.deepspeed.zero_to_fp32 import LazyTensor, get_fp32_state_dict_from_zero_checkpoint

_LIST = ("checkpoints", "base_dir", "type", "version", "parallelization", "mp_size")
_FIXES = "give a folder of save_pretrained or save_checkpoint, a file of weights, or {'checkpoints': [files]}"
_FULL = (None, "pp", "non_tp")  # DeepSpeed's names for files with full weights


def load_weights(model: nn.Module, *, checkpoint: object, base_dir: str = "") -> None:
    """Fills `model`, which may be on the meta device and is on the CPU afterwards. Every rank reads the files.

    Raises ValueError if the files lack a parameter, have it in another shape, or contain others.
    """
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta:
        model.to_empty(device="cpu")
        if hasattr(model, "tie_weights"):
            # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
            model.tie_weights()
    folder = Path(base_dir) / checkpoint if isinstance(checkpoint, (str, os.PathLike)) else None
    if folder is not None and (folder / "config.json").is_file() and _is_pretrained(model):
        # pyrefly: ignore[missing-attribute]  # _is_pretrained has looked
        loaded = type(model).from_pretrained(folder, config=copy.deepcopy(model.config))
        _copy_all(loaded, to=model)
        return
    if on_meta and (lost := _buffers_of_no_file(model)):
        raise ValueError(
            f"checkpoint: the model was built on the meta device, and its buffer {lost[0]} is in no file of weights: build the model on the "
            "CPU, or give a folder that from_pretrained reads"
        )
    _fill(model, states=_states(checkpoint, folder=folder, base_dir=base_dir))


def _is_pretrained(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


@torch.no_grad()
def _copy_all(source: nn.Module, *, to: nn.Module) -> None:
    """Copies parameters and buffers, including those that no file contains."""
    named = dict(source.named_parameters()) | dict(source.named_buffers())
    for name, tensor in (*to.named_parameters(), *to.named_buffers()):
        tensor.copy_(named[name])


def _buffers_of_no_file(model: nn.Module) -> list[str]:
    kept = model.state_dict()
    return [name for name, _ in model.named_buffers() if name not in kept]


def _states(checkpoint: object, *, folder: Path | None, base_dir: str) -> Iterator[Mapping[str, Tensor | LazyTensor]]:
    """Yields state dicts, one file in memory at a time."""
    if folder is not None and (folder / "latest").is_file():
        yield get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
        return
    if folder is not None and folder.suffix == ".json" and folder.is_file():
        listed = read_source(str(folder))
        if "weight_map" in listed:  # an index of sharded safetensors files
            listed = {"checkpoints": sorted(set(listed["weight_map"].values()))}
        yield from map(_read, _files(listed, base=Path(base_dir) if base_dir else folder.parent))
    elif folder is not None:
        if not folder.is_file():
            raise ValueError(f"checkpoint={str(folder)!r}: is no file of weights and no such folder; {_FIXES}")
        yield _read(folder)
    else:
        yield from map(_read, _files(checkpoint, base=Path(base_dir)))


def _files(listed: Mapping[str, object], *, base: Path) -> list[Path]:
    """Returns the files of DeepSpeed's list. Raises ValueError for weights that are cut over ranks."""
    if unknown := sorted(set(listed) - set(_LIST)):
        raise ValueError(f"checkpoint.{unknown[0]}: there is no such key; {_FIXES}")
    names = listed.get("checkpoints")
    if isinstance(names, Mapping) and set(names) == {"non_tp"}:
        names = names["non_tp"]
    if listed.get("parallelization") not in _FULL or isinstance(names, Mapping):
        raise ValueError("checkpoint: holds weights that are cut over ranks; give files with full ones")
    if not isinstance(names, (list, tuple)) or not names:
        raise ValueError(f"checkpoint.checkpoints={names!r}: must be a list of files; {_FIXES}")
    base = base / listed.get("base_dir", "")
    missing = [str(base / name) for name in names if not (base / name).is_file()]
    if missing:
        raise ValueError(f"checkpoint: there is no file {missing[0]!r}")
    return [base / name for name in names]


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        state = load_plain(file)
    except CheckpointError as error:
        raise ValueError(f"checkpoint: {error}") from error
    for wrapper in ("module", "model"):  # files of DeepSpeed and Megatron contain more than weights
        if isinstance(state.get(wrapper), dict):
            return state[wrapper]
    return state


@torch.no_grad()
def _fill(model: nn.Module, *, states: Iterable[Mapping[str, Tensor | LazyTensor]]) -> None:
    targets = model.state_dict(keep_vars=True)
    filled: set[int] = set()
    for state in states:
        for name, value in state.items():
            target = targets.get(name)
            if target is None:
                raise ValueError(f"checkpoint: {name} is no parameter of {type(model).__name__}")
            if tuple(target.shape) != tuple(value.shape):
                raise ValueError(f"checkpoint: {name} is {tuple(value.shape)}, the model's is {tuple(target.shape)}")
            target.copy_(value.contiguous())
            filled.add(id(target))
    missing = [name for name, target in targets.items() if id(target) not in filled]
    if missing:
        raise ValueError(f"checkpoint: {missing[0]} is in none of the files ({len(missing)} such names)")
