"""The user's objects in a run: creates nodes with a `_target_` on one rank. docs/extending.md has their protocols."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from ztk.config import Config, call_later, callback_nodes, instantiate, is_own, takes_share, target_of
from ztk.core.policies.optimizer import OptimizerPolicy
from ztk.core.runtime.own_forward import OwnForward, replace_forward
from ztk.data import ItemStream, Share
from ztk.nn import Decoder
from ztk.optim import GroupSchedule, TorchStep
from ztk.optim.elementwise import CLOSURE, is_elementwise
from ztk.parallel.pipeline import MicroBatch, PipelineModule
from ztk.parallel.pipeline.named import NamedLayers
from ztk.train.engine import Engine
from ztk.train.loop import Callback


def own_model(config: Config) -> nn.Module:
    """Returns the model of `model._target_` with its values. Every rank draws the same ones from `train.seed`, and rank 0's count.

    Raises ValueError for an object that is not a module.
    """
    torch.manual_seed(config.train.seed)
    model = instantiate(config.own["model"])
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model._target_={config.own['model']['_target_']}: is no nn.Module but a {type(model).__name__}"
        )
    if callable(getattr(type(model), "logits", None)):  # a layer of this name is no method
        loss_of, logits_of = model.forward, getattr(model, "logits")  # noqa: B009 - nn.Module types every attribute as Tensor | Module

        def forward(batch: Any, *, outputs: bool = False) -> Any:
            return logits_of(batch) if outputs else loss_of(batch)

        replace_forward(model, by=forward)
    return model


def own_logits(engine: Engine, *, vocab_size: int) -> Callable[[Tensor], Tensor] | None:
    """Returns tokens int64 [1, T] -> logits [1, T, V], or None for a model without such outputs. A collective call."""
    if not isinstance(engine.module.forward, OwnForward):
        return None

    def logits(tokens: Tensor) -> Tensor:
        return engine(tokens, outputs=True)

    with engine.evaluating():
        found = logits(torch.zeros(1, 2, dtype=torch.int64, device=engine.process.device))
    return logits if isinstance(found, Tensor) and found.dim() == 3 and found.shape[2] >= vocab_size else None


def add_loss(config: Config, *, model: nn.Module) -> None:
    """Makes `model` return the loss of `loss._target_`. Without it the model returns its own loss.

    If the batch is a pair (inputs, targets), a user's model is called as model(inputs), and the loss as loss(outputs, targets). Otherwise
    both get the batch. A user's model that pipeline stages divide gets its layers as `pipeline_layers`.
    """
    is_divided = config.topology.pipeline > 1 and is_own(config, section="model")
    if "loss" not in config.own:
        if is_divided and not isinstance(model, PipelineModule) and not hasattr(model, "pipeline_layers"):
            raise ValueError(
                f"topology.pipeline={config.topology.pipeline}: a stage runs single modules of the model, so that its forward cannot compute "
                "the loss; let it return its outputs, and set loss._target_ to a function of outputs and targets"
            )
        return
    loss = call_later(config.own["loss"])
    if isinstance(model, Decoder):
        model.loss = loss if isinstance(loss, nn.Module) else _LossModule(loss)
        return
    if isinstance(model, PipelineModule) and model.loss_fn is None:
        model.loss_fn = loss
        return
    if not is_own(config, section="model") or isinstance(model, PipelineModule):
        raise ValueError(
            "loss._target_: this model computes its own loss; use an own model, or ztk's decoder, such as model=tiny"
        )
    if isinstance(loss, nn.Module):
        if hasattr(model, "own_loss"):
            raise ValueError("loss._target_: the model has an attribute own_loss, where ztk puts the loss: rename it")
        model.add_module("own_loss", loss)  # it may have parameters and buffers
    outputs_of = model.forward.before if isinstance(model.forward, OwnForward) else model.forward

    def forward(batch: Any, *, outputs: bool = False) -> Any:
        if outputs:
            return outputs_of(batch)
        inputs, targets = _pair(batch)
        return loss(outputs_of(inputs), targets)

    if is_divided and not hasattr(model, "pipeline_layers"):
        model.pipeline_layers = partial(_layers, model, loss=loss)
    replace_forward(model, by=forward)


def _pair(batch: Any) -> tuple[Any, Any]:
    """Returns the inputs of a user's model and the targets of its loss."""
    return tuple(batch) if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, batch)


