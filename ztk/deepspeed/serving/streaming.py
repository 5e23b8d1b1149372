"""ZeRO-Inference: parameters are sharded in main memory or on a disk, and each layer's parameters are gathered while it runs."""

import functools
from collections.abc import Mapping

import torch
from torch import nn

from ztk.core.runtime import Process
from ztk.core.runtime.part import Part
from ztk.deepspeed.config import DeepSpeedConfigError, Settings, parse_config
from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.serving.config import DeepSpeedInferenceConfig
from ztk.deepspeed.start.build import Builder

_SECTIONS = {
    torch.float32: {},
    torch.float16: {"fp16": {"enabled": True, "auto_cast": False}},
    torch.bfloat16: {"bf16": {"enabled": True}},
}


def settings_of(config: DeepSpeedInferenceConfig, *, replicas: int) -> Settings | None:
    """Returns the section `zero` in the form of a training configuration, or None at stage 0, without sharding.

    replicas: number of data-parallel ranks. Raises DeepSpeedConfigError with every fault of the section.
    """
    if not config.zero:
        return None
    zero = {
        name: value for name, value in config.zero.items() if name != "offload_optimizer"
    }  # inference has no optimizer
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **_SECTIONS[config.dtype]}
    if config.aio:
        given["aio"] = dict(config.aio)
    faults = []
    if zero.get("stage", 0) in (1, 2):
        faults.append(
            f"zero.stage={zero['stage']}: shards optimizer states, which inference does not have; use stage 3, which shards parameters"
        )
    place = zero.get("offload_param")
    place = place.get("device", "none") if isinstance(place, Mapping) else "none"
    if not zero.get("stage") and place not in (None, "none"):  # otherwise nothing would be offloaded
        faults.append(f"zero.offload_param.device={place}: has no effect at stage 0; use stage 3")
    try:
        settings = parse_config(given, world_size=replicas)
    except DeepSpeedConfigError as error:
        faults += [fault.replace("zero_optimization", "zero") for fault in error.faults]
    if faults:
        raise DeepSpeedConfigError(faults)
    # pyrefly: ignore[unbound-name]  # unbound only with faults, which have raised
    return settings if settings.zero.stage == 3 else None


def notes_of(config: DeepSpeedInferenceConfig, *, settings: Settings | None) -> tuple[str, ...]:
    """Returns notes on settings without effect."""
    notes = [] if settings is None else [note.replace("zero_optimization", "zero") for note in settings.notes]
    if "offload_optimizer" in config.zero:
        notes.append("zero.offload_optimizer: there is no optimizer")
    return tuple(notes)


def stream(
    model: nn.Module, *, settings: Settings, process: Process, parts: Mapping[str, Part] | None
) -> DeepSpeedEngine:
    """Takes over the model's parameters, frozen and without optimizer states. A collective call.

    parts: this rank's parts of a model that is cut over tensor-parallel ranks.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    builder = Builder(model=model, settings=settings, process=process, trainable=frozenset(), parts=parts)
    engine, _ = builder.build(None)
    return DeepSpeedEngine(engine, builder=builder, optimizer=None, lr_scheduler=None, collate_fn=None)


def generate_in_step(model: nn.Module) -> None:
    """Makes `model.generate` continue until every rank has its text, because gathers are collective calls."""
    original = model.generate

    @functools.wraps(original)
    def generate(*args, **kwargs):
        if kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        return original(*args, **kwargs)

    model.generate = generate
