"""The description of a model in a checkpoint, and its Hugging Face names and configuration.

A checkpoint's `model` is None or a dictionary with at most one of the first two keys:

    "decoder": the DecoderConfig of a native decoder
    "transformers": the configuration of a model whose config has `to_json_string`, such as transformers models
    "adapters": name -> configuration of each adapter, in peft's format
    "generation": generation_config.json of the folder that the model was loaded from
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

import torch
from torch import nn

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.folder import resolve
from ztk.checkpoint.llama import TO_LLAMA, is_llama, llama_config
from ztk.checkpoint.manifest import Manifest, read_manifest
from ztk.nn import Decoder
from ztk.nn.lora import is_adapter

_PEFT = "base_model.model."  # peft adds this prefix; ztk.nn.lora keeps the model's names


def describe_model(module: nn.Module) -> dict[str, Any] | None:
    """Returns the `model` entry for `module`; see the docstring of this file."""
    found: dict[str, Any] = {}
    if isinstance(module, Decoder):
        found["decoder"] = asdict(module.config)
    elif isinstance(
        exported := getattr(module, "exported_config", None), Mapping
    ):  # the configuration of the folder that the model was loaded from
        found["transformers"] = dict(exported)
        if generation := getattr(module, "exported_generation", None):
            found["generation"] = generation
    elif hasattr(config := getattr(module, "config", None), "to_json_string"):
        found["transformers"] = json.loads(config.to_json_string())
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        found["transformers"]["architectures"] = [type(base).__name__]
    adapters = getattr(module, "peft_config", None)
    if isinstance(adapters, Mapping) and all(hasattr(adapter, "to_dict") for adapter in adapters.values()):
        found["adapters"] = {name: _plain(adapter.to_dict()) for name, adapter in adapters.items()}
    return found or None


def has_adapters(path: str | os.PathLike) -> bool:
    """Returns whether the checkpoint in `path` (as for `load`) has adapters. Raises CheckpointError if there is no checkpoint."""
    return any(is_adapter(info.name) for info in read_manifest(resolve(path)).parameters)


def leaves_out_base(path: str | os.PathLike) -> bool:
    """Returns whether the checkpoint in `path` (as for `load`) has only trained parameters.

    Raises CheckpointError if there is no checkpoint.
    """
    return bool(read_manifest(resolve(path)).left_out)


def adapter_scale(path: str | os.PathLike) -> float | None:
    """Returns alpha / rank, the factor on an adapter's product of matrices, or None if the checkpoint in `path` (as for `load`) has no
    adapters.

    Raises CheckpointError if there is no checkpoint.
    """
    manifest = read_manifest(resolve(path))
    return scale_of(manifest) if any(is_adapter(info.name) for info in manifest.parameters) else None


def scale_of(manifest: Manifest) -> float:
    """Returns alpha / rank of the adapters in the checkpoint with this manifest."""
    described = (manifest.model or {})["adapters"]["default"]
    return described["lora_alpha"] / described["r"]


def merges(manifest: Manifest) -> bool:
    """Returns whether an export merges the checkpoint's adapters: ztk's own, not the ones of peft in a model of a script's."""
    return "decoder" in (manifest.model or {}) or any(
        is_adapter(info.name) and not info.name.startswith(_PEFT) for info in manifest.parameters
    )


def is_turned(manifest: Manifest) -> bool:
    """Returns whether the layers with adapters store their weights as [in, out], as in GPT-2."""
    return bool((manifest.model or {})["adapters"]["default"].get("fan_in_fan_out"))


def transformers_view(manifest: Manifest, *, dtype: torch.dtype) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Returns (own name -> exported name, config.json or None) of a checkpoint. dtype: the weights' dtype in config.json.

    A model with adapters of peft has no config.json, because it has peft's names, which no transformers model uses.
    """
    model, names = manifest.model or {}, [info.name for info in [*manifest.parameters, *manifest.buffers]]
    rename = TO_LLAMA if "decoder" in model and is_llama(model["decoder"]) else {}
    if rename:
        config = llama_config(model["decoder"])
    elif "decoder" in model:
        config = {"model_type": "ztk_decoder", **model["decoder"]}
    else:
        config = model.get("transformers") if "adapters" not in model or merges(manifest) else None
    if config is not None:  # transformers before 5 reads torch_dtype
        config = config | dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
    return {name: renamed(name, rename=rename) for name in names}, config


def adapter_view(manifest: Manifest, *, adapter: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns (own name -> name in `adapter_model.safetensors`, `adapter_config.json`).

    Raises:
        CheckpointError: there is no such adapter, or it belongs to ztk's decoder.
    """
    configs = (manifest.model or {}).get("adapters") or {}
    if "decoder" in (manifest.model or {}) and configs:
        raise CheckpointError(
            f"{manifest.path} has adapters of ztk's decoder, which peft does not have: export it without --adapter, merged"
        )
    if adapter not in configs:
        has = f"it has {', '.join(configs)}" if configs else "its model had no adapter of peft"
        raise CheckpointError(f"{manifest.path} has no adapter {adapter!r}: {has}")
    # base_model.model.x.lora_A.default.weight and x.modules_to_save.default.weight are stored as x.lora_A.weight and x.weight
    pattern = re.compile(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)")
    names = {info.name: pattern.sub("", info.name) for info in manifest.parameters if pattern.search(info.name)}
    heads = tuple(
        f"{module}." for module in configs[adapter].get("modules_to_save") or ()
    )  # ztk's adapters make no copy of these modules
    names |= {info.name: info.name for info in manifest.parameters if heads and info.name.startswith(heads)}
    names = {own: name if name.startswith(_PEFT) else _PEFT + name for own, name in names.items()}
    return names, configs[adapter] | {"inference_mode": True}


def renamed(name: str, *, rename: Mapping[str, str]) -> str:
    """Applies all replacements to `name`, in order. rename: regular expression -> replacement."""
    for pattern, replacement in rename.items():
        name = re.sub(pattern, replacement, name)
    return name


def _plain(value: Any) -> Any:
    """Converts the value for JSON: sets to sorted lists, enum members to their values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value
