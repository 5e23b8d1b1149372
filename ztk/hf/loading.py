"""`from_pretrained` at stage 3: every rank reads its own slices of the safetensors files.

transformers reads the full checkpoint into every rank's memory and distributes it module by module from rank 0. Here a parameter that was
built sharded is filled where its shard is stored: a rank reads 1/n of the bytes and never has a full parameter in memory. The exception
are parameters that the checkpoint stores in another form than the model (experts one by one, fused projections): they are converted one
group at a time.
"""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.hf.slices import SafetensorsSlices, TensorSlice
from ztk.zero.partitioned import partitioned_of

_CORE = "transformers.core_model_loading"
_DEACTIVATE_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  # model -> bytes


def complete(modeling_utils: ModuleType) -> None:
    """modeling_utils: transformers.modeling_utils."""
    original = modeling_utils.PreTrainedModel._load_pretrained_model

    @functools.wraps(original)
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        if state_dict is None and not load_config.is_quantized and _can_slice(model, files=checkpoint_files):
            return load_slices(model, files=checkpoint_files, load_config=load_config), None
        return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    modeling_utils.PreTrainedModel._load_pretrained_model = staticmethod(_load_pretrained_model)


def load_slices(model: nn.Module, *, files: list[str], load_config: Any) -> Any:
    """Fills `model`, which was built under zero.Init.

    load_config: transformers' LoadStateDictConfig. Returns transformers' LoadStateDictInfo: keys that were missing, unexpected or of
    another shape.
    """
    core = sys.modules[_CORE]
    targets = model.state_dict(keep_vars=True)
    source = SafetensorsSlices(files)
    with source as entries:
        plain, others = _by_name(entries, model=model, targets=targets, mapping=load_config.weight_mapping, core=core)
        info = _convert(others, model=model, load_config=load_config, core=core)
        for name, entry in plain.items():
            info.missing_keys.discard(name)
            if entry.shape != tuple(targets[name].shape):
                info.mismatched_keys.add((name, torch.Size(entry.shape), targets[name].shape))
            else:
                _fill(targets[name], entry=entry)
    _read[model] = source.counter.nbytes
    return info


def read_bytes(model: nn.Module) -> int | None:
    """What this rank read from files for `model`; None if it was not loaded by slices."""
    return _read.get(model)


def _can_slice(model: nn.Module, *, files: list[str] | None) -> bool:
    safetensors = bool(files) and all(str(file).endswith(".safetensors") for file in files)
    return safetensors and any(partitioned_of(parameter) is not None for parameter in model.parameters())


def _by_name(
    entries: dict[str, TensorSlice], *, model: nn.Module, targets: dict, mapping: list | None, core: ModuleType
) -> tuple[dict[str, TensorSlice], dict[str, TensorSlice]]:
    """(model's name -> entry for tensors that at most change their name, file's name -> entry for the others).

    transformers converts or reports the others.
    """
    mapping = mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, core.WeightConverter)]
    plain, others = {}, {}
    for key, entry in entries.items():
        name, pattern = core.rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if name not in targets and key in targets:
            name, pattern = key, None
        if pattern is None and isinstance(targets.get(name), Tensor):
            plain[name] = entry
        else:
            others[key] = entry
    return plain, others


def _convert(entries: dict[str, TensorSlice], *, model: nn.Module, load_config: object, core: Any) -> Any:
    """Converts `entries` with transformers' own code, one group in memory at a time. Its report lists all other tensors as missing."""
    lazy = {key: _Lazy(entry) for key, entry in entries.items()}
    with _without_threads(), _filling(core):
        info, _ = core.convert_and_load_state_dict_in_model(
            model=model, state_dict=lazy, load_config=load_config, disk_offload_index=None
        )
    return info


class _Lazy:
    """Stands for a slice of a safetensors file in transformers' code."""

    def __init__(self, entry: TensorSlice) -> None:
        self._entry = entry

    def __getitem__(self, index: object) -> Tensor:
        # pyrefly: ignore[bad-index]  # the index of a slice of a file
        return self._entry.full()[index]


@contextmanager
def _filling(core: ModuleType) -> Iterator[None]:
    """Values that transformers would put in place of the model's parameters are written into their shards instead."""
    original = core.set_param_for_module

    def set_param_for_module(model, target_name, param_value, loading_info, *args, **kwargs):
        target = model.state_dict(keep_vars=True).get(target_name)
        if not isinstance(target, nn.Parameter) or param_value.shape != target.shape:
            original(model, target_name, param_value, loading_info, *args, **kwargs)
        else:
            loading_info.missing_keys.discard(target_name)
            _fill(target, entry=param_value)

    # pyrefly: ignore[missing-attribute]  # replaces a function of the module
    core.set_param_for_module = set_param_for_module
    try:
        yield
    finally:
        # pyrefly: ignore[missing-attribute]  # replaces a function of the module
        core.set_param_for_module = original


@contextmanager
def _without_threads() -> Iterator[None]:
    """Threads read ahead without bound: the full checkpoint could end up in memory."""
    before = os.environ.get(_DEACTIVATE_THREADS)
    os.environ[_DEACTIVATE_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_DEACTIVATE_THREADS]
        if before is not None:
            os.environ[_DEACTIVATE_THREADS] = before


@torch.no_grad()
def _fill(target: Tensor, *, entry: TensorSlice | Tensor) -> None:
    """Writes a parameter or buffer and marks it as initialized; transformers initializes what is not marked."""
    partitioned = partitioned_of(target)
    if partitioned is not None:
        partitioned.fill(
            entry.read if isinstance(entry, TensorSlice) else lambda start, stop: entry.reshape(-1)[start:stop]
        )
    else:
        target.copy_(entry.full() if isinstance(entry, TensorSlice) else entry)
    # pyrefly: ignore[missing-attribute]  # transformers' mark
    target._is_hf_initialized = True
