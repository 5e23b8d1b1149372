"""`from_pretrained` at stage 3: every rank reads its own slices of the safetensors files.

transformers reads the full checkpoint into every rank's memory and distributes it module by module from rank 0. With ztk, a sharded
parameter is filled in place: a rank reads 1/n of the bytes and never holds a full parameter. Parameters that the checkpoint stores in
another form than the model (separate experts, fused projections) are an exception and are converted one group at a time. Values get the
same dtype as in transformers.
"""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.hf.slices import SafetensorsSlices, TensorSlice
from ztk.zero.parameters.partitioned import partitioned_of

logger = logging.getLogger(__name__)

_CORE = "transformers.core_model_loading"
_DEACTIVATE_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  # model -> bytes


def read_slices(modeling_utils: ModuleType) -> None:
    """Replaces the loading functions. modeling_utils: the module transformers.modeling_utils."""
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
    _read[model] = source.nbytes
    return info


def names_in_model(
    entries: dict[str, TensorSlice], *, model: nn.Module, targets: dict, mapping: list | None
) -> tuple[dict[str, TensorSlice], dict[str, dict[str, TensorSlice]]]:
    """Splits the file's entries: (model's name -> entry of tensors that are at most renamed, model's name -> entries to be converted into
    it).

    Entries without a place in the model are in neither.

    targets: the model's state_dict. mapping: transformers' conversions.
    """
    core: Any = importlib.import_module(_CORE)
    plain, others = _by_name(entries, model=model, targets=targets, mapping=mapping, core=core)
    renamings, converters = _transforms(mapping, core=core)
    converted: dict[str, dict[str, TensorSlice]] = {}
    for key, entry in others.items():
        name, _ = core.rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if name in targets:
            converted.setdefault(name, {})[key] = entry
        else:
            logger.warning("%s has no place in the model", key)
    return plain, converted


def converted_values(entries: dict[str, TensorSlice], *, model: nn.Module, mapping: list) -> dict[str, Tensor]:
    """Converts `entries` with transformers' rules: model's name -> values in the shape of the parameter. Does not change the model."""
    core: Any = importlib.import_module(_CORE)
    found: dict[str, Tensor] = {}

    def keep(model, target_name, param_value, loading_info, *args, **kwargs):
        found[target_name] = param_value

    load_config = importlib.import_module("transformers.modeling_utils").LoadStateDictConfig(weight_mapping=mapping)
    with _replaced(core, keep), _without_progress_bars():
        _convert_lazily(entries, model=model, load_config=load_config, core=core)
    return found


def read_bytes(model: nn.Module) -> int | None:
    """Returns the bytes that this rank read from files for `model`, or None if it was not loaded by slices."""
    return _read.get(model)


def _can_slice(model: nn.Module, *, files: list[str] | None) -> bool:
    safetensors = bool(files) and all(str(file).endswith(".safetensors") for file in files)
    return safetensors and any(partitioned_of(parameter) is not None for parameter in model.parameters())


def _by_name(
    entries: dict[str, TensorSlice], *, model: nn.Module, targets: dict, mapping: list | None, core: ModuleType
) -> tuple[dict[str, TensorSlice], dict[str, TensorSlice]]:
    """Returns (model's name -> entry for tensors that are at most renamed, file's name -> entry for the others).

    transformers converts or reports the others.
    """
    renamings, converters = _transforms(mapping, core=core)
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


def _transforms(mapping: list | None, *, core: Any) -> tuple[list, list]:
    """Returns (renamings, converters), each in order."""
    mapping = mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    return renamings, [entry for entry in mapping if isinstance(entry, core.WeightConverter)]


def _convert(entries: dict[str, TensorSlice], *, model: nn.Module, load_config: object, core: Any) -> Any:
    """Converts `entries` with transformers' code, one group in memory at a time. The returned report lists all other tensors as
    missing.
    """
    with _filling(core):
        return _convert_lazily(entries, model=model, load_config=load_config, core=core)


def _convert_lazily(entries: dict[str, TensorSlice], *, model: nn.Module, load_config: object, core: Any) -> Any:
    lazy = {key: _Lazy(entry) for key, entry in entries.items()}
    with _without_threads():
        info, _ = core.convert_and_load_state_dict_in_model(
            model=model, state_dict=lazy, load_config=load_config, disk_offload_index=None
        )
    return info


class _Lazy:
    """Represents a slice of a safetensors file in transformers' code."""

    def __init__(self, entry: TensorSlice) -> None:
        self._entry = entry

    def __getitem__(self, index: object) -> Tensor:
        # pyrefly: ignore[bad-index]  # the index of a slice of a file
        return self._entry.full()[index]


@contextmanager
def _filling(core: Any) -> Iterator[None]:
    """Writes the values that transformers would assign to the model's parameters into their shards."""
    original = core.set_param_for_module

    def set_param_for_module(model, target_name, param_value, loading_info, *args, **kwargs):
        target = model.state_dict(keep_vars=True).get(target_name)
        if not isinstance(target, nn.Parameter) or param_value.shape != target.shape:
            original(model, target_name, param_value, loading_info, *args, **kwargs)
        else:
            loading_info.missing_keys.discard(target_name)
            _fill(target, entry=param_value)

    with _replaced(core, set_param_for_module):
        yield


@contextmanager
def _replaced(core: Any, function: Callable) -> Iterator[None]:
    """Makes transformers call `function` for each converted parameter."""
    original = core.set_param_for_module
    core.set_param_for_module = function
    try:
        yield
    finally:
        core.set_param_for_module = original


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disables progress bars: transformers would draw one per group of weights."""
    library: Any = importlib.import_module("transformers.utils.logging")
    were_drawn = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if were_drawn:
            library.enable_progress_bar()


@contextmanager
def _without_threads() -> Iterator[None]:
    """Disables reading ahead by threads, which has no limit and could load the full checkpoint."""
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
    """Writes a parameter or buffer and marks it as initialized, because transformers initializes unmarked ones."""
    partitioned = partitioned_of(target)
    if partitioned is not None:
        partitioned.fill(
            entry.read if isinstance(entry, TensorSlice) else lambda start, stop: entry.reshape(-1)[start:stop]
        )
    else:
        target.copy_(entry.full() if isinstance(entry, TensorSlice) else entry)
    # pyrefly: ignore[missing-attribute]  # transformers' mark
    target._is_hf_initialized = True
