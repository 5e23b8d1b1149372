"""Reads LoRA adapters from folders of peft, and from ztk's runs and checkpoints with `lora=adapter`."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ztk.checkpoint.architecture import scale_of
from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.export import Weights
from ztk.checkpoint.folder import resolve
from ztk.checkpoint.manifest import read_manifest
from ztk.nn.low_rank import Adapter, LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's files
_PREFIX = "base_model.model."  # of the names in peft's files
_PARTS = re.compile(r"^(.+)\.lora_([AB])(?:\.default)?\.weight$")
# Fields of adapter_config.json. Adapters with other values have weights other than two matrices per linear layer.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "target_parameters"), ([], None)),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "alora_invocation_tokens"), (None,)),
}

_KEEP_BASE = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "mica",
    "orthogonal",
)  # init_lora_weights that leave the base as it is


def read_adapter(path: str | os.PathLike) -> Adapter:
    """Reads the adapter in `path`: a peft folder, a run folder, or a checkpoint.

    Raises:
        CheckpointError: no adapter, an incomplete one, or one with other weights than two matrices per linear layer.
    """
    folder = Path(path)
    if (folder / CONFIG).is_file():
        return _of_peft(folder)
    try:
        step = resolve(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} has neither {CONFIG} nor a checkpoint: name a folder that peft has saved, or a run with lora=adapter"
        ) from error
    return _of_checkpoint(step)


def _of_peft(folder: Path) -> Adapter:
    config = _config(folder)
    for name, plain in _PLAIN.items():
        if name in config and config[name] not in plain:
            raise CheckpointError(
                f"{folder / CONFIG}: {name}={config[name]!r} is more than two matrices next to linear layers; merge the adapter into its base"
            )
    if (initial := config.get("init_lora_weights")) not in _KEEP_BASE:
        raise CheckpointError(
            f"{folder / CONFIG}: init_lora_weights={initial!r} has changed the weights of its base, so it fits no others; save it with "
            "path_initial_model_for_weight_conversion, or merge it into its base"
        )
    try:
        state = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read ({error}): save the adapter again") from error
    scale = _peft_scale(config, folder=folder)
    return _paired({name.removeprefix(_PREFIX): value for name, value in state.items()}, scale=scale, folder=folder)


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} is no JSON ({error}): save the adapter again") from error
    if not isinstance(found, dict) or not isinstance(found.get("lora_alpha"), int | float):
        raise CheckpointError(f"{folder / CONFIG} has no number lora_alpha: name a folder with a LoRA adapter")
    return found


def _peft_scale(config: dict[str, Any], *, folder: Path) -> Callable[[str, int], float]:
    """Returns a function that returns the scale of a layer and its rank: alpha / rank, or alpha / sqrt(rank) with `use_rslora`.

    Patterns override alpha.
    """
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{folder / CONFIG}: alpha_pattern must map names to numbers")

    def scale(layer: str, rank: int) -> float:
        own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
        return next(own, config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scale


def _of_checkpoint(step: Path) -> Adapter:
    manifest = read_manifest(step)
    names = [info.name for info in manifest.parameters if _PARTS.match(info.name)]
    if not names:
        raise CheckpointError(f"{step} has no adapter: name a run that was trained with lora=adapter")
    weights = Weights(manifest, dtype=torch.float32, names=dict(zip(names, names, strict=True)))
    try:
        state = {name: weights.full(name) for name in names}
    finally:
        weights.close()
    scale = scale_of(manifest)
    named = {name.removeprefix(_PREFIX): value for name, value in state.items()}
    return _paired(named, scale=lambda layer, rank: scale, folder=step)


def _paired(state: dict[str, Tensor], *, scale: Callable[[str, int], float], folder: Path) -> Adapter:
    """Returns both matrices of every layer. Raises CheckpointError for another tensor, and for matrices of different layers."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        match = _PARTS.match(name)
        if match is None:
            raise CheckpointError(f"{folder}: {name} is no matrix of an adapter next to a linear layer")
        parts.setdefault(match[1], {})[match[2]] = value
    if not parts:
        raise CheckpointError(f"{folder}: the adapter has no layer; save it again")
    return {layer: _pair(layer, own=own, scale=scale, folder=folder) for layer, own in parts.items()}


def _pair(layer: str, *, own: dict[str, Tensor], scale: Callable[[str, int], float], folder: Path) -> LowRank:
    if missing := [part for part in "AB" if part not in own]:
        raise CheckpointError(f"{folder}: {layer}.lora_{missing[0]}.weight is missing; save the adapter again")
    down, up = own["A"], own["B"]
    is_finite = bool(down.isfinite().all() and up.isfinite().all())
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1] or not is_finite:
        shapes = f"{list(up.shape)} times {list(down.shape)}"
        raise CheckpointError(
            f"{folder}: {layer} is no finite product of two matrices ({shapes}); save the adapter again"
        )
    return LowRank(down=down, up=up, scale=scale(layer, down.shape[0]))
