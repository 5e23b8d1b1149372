"""`tp_model_init`: a script says beside the configuration over how many ranks the layers of its model are cut."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.deepspeed.config import DeepSpeedConfigError, Settings, read_source


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    tp_size: int
    dtype: torch.dtype


_asked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # model -> _Asked


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: object = None, tp_group: None = None
) -> nn.Module:
    """Remembers for `initialize(model=model, ...)` that `tp_size` ranks share its layers, in `dtype`; returns the model as it is.

    config: accepted; `initialize` is given the configuration, and both must say the same.
    Raises ValueError for a process group: neighbouring ranks share a model.
    """
    del config
    if tp_group is not None:
        raise ValueError("tp_group: tp_size says which ranks work together; leave it out")
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size}: must be 1 or more")
    _asked[model] = _Asked(tp_size=tp_size, dtype=dtype)
    return model


def with_asked_degree(source: object, *, model: nn.Module) -> object:
    """`initialize`'s configuration, completed by what `tp_model_init` was told of the model.

    Raises DeepSpeedConfigError if it says another number of ranks.
    """
    asked = _asked.get(model)
    if asked is None:
        return source
    given = read_source(source)
    section = dict(given.get("tensor_parallel") or {})
    inner = section.get("tp") or {}
    sizes = {section.get("autotp_size", 1), section.get("tp_size", 1), inner.get("tp_size", 1)} - {0, 1}
    if sizes - {asked.tp_size}:
        raise DeepSpeedConfigError(
            [
                f"tensor_parallel: {sorted(sizes)} ranks here, and {asked.tp_size} in tp_model_init; let both say the same"
            ]
        )
    if asked.tp_size > 1 and not sizes:
        given["tensor_parallel"] = section | {"autotp_size": asked.tp_size}
    return given


def check_asked_dtype(model: nn.Module, *, settings: Settings) -> None:
    """Raises DeepSpeedConfigError if `tp_model_init` was told of another dtype."""
    asked = _asked.get(model)
    if asked is not None and asked.dtype != settings.precision.dtype:
        raise DeepSpeedConfigError(
            [
                f"the configuration trains in {settings.precision.dtype}, and tp_model_init was given dtype={asked.dtype}; let both say the "
                "same, by the sections fp16 and bf16"
            ]
        )