def _layers(model: nn.Module, *, loss: Callable[[Any, Any], Tensor]) -> NamedLayers:
    """Returns a user's model as layers, with `loss` at the end of the last one."""

    def finish(outputs: Any, batch: MicroBatch) -> Any:
        return outputs if batch.kwargs.get("outputs") else loss(outputs, _pair(batch.args[0])[1])

    return NamedLayers(
        model,
        inputs=lambda batch: batch.args[0] if batch.kwargs.get("outputs") else _pair(batch.args[0])[0],
        finish=finish,
        finish_modules=("own_loss",) if isinstance(loss, nn.Module) else (),
    )


class _LossModule(nn.Module):
    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, outputs: Tensor, targets: Any) -> Tensor:
        return self._function(outputs, targets)


def own_optimizer(config: Config, *, model: nn.Module) -> dict[str, Any]:
    """Returns the arguments of `parallelize` for the optimizer of `optimizer._target_` over the trained parameters."""
    made = instantiate(config.own["optimizer"], [p for p in model.parameters() if p.requires_grad])
    if config.optimizer.needs_closure:
        setattr(made, CLOSURE, True)
    policy = OptimizerPolicy(
        name="torch",
        lr=float(made.param_groups[0].get("lr", 1.0)),
        decay_all=True,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        skip_unused=bool(config.optimizer.skip_unused),
    )
    schedule = None
    if has_torch_scheduler(config):
        schedule = _group_schedule(config, groups=made.param_groups, defaults=made.defaults)
    return {
        "optimizer": policy,
        "torch_optimizer": made,
        "elementwise": bool(config.optimizer.elementwise),
        "group_schedule": schedule,
    }


def planned_optimizer(config: Config) -> OptimizerPolicy:
    """Returns one of ztk's optimizers with the same number of states as `optimizer._target_`. Raises ValueError if there is none."""
    parameter, target = nn.Parameter(torch.zeros(4)), config.own["optimizer"]["_target_"]
    made = instantiate(config.own["optimizer"], [parameter])
    if not (config.optimizer.elementwise or is_elementwise(made)):
        raise ValueError(
            f"optimizer._target_={target}: steps full parameters, with full weights, gradients and states on every rank, which a plan does not "
            "count; set optimizer.elementwise=true if it updates every element by itself, or plan with optimizer=adamw and add 4 bytes per "
            "parameter and state to every rank, and 8 during the step"
        )
    step = TorchStep(made, parameters={"parameter": parameter})
    names = ("sgd", "lion", "adamw")
    if len(step.state_names) >= len(names):
        raise ValueError(
            f"optimizer._target_={target}: keeps {len(step.state_names)} states per parameter, and a plan counts two at most"
        )
    return OptimizerPolicy(name=names[len(step.state_names)], clip_grad_norm=config.optimizer.clip_grad_norm)


def has_torch_scheduler(config: Config) -> bool:
    """Returns whether `scheduler._target_` is a scheduler of torch's or derived from one."""
    target = target_of(config.own["scheduler"]) if "scheduler" in config.own else None
    return inspect.isclass(target) and issubclass(target, LRScheduler)


def own_learning_rates(config: Config, *, policy: OptimizerPolicy) -> Tensor:
    """Returns the multipliers of the rate of `policy` by an own schedule: float32 [train.steps] for a function or object called with the step,
    starting at 0, and [train.steps, 2] for a torch scheduler that also changes the momentum, which is the second column.

    Raises ValueError for non-finite multipliers, and for a scheduler that gives parameters of several rates several multipliers.
    """
    node, steps = config.own["scheduler"], config.train.steps
    if has_torch_scheduler(config):
        table = _followed(config, policy=policy)
    else:
        schedule = call_later(node)
        table = torch.tensor([float(schedule(step)) for step in range(steps)], dtype=torch.float32)
    finite = torch.isfinite(table).view(steps, -1).all(1)
    if not finite.all():
        raise ValueError(
            f"scheduler._target_={node['_target_']}: step {int((~finite).nonzero()[0])} has no finite multiplier"
        )
    return table


