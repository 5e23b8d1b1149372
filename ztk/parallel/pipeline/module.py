"""A model written as a list of layers. Every rank builds only its own layers."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ztk.parallel.pipeline.layers import Carry, Layer, MicroBatch


class LayerSpec:
    """A layer that is built later: `LayerSpec(nn.Linear, 16, 32, bias=False).build()`.

    Raises:
        ValueError: for a first argument that is no subclass of torch.nn.Module.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ValueError(f"LayerSpec({typename!r}): the first argument must be a subclass of torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        """The layer as a module, its parameters in memory."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all others of the same `key`, on any stage.

    forward_fn: `forward_fn(module, input)` instead of `module(input)`, for a head that multiplies by an embedding's weight.
    tied_weight_attr: the name of the shared weight, for readers; all parameters of the module are shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipelineModule(nn.Module):
    """A sequential model of `LayerSpec`s, modules and functions. Each takes the output of the previous one as its only argument.

    A micro-batch is `(inputs, labels)`; with `loss_fn` the model returns `loss_fn(outputs, labels)`. Layer i's parameters are called
    "i.*", and a tied layer's "tied_modules.KEY.*", on any stage. Specs are built on the meta device to count their parameters, and in
    memory once this rank's layers are determined.

    base_seed: layer i is built after seeding torch with `base_seed + i`, so its values do not depend on the number of stages. If None, it
        is built from the current random state. seed_fn: called with that seed instead of `torch.manual_seed`.
    recompute_interval: groups of this many layers save only their input and run again in the backward, by `recompute(function, carry)`.
        0 disables recomputation.
    stages: set if the model is already cut; `parallelize` then uses it as it is.
    """

    children_are_units = True  # for ZeRO: each layer is a unit
    recompute_interval: int = 0
    recompute: Callable[..., Any] = staticmethod(partial(checkpoint, use_reentrant=False))
    stages: object | None = None

    def __init__(
        self,
        layers: Sequence[LayerSpec | nn.Module | Callable[..., Any]],
        *,
        loss_fn: Callable[..., Any] | None = None,
        base_seed: int | None = 1234,
        seed_fn: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__()
        self.specs, self.loss_fn = list(layers), loss_fn
        self._base_seed, self._seed_fn = base_seed, seed_fn or torch.manual_seed
        first_of: dict[str, int] = {}
        for index, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                first_of.setdefault(spec.key, index)
        self._first_of = first_of  # a tied module is built with the seed of its first use
        self._writes_input: dict[int, bool] = {}  # by the first layer of a recomputed group
        self.layers = [self._layer(index) for index in range(len(self.specs))]

    @property
    def module(self) -> nn.Module:
        """This module, see `LayeredModel`."""
        return self

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of all layers' parameters, see `LayeredModel`. Of this rank's layers if the model is already cut."""
        if self.stages is not None:
            return {name: p.shape for name, p in self.named_parameters() if p.requires_grad}
        found = {}
        for index, spec in enumerate(self.specs):
            for path in self._paths(index):
                found |= {f"{path}.{name}": p.shape for name, p in _parameters(spec).items() if p.requires_grad}
        return found

    def whole(self) -> nn.Module:
        """All layers as modules, see `LayeredModel`."""
        whole = PipelineModule([])
        for index, spec in enumerate(self.specs):
            module = _unbuilt(spec)
            if isinstance(spec, TiedLayerSpec):
                if "tied_modules" not in whole._modules:
                    whole.tied_modules = nn.ModuleDict()
                whole.tied_modules[spec.key] = module
            elif module is not None:
                whole.add_module(str(index), module)
        return whole

    def keep(self, own: Collection[int]) -> None:
        """Builds the layers `own`."""
        for index in sorted(own):
            spec = self.specs[index]
            if isinstance(spec, TiedLayerSpec):
                if "tied_modules" not in self._modules:
                    self.tied_modules = nn.ModuleDict()
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = self._build(self._first_of[spec.key])
            elif isinstance(spec, (LayerSpec, nn.Module)):
                self.add_module(str(index), self._build(index))

    def build(self) -> "PipelineModule":
        """Builds all layers that are not built yet, for one rank that runs the full model."""
        self.keep([index for index in range(len(self.specs)) if not self._is_built(index)])
        return self

    def forward(self, inputs: Carry, labels: object = None) -> Carry:
        """The full model on one rank; builds layers that are not built yet."""
        self.build()
        return self.run_layers(range(len(self.layers)), carry=None, batch=MicroBatch(args=(inputs, labels)))

    def run_layers(self, indices: range, *, carry: Carry, batch: MicroBatch) -> Carry:
        """The layers `indices` one after the other, recomputed in groups of `recompute_interval`."""
        step = self.recompute_interval
        if not step or not torch.is_grad_enabled():
            return self._run_plainly(indices, carry=carry, batch=batch)
        for start in range(indices.start, indices.stop, step):
            group = range(start, min(start + step, indices.stop))
            if group.stop == len(self.layers):  # the loss is not worth running twice
                return self._run_plainly(group, carry=carry, batch=batch)
            carry = self.recompute(partial(self._run_group, group, batch), carry)
        return carry

    def _run_group(self, indices: range, batch: MicroBatch, carry: Carry) -> Carry:
        """Runs a group of layers. A group that writes into its input, which its first run detects, gets a copy, because the input is kept
        to run it again."""
        writes = self._writes_input.get(indices.start)
        if writes is False:
            return self._run_plainly(indices, carry=carry, batch=batch)
        copied = tree_map_only(Tensor, Tensor.clone, carry)
        tensors = [leaf for leaf in tree_leaves(copied) if isinstance(leaf, Tensor)]
        before = [tensor._version for tensor in tensors]
        out = self._run_plainly(indices, carry=copied, batch=batch)
        if writes is None:
            self._writes_input[indices.start] = [tensor._version for tensor in tensors] != before
        return out

    def _run_plainly(self, indices: range, *, carry: Carry, batch: MicroBatch) -> Carry:
        for index in indices:
            carry = self.layers[index].run(carry, batch)
        return carry

    def _is_built(self, index: int) -> bool:
        spec = self.specs[index]
        if isinstance(spec, TiedLayerSpec):
            return "tied_modules" in self._modules and spec.key in self.tied_modules
        return str(index) in self._modules or not isinstance(spec, (LayerSpec, nn.Module))

    def _build(self, index: int) -> nn.Module:
        spec = self.specs[index]
        if isinstance(spec, nn.Module):
            return spec
        assert isinstance(spec, LayerSpec), "a function has nothing to build"
        if self._base_seed is None:
            return spec.build()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            self._seed_fn(self._base_seed + index)
            return spec.build()

    # As layers

    def _layer(self, index: int) -> Layer:
        spec = self.specs[index]
        return Layer(
            name=str(index),
            kind=_kind(spec),
            modules=self._paths(index),
            num_parameters=sum(p.numel() for p in _parameters(spec).values() if p.requires_grad),
            num_multiplied=sum(
                p.numel() for p in _parameters(spec).values() if p.dim() > 1 and _kind(spec) != nn.Embedding.__name__
            ),
            run=lambda carry, batch: self._run(index, carry=carry, batch=batch),
        )

    def _paths(self, index: int) -> tuple[str, ...]:
        spec = self.specs[index]
        if isinstance(spec, TiedLayerSpec):
            return (f"tied_modules.{spec.key}",)
        return (str(index),) if isinstance(spec, (LayerSpec, nn.Module)) else ()

    def _run(self, index: int, *, carry: Carry, batch: MicroBatch) -> Carry:
        inputs, labels = (*batch.args, None, None)[:2]
        carry = self._call(index, inputs if index == 0 else carry)
        is_last = index == len(self.specs) - 1
        return self.loss_fn(carry, labels) if is_last and self.loss_fn is not None and labels is not None else carry

    def _call(self, index: int, inputs: Carry) -> Carry:
        spec = self.specs[index]
        if isinstance(spec, TiedLayerSpec):
            module = self.tied_modules[spec.key]
            return module(inputs) if spec.forward_fn is None else spec.forward_fn(module, inputs)
        # pyrefly: ignore[not-callable]  # a layer that is called is built
        return self._modules[str(index)](inputs) if isinstance(spec, (LayerSpec, nn.Module)) else spec(inputs)


def _kind(spec: object) -> str:
    """The class name, or a function's name."""
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", type(spec).__name__)


def _unbuilt(spec: object) -> nn.Module | None:
    """The module of a layer, a spec's on the meta device; None for a function."""
    if isinstance(spec, LayerSpec):
        with torch.device("meta"):
            spec = spec.build()
    return spec if isinstance(spec, nn.Module) else None


def _parameters(spec: object) -> dict[str, nn.Parameter]:
    """Parameters by name."""
    module = _unbuilt(spec)
    return {} if module is None else dict(module.named_parameters())
