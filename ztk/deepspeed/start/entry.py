"""`initialize`: builds an engine from a script's arguments."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ztk.core.policies.optimizer import TORCH
from ztk.deepspeed.config import DeepSpeedConfigError, Settings, parse_config, read_source
from ztk.deepspeed.config.optimizer import make_torch_optimizer
from ztk.deepspeed.engine import owners
from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.generation.hybrid import DeepSpeedHybridEngine
from ztk.deepspeed.optimizers.groups import TrainedGroups, count_beyond, groups_of_client, groups_of_config
from ztk.deepspeed.optimizers.schedules import SCHEDULES
from ztk.deepspeed.optimizers.sharded import ShardedOptimizer
from ztk.deepspeed.pipe import pipeline_engine as pipes
from ztk.deepspeed.pipe.module import PipelineModule
from ztk.deepspeed.start.build import NO_OPTIMIZER, Builder, default_optimizer
from ztk.deepspeed.start.mesh import arranged, check_asked_dtype, in_sequences, parts_of, with_asked_degree
from ztk.deepspeed.start.process import DEFAULT_PORT, this_process
from ztk.deepspeed.tools.log import logger, show_messages
from ztk.zero.parameters.construction import construction_suspended


@construction_suspended()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: object | Callable[..., object] | None = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: object = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: object = None,
) -> tuple[DeepSpeedEngine, ShardedOptimizer | None, DataLoader[Any] | None, object | None]:
    """DeepSpeed's `initialize`. Returns (engine, optimizer, dataloader, lr_scheduler). A collective call.

    args: may have `deepspeed_config`, the path of the configuration.
    optimizer: a new elementwise torch optimizer, or a callable that creates one from the parameters. It takes precedence over the
    configuration's. Its own parameters are trained, regardless of model_parameters. With neither, AdamW with DeepSpeed's defaults is
    used; if model_parameters and a schedule are missing too, its states are created at the first forward with gradients enabled, so that
    a model for evaluation needs no memory for them.
    model_parameters: the parameters to train, or groups {"params": [...], "lr": ...}. Defaults to all that require a gradient.
    training_data, collate_fn: a dataset. The third result is then a loader of this rank's micro-batches.
    lr_scheduler: an object with `step()`, or a callable that creates one from the optimizer. It takes precedence over the
    configuration's.
    mpu: describes the ranks that share a model which the script has cut itself; see `ztk.deepspeed.start.mesh`.
    mesh_param: (data-parallel ranks, ranks per sequence), like sequence_parallel_size in the configuration. The script's own layers
    divide sequences over neighbouring ranks; see `ztk.deepspeed.ulysses`.
    config, config_params: dict, path, or base64 of JSON.

    Raises DeepSpeedConfigError (a ValueError) with every fault of the configuration, and ValueError for other arguments, including a
    model that belongs to another engine.
    """
    if model is None:
        raise ValueError("model is missing: initialize(model=...) takes the module to train")
    _check_free(model)
    source = with_asked_degree(_source(args, config=config, config_params=config_params), model=model)
    process = this_process(distributed_port, dist_init_required=dist_init_required)
    is_pipeline = isinstance(model, PipelineModule)
    if is_pipeline:
        process = model.process  # the module's process, whose mesh has the stages
    elif mpu is not None:
        process = arranged(process, mpu)
    process = in_sequences(process, mesh_param=mesh_param, config=read_source(source))
    settings = parse_config(source, world_size=process.mesh.replicas)
    check_asked_dtype(model, settings=settings)
    if is_pipeline and not settings.managed_gradient_accumulation:
        raise ValueError("managed_gradient_accumulation=false: a pipeline's train_batch() is one step; leave it out")
    _check_hybrid(model, settings=settings)
    show_messages(settings.log_level)
    if model_parameters is not None:
        # An empty list from an evaluation script means no parameters; an exhausted iterator is an error.
        only_evaluates = (
            optimizer is None and lr_scheduler is None and settings.optimizer is None and settings.schedule is None
        )
        model_parameters = None if only_evaluates and model_parameters in ([], ()) else list(model_parameters)
    settings = _passed_first(
        settings, optimizer=optimizer, lr_scheduler=lr_scheduler, model_parameters=model_parameters
    )
    if process.rank == 0:
        for note in settings.notes:
            logger.info("config: %s", note)
    trainable = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    has_schedule = lr_scheduler is not None or settings.schedule is not None
    trained = _trained(
        model,
        settings=settings,
        optimizer=optimizer,
        model_parameters=model_parameters,
        trains=bool(trainable) and (model_parameters is not None or has_schedule),
    )
    if trained and optimizer is None and settings.optimizer is None and process.rank == 0:
        logger.warning(NO_OPTIMIZER)
    _check_schedule(lr_scheduler, settings=settings, trained=trained)
    builder = Builder(
        model=model,
        settings=settings,
        process=process,
        trainable=trainable,
        parts=None if mpu is None or is_pipeline else parts_of(model, process=process),
    )
    engine, sharded = builder.build(trained)
    made = _class_of_engine(settings, is_pipeline=is_pipeline)(
        engine,
        builder=builder,
        optimizer=sharded,
        lr_scheduler=_scheduler(lr_scheduler, settings=settings, optimizer=sharded),
        collate_fn=collate_fn,
    )
    if training_data is not None:
        made.training_dataloader = made.deepspeed_io(training_data)
    if settings.activation_checkpointing is not None:
        from ztk.deepspeed.recompute import checkpointing  # imported only if used

        checkpointing.configure_from(settings.activation_checkpointing, comm=engine.process.mesh.comm("tp"))
    return made, made.optimizer, made.training_dataloader, made.lr_scheduler


def _class_of_engine(settings: Settings, *, is_pipeline: bool) -> type[DeepSpeedEngine]:
    if settings.hybrid is None:
        return pipes.PipelineEngine if is_pipeline else DeepSpeedEngine
    return DeepSpeedHybridEngine


def _check_hybrid(model: nn.Module, *, settings: Settings) -> None:
    """Raises before the model is changed."""
    if settings.hybrid is not None and not hasattr(type(model), "generate"):
        raise ValueError(
            f"hybrid_engine.enabled: {type(model).__name__} has no generate(); leave the section out for a model that does not write texts"
        )


def _check_free(model: nn.Module) -> None:
    """Raises ValueError for parameters in another engine's buffers.

    Parameters that it only reads, unsharded on every rank, may be shared.
    """
    for name, parameter in model.named_parameters():
        owner = owners.owner_of(parameter)
        if owner is None:
            continue
        only_read = not (owner.bucket.traits.trainable or owner.bucket.traits.shards_parameters)
        if only_read and any(bucket.traits.trainable for bucket in owner.engine.zero.buckets):
            continue
        raise ValueError(
            f"parameter {name} belongs to the engine of an earlier initialize already: call its destroy() before, which leaves the "
            "weights in the model; or build the model anew"
        )


def _source(args: object, *, config: object, config_params: object) -> object:
    of_args = getattr(args, "deepspeed_config", None)
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": of_args,
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise DeepSpeedConfigError(["config is missing: pass config=dict or path, or args.deepspeed_config"])
    if len(given) > 1:
        raise DeepSpeedConfigError([f"the configuration is given twice, by {' and '.join(given)}; keep one"])
    return next(iter(given.values()))


def _passed_first(
    settings: Settings, *, optimizer: object, lr_scheduler: object, model_parameters: list | None
) -> Settings:
    """Returns settings in which arguments of `initialize` override the configuration, as in DeepSpeed, with a note on each."""
    notes = []
    if optimizer is not None and settings.optimizer is not None:
        notes.append("optimizer: is passed to initialize, too; the passed one counts")
    if lr_scheduler is not None and settings.schedule is not None:
        notes.append("scheduler: is passed to initialize, too; the passed one counts")
    if isinstance(optimizer, torch.optim.Optimizer) and model_parameters is not None:
        beyond = count_beyond(optimizer, model_parameters=model_parameters)
        if beyond:
            notes.append(
                f"model_parameters: the optimizer lacks {beyond} of them; its own are trained, the others are frozen"
            )
    return replace(
        settings,
        optimizer=None if optimizer is not None else settings.optimizer,
        schedule=None if lr_scheduler is not None else settings.schedule,
        notes=(*settings.notes, *notes),
    )


def _trained(
    model: nn.Module,
    *,
    settings: Settings,
    optimizer: object,
    model_parameters: list | None,
    trains: bool,
) -> TrainedGroups | None:
    """Returns the parameter groups, or None without an optimizer. trains: uses a default optimizer instead of None."""
    policy = settings.optimizer
    if policy is None and optimizer is None and trains:
        policy = default_optimizer(settings)
    if policy is not None and policy.name == TORCH:
        optimizer = partial(make_torch_optimizer, settings.given["optimizer"])
    if optimizer is not None:
        return groups_of_client(
            optimizer,
            model=model,
            model_parameters=model_parameters,
            clip=settings.gradient_clipping,
            skip_unused=settings.skip_unused,
        )
    if policy is not None and settings.skip_unused:
        policy = replace(policy, skip_unused=True)
    return policy and groups_of_config(policy, model=model, model_parameters=model_parameters)


def _check_schedule(given: object, *, settings: Settings, trained: TrainedGroups | None) -> None:
    """Raises before the model is changed."""
    if given is None and settings.schedule is None:
        return
    if trained is None:
        raise ValueError("a learning rate schedule needs something to train, and no parameter requires a gradient")
    if given is not None and not hasattr(given, "step") and not callable(given):
        raise ValueError(f"lr_scheduler={given!r:.80}: must have step(), or make something that has")
    if settings.schedule is not None:
        scratch = SimpleNamespace(param_groups=[dict(group) for group in trained.groups])
        SCHEDULES[settings.schedule.type](scratch, **settings.schedule.params)


def _scheduler(given: Any, *, settings: Settings, optimizer: ShardedOptimizer | None) -> Any:
    if settings.schedule is not None:
        return SCHEDULES[settings.schedule.type](optimizer, **settings.schedule.params)
    if given is None or hasattr(given, "step"):
        return given
    assert optimizer is not None, "a schedule is built for an optimizer"
    return given(optimizer.optimizer)
