"""A model as a sequence of layers: the interface between models and pipelines."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Carry = Any  # the activation between layers: a tensor, or nested tuples, lists and dicts of tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The arguments of one call of a model, and the weight of its loss.

    token_weight: weight in means over all its tokens, such as a router's losses, including tokens that the loss ignores. Defaults to
    `weight`.
    loss_of: computes the loss, or a tensor for `engine.compute`, from the model. It calls the model once, with `args` and `kwargs`. In a
    pipeline only ranks with the last stage call it. If omitted, the model's output is the loss.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    token_weight: float | None = None
    loss_of: Callable[[Any], Tensor] | None = None

    @staticmethod
    def of(value: object) -> "MicroBatch":
        """A tuple or list becomes positional arguments, a dict keyword arguments, anything else the only argument."""
        match value:
            case MicroBatch():
                return value
            case dict():
                return MicroBatch(kwargs=value)
            case tuple() | list():
                return MicroBatch(args=tuple(value))
            case _:
                return MicroBatch(args=(value,))

    @property
    def router_weight(self) -> float:
        """The weight of its routers' losses."""
        return self.weight if self.token_weight is None else self.token_weight

    def run(self, model: Callable[..., Any]) -> Any:
        """Returns the output of `model`, or the result of `loss_of`."""
        return model(*self.args, **self.kwargs) if self.loss_of is None else self.loss_of(model)

    def weigh(self, loss: Tensor) -> Tensor:
        """`loss`, one number of any shape, times the weight. Raises ValueError if the model's output is not a loss."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "the model must return its loss, one number: let an own model or loss end with .mean(), give PipelineModule a loss_fn "
                "and each micro-batch its labels, the decoder its targets"
            )
        return loss if self.weight == 1.0 else loss * self.weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A part of a model that is not split further. `run(carry, micro_batch)` takes the output of the previous layer (None for the first).

    modules: paths of the modules whose parameters it uses. kind: the text that partitioning by type matches, usually a class name.
    num_multiplied: elements of the matrices that it multiplies by; an embedding only looks rows up.
    """

    name: str
    kind: str
    modules: tuple[str, ...]
    num_parameters: int
    num_multiplied: int
    run: Callable[[Carry, MicroBatch], Carry]


class LayeredModel(Protocol):
    """A model that can be cut into stages. The last layer returns the loss if the micro-batch has targets, else the model's output."""

    module: nn.Module
    layers: list[Layer]

    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of every trained parameter of the full model. Call it before `keep`."""

    def whole(self) -> nn.Module:
        """The modules of the full model under their names, on the meta device where they are not built. Call it before `keep`."""

    def keep(self, own: Collection[int]) -> None:
        """Drops modules that only layers outside `own` need. Parameters keep their names."""


class BuiltLayers:
    """A `LayeredModel` whose modules exist before it is cut."""

    module: nn.Module
    layers: list[Layer]

    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}

    def whole(self) -> nn.Module:
        return self.module

    def keep(self, own: Collection[int]) -> None:
        needed = {path for index in own for path in self.layers[index].modules}
        known = dict.fromkeys(path for layer in self.layers for path in layer.modules)
        drop_modules(self.module, paths=[path for path in known if path not in needed])

    def layer(
        self, name: str, *, modules: tuple[str, ...], run: Callable[[Carry, MicroBatch], Carry], named_by: int = 0
    ) -> Layer:
        """Describes a layer by its modules. named_by: the number of the module whose class is the layer's kind."""
        found = [self.module.get_submodule(path) for path in modules]
        return Layer(
            name=name,
            kind=type(found[named_by]).__name__,
            modules=modules,
            num_parameters=count_parameters(*found),
            num_multiplied=count_multiplied(*found),
            run=run,
        )


def drop_modules(model: nn.Module, *, paths: Collection[str]) -> None:
    """Removes the modules `paths` from `model`. The other elements of a container keep their numbers; an attribute becomes None."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            del owner._modules[name]  # not `del owner[i]`, which renumbers
        else:
            owner._modules[name] = None


def count_parameters(*modules: nn.Module) -> int:
    """Trained elements, each parameter once."""
    parameters: dict[Tensor, None] = {p: None for module in modules for p in module.parameters() if p.requires_grad}
    return sum(parameter.numel() for parameter in parameters)


def count_multiplied(*modules: nn.Module) -> int:
    """Elements of the matrices in all modules but embeddings, each parameter once."""
    owners = (owner for module in modules for owner in module.modules() if not isinstance(owner, nn.Embedding))
    matrices = {p: None for owner in owners for p in owner.parameters(recurse=False) if p.dim() > 1}
    return sum(matrix.numel() for matrix in matrices)