def _followed(config: Config, *, policy: OptimizerPolicy) -> Tensor:
    """Returns the rates of a torch scheduler over the rate of `policy`, and the momentum if it changes."""
    where, lr = f"scheduler._target_={config.own['scheduler']['_target_']}", policy.lr
    has_betas = policy.betas is not None and policy.name != "muon"
    momentum = {"betas": tuple(policy.betas)} if has_betas else {"momentum": policy.momentum or 0.0}
    rates = [lr] if policy.adam_lr is None else [lr, policy.adam_lr]
    if not all(rates):
        raise ValueError(f"{where}: sets rates, which are multiples of optimizer.lr here: set one above 0")
    groups = [{"lr": rate, **momentum} for rate in rates]
    schedule = _group_schedule(config, groups=groups, defaults=groups[0])
    rows, moments = [], []
    for update in range(1, config.train.steps + 1):
        values = schedule.values(update)
        rows.append([float(own["lr"]) / rate for own, rate in zip(values, rates, strict=True)])
        moments.append(float(values[0]["betas"][0] if has_betas else values[0]["momentum"]))
    multipliers = torch.tensor(rows, dtype=torch.float64)
    if not torch.allclose(multipliers, multipliers[:, :1], rtol=1e-6, atol=0.0):
        raise ValueError(
            f"{where}: sets absolute rates, and optimizer.adam_lr={policy.adam_lr} is another one than optimizer.lr={lr}: leave "
            "optimizer.adam_lr out, or use a scheduler that multiplies"
        )
    multipliers = multipliers[:, 0].to(torch.float32)
    first = policy.betas[0] if has_betas else policy.momentum
    if all(moment == first for moment in moments):
        return multipliers
    if not first:
        raise ValueError(
            f"{where}: changes the momentum, and optimizer.momentum=0 keeps none: set optimizer.momentum, or scheduler.cycle_momentum=false"
        )
    return torch.stack([multipliers, torch.tensor(moments, dtype=torch.float32)], dim=1)


def _group_schedule(config: Config, *, groups: Any, defaults: Mapping[str, Any]) -> GroupSchedule:
    node = config.own["scheduler"]

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return _scheduler(node, optimizer=optimizer)

    return GroupSchedule(make, groups=groups, defaults=defaults)


def _scheduler(node: Mapping[str, Any], *, optimizer: torch.optim.Optimizer) -> Any:
    """Returns the scheduler of a node for `optimizer`, and those inside its arguments, as of SequentialLR."""

    def inner(value: Any) -> Any:
        if isinstance(value, Mapping) and "_target_" in value:
            target = target_of(value)
            is_scheduler = inspect.isclass(target) and issubclass(target, LRScheduler)
            return _scheduler(value, optimizer=optimizer) if is_scheduler else instantiate(value)
        return [inner(item) for item in value] if isinstance(value, list | tuple) else value

    options = {key: inner(value) for key, value in node.items() if key != "_target_"}
    return target_of(node)(optimizer=optimizer, **options)


def own_data(config: Config, *, share: Share) -> tuple[Any, Any]:
    """Returns the stream of `data._target_`, and its dataset of held-out items, or None.

    Raises ValueError for an object that is neither a dataset nor a stream.
    """
    node = config.own["data"]
    made = instantiate(node, share=share) if takes_share(target_of(node)) else instantiate(node)
    held_out = made.held_out() if hasattr(made, "held_out") else None
    if all(hasattr(made, name) for name in ("next_batch", "state_dict", "load_state_dict")):
        return made, held_out
    if isinstance(made, Dataset | IterableDataset) or (hasattr(made, "__getitem__") and hasattr(made, "__len__")):
        return ItemStream(made, share=share, seed=config.train.seed), held_out
    raise ValueError(
        f"data._target_={node['_target_']}: is no Dataset, IterableDataset or stream but a {type(made).__name__}; a stream has next_batch(), "
        "state_dict() and load_state_dict(state)"
    )


def own_callbacks(config: Config) -> list[Any]:
    """Returns the objects of `callbacks`, in order. Raises ValueError for one that has no hook."""
    hooks = [name for name in vars(Callback) if not name.startswith("_")]
    found = []
    for name, node in callback_nodes(config.own.get("callbacks", {})).items():
        made = instantiate(node)
        if not any(hasattr(made, hook) for hook in hooks):
            raise ValueError(
                f"callbacks.{name}={node['_target_']}: has none of the hooks {', '.join(hooks)}: write one"
            )
        found.append(made)
    return found
