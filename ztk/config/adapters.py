"""Rules of `lora=adapter`: the tasks, layouts and base weights that adapters can train with."""

from collections.abc import Iterator

from ztk.config.topology import cut_degrees
from ztk.core.policies.config import Config
from ztk.core.policies.model import ModelInit
from ztk.core.policies.runs import AUTO, is_hugging_face

_TASKS = (
    "sft",
    "reward",
    "dpo",
    "distill",
    "grpo",
    "ppo",
)  # tasks that start from the weights of another run, or train them first
_LAYERS = ("query", "key", "value", "out", "gate", "up", "down")  # layers of a block of ztk's decoder


def lora_faults(config: Config) -> Iterator[str]:
    """Yields one line per choice that conflicts with adapters."""
    lora = config.lora
    if lora.rank < 1:
        return
    names = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    if not isinstance(lora.targets, str | list) or not names or not all(isinstance(name, str) for name in names):
        yield f"lora.targets={lora.targets}: must be all-linear or names, as in lora.targets=[q_proj,v_proj]"
        return
    for key, path in (("warm_start.path", config.warm_start.path), ("reward.path", config.reward.path)):
        yield from _scale_faults(config, key=key, path=path)
    if not is_hugging_face(config.model):
        yield from _decoder_faults(config, targets=names)
    elif config.model.init is ModelInit.random:
        yield f"lora.rank={lora.rank}: adapters on random frozen weights learn little; use model.init=pretrained, or lora=none"


def _decoder_faults(config: Config, *, targets: list[str]) -> Iterator[str]:
    """Faults with ztk's own decoder, whose base weights are saved in the run's checkpoints."""
    rank, warm, task = config.lora.rank, config.warm_start, config.task.name
    if task not in _TASKS:
        yield (
            f"lora.rank={rank}: task={task} has no trained decoder for the adapters; use task=sft warm_start.path=RUN, "
            "model=hf model.path=FOLDER, or lora=none"
        )
        return
    if not warm.steps and warm.path is None and config.checkpoint.resume in (None, AUTO):
        yield (
            f"lora.rank={rank}: adapters on random frozen weights learn little; use warm_start.path=RUN, the folder of a run with the same "
            "model, or lora=none"
        )
    if config.model.experts is not None:
        yield f"lora.rank={rank}: experts of ztk's decoder are not linear layers; use model=nano or another dense model, or lora=none"
    for degree, value in cut_degrees(config.topology).items():
        if degree != "tensor":
            yield (
                f"topology.{degree}={value}: adapters of ztk's decoder train with topology=dp and tp2 only; "
                f"use topology.{degree}=1, or lora=none"
            )
    for name in targets:
        if name != "all-linear" and name.rpartition(".")[2] not in _LAYERS:
            yield (
                f"lora.targets={name}: layers of ztk's decoder with adapters are {', '.join(_LAYERS)}; name some of them, or use "
                "lora.targets=all-linear"
            )


def starts_adapted(config: Config) -> bool:
    """Returns whether the policy starts with the adapters of `warm_start.path` and not only with its base."""
    path = config.warm_start.path
    return bool(config.lora.rank) and path is not None and _saved_scale(path) is not None


def reference_has_adapters(config: Config) -> bool:
    """Returns whether a frozen reference needs adapters.

    It starts as the policy does. New adapters change nothing, so a transformers model as base has none.
    """
    if config.warm_start.path is None:
        return False
    return not is_hugging_face(config.model) or starts_adapted(config)


def _scale_faults(config: Config, *, key: str, path: str | None) -> Iterator[str]:
    """Yields a fault if the loaded adapters were trained with another alpha / rank, because they would then be another model."""
    rank, alpha = config.lora.rank, config.lora.alpha
    saved = None if path is None or alpha is None else _saved_scale(path)
    if saved is not None and alpha is not None and alpha / rank != saved:
        yield (
            f"lora.alpha={alpha:g}: the adapters of {key}={path} were trained with alpha / rank = {saved:g}, and with {alpha / rank:g} they "
            f"are another model; use lora.alpha={saved * rank:g}"
        )


def _saved_scale(path: str) -> float | None:
    """Returns alpha / rank of the adapters in a run's newest checkpoint, or None without adapters or without a readable checkpoint."""
    from ztk.checkpoint import CheckpointError, adapter_scale  # imported late: torch takes a second

    try:
        return adapter_scale(path)
    except CheckpointError:
        return None  # the ranks report the error
