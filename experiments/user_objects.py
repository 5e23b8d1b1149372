"""The user's objects in a run: creates nodes with a `_target_` on one rank. docs/extending.md has their protocols."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from ztk.config import Config, call_later, callback_nodes, find, instantiate, is_own, takes_share
from ztk.core.policies.optimizer import OptimizerPolicy
from ztk.core.runtime.own_forward import OwnForward, replace_forward
from ztk.data import ItemStream, Share
from ztk.nn import Decoder
from ztk.optim import TorchStep
from ztk.parallel.pipeline import PipelineModule
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
    both get the batch.
    """
    if "loss" not in config.own:
        return
    loss = call_later(config.own["loss"])
    if isinstance(model, Decoder):
        model.loss = loss if isinstance(loss, nn.Module) else _LossModule(loss)
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
        inputs, targets = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, batch)
        return loss(outputs_of(inputs), targets)

    replace_forward(model, by=forward)


class _LossModule(nn.Module):
    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, outputs: Tensor, targets: Any) -> Tensor:
        return self._function(outputs, targets)


def own_optimizer(config: Config, *, model: nn.Module) -> tuple[OptimizerPolicy, torch.optim.Optimizer]:
    """Returns the optimizer of `optimizer._target_` over the trained parameters, and its policy."""
    made = instantiate(config.own["optimizer"], [p for p in model.parameters() if p.requires_grad])
    policy = OptimizerPolicy(
        name="torch",
        lr=float(made.param_groups[0].get("lr", 1.0)),
        decay_all=True,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        skip_unused=bool(config.optimizer.skip_unused),
    )
    return policy, made


def planned_optimizer(config: Config) -> OptimizerPolicy:
    """Returns one of ztk's optimizers with the same number of states as `optimizer._target_`. Raises ValueError if there is none."""
    parameter = nn.Parameter(torch.zeros(4))
    step = TorchStep(instantiate(config.own["optimizer"], [parameter]), parameters={"parameter": parameter})
    names = ("sgd", "lion", "adamw")
    if len(step.state_names) >= len(names):
        raise ValueError(
            f"optimizer._target_={config.own['optimizer']['_target_']}: keeps {len(step.state_names)} states per parameter, and a plan counts "
            "two at most"
        )
    return OptimizerPolicy(name=names[len(step.state_names)], clip_grad_norm=config.optimizer.clip_grad_norm)


def own_learning_rates(config: Config) -> Tensor:
    """Returns float32 [train.steps] multipliers of a torch scheduler, or of a function or object called with the step, starting at 0.

    Raises ValueError for non-finite multipliers.
    """
    node, steps = config.own["scheduler"], config.train.steps
    target = find(node["_target_"])
    if inspect.isclass(target) and issubclass(target, LRScheduler):
        values = _followed(node, steps=steps)
    else:
        schedule = call_later(node)
        values = [float(schedule(step)) for step in range(steps)]
    table = torch.tensor(values, dtype=torch.float32)
    if not torch.isfinite(table).all():
        raise ValueError(
            f"scheduler._target_={node['_target_']}: step {int((~torch.isfinite(table)).nonzero()[0])} has no finite multiplier"
        )
    return table


def _followed(node: Mapping[str, Any], *, steps: int) -> list[float]:
    """Returns the rates of a torch scheduler for an optimizer of rate 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = instantiate(node, optimizer)
    values = []
    for _ in range(steps):
        values.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return values


def own_data(config: Config, *, share: Share) -> tuple[Any, Any]:
    """Returns the stream of `data._target_`, and its dataset of held-out items, or None.

    Raises ValueError for an object that is neither a dataset nor a stream.
    """
    node = config.own["data"]
    made = instantiate(node, share=share) if takes_share(find(node["_target_"])) else instantiate(node)
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
