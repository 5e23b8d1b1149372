"""LoRA adapters by request: merged copies of the adapted weights next to the base's, and the rows of a step by adapter.

[Note: Exact adapters]
W x + scale B A x rounds differently than (W + scale B A) x. So that an answer has the bits of the merged model, every adapter has its own copy
of each product that it changes, made from W + scale B A in fp32 in the format of the base's weights. A step computes such a product once for
each adapter that has rows in it, and everything else once for all rows. A row's bits do not depend on the other rows of a product, which is
checked when a model is opened, so they do not depend on the adapters of the other rows either.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ztk.inference.cache import Span
from ztk.inference.products import Product
from ztk.inference.weights import Layer, Mlp, WeightReader, Weights, products_in
from ztk.nn.lora import is_turned
from ztk.nn.low_rank import Adapter

_Compute = Callable[..., Tensor]  # (x, weights=, residual=): an MLP


class Merged(Mapping[str, Tensor]):
    """The parameters of `module` with an adapter merged, each computed when it is read. state: parameters of the base, of any shape.

    Raises:
        ValueError: a layer of the adapter is none of the module's linear layers, or, when its weight is read, has other sizes.
    """

    def __init__(self, state: Mapping[str, Tensor], *, module: nn.Module, adapter: Adapter) -> None:
        self._state, self._adapter = state, {f"{layer}.weight": pair for layer, pair in adapter.items()}
        layers = dict(module.named_modules())
        turned = {layer: is_turned(layers.get(layer)) for layer in adapter}
        odd = next((layer for layer, found in turned.items() if found is None or f"{layer}.weight" not in state), None)
        if odd is not None:
            raise ValueError(f"{odd} is no linear layer of this model: name an adapter of this base")
        self._turned = {f"{layer}.weight" for layer, found in turned.items() if found}

    @property
    def changed(self) -> frozenset[str]:
        """The names of adapted weights."""
        return frozenset(self._adapter)

    def __getitem__(self, name: str) -> Tensor:
        value = self._state[name]
        if name not in self._adapter:
            return value
        delta = self._adapter[name].delta()
        delta = delta.T if name in self._turned else delta
        if delta.shape != value.shape:
            raise ValueError(
                f"{name} is {list(value.shape)} in this model and {list(delta.shape)} in the adapter: name an adapter of this base"
            )
        return value.detach().to("cpu", torch.float32) + delta

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def adapted_layers(base: Weights, *, reader: WeightReader, changed: frozenset[str]) -> list[Layer]:
    """The layers of `base` with own products where a weight of `changed` is in them. reader: reads the merged parameters.

    Raises:
        ValueError: a weight of `changed` is in no product of attention, of an MLP or of a shared expert.
    """
    found, left = [], set(changed)
    for number, layer in enumerate(base.layers):
        places = reader.places(number)
        left -= places.keys()
        own = {place for name, at in places.items() if name in changed for place in at}
        found.append(_adapted(layer, reader=reader, number=number, own=own))
    if left:
        raise ValueError(
            f"{min(left).removesuffix('.weight')} cannot have an adapter by request, only projections of attention and of MLPs can: merge the "
            "adapter into its base"
        )
    return found


def _adapted(base: Layer, *, reader: WeightReader, number: int, own: set[str]) -> Layer:
    """own: the parts that differ from `base`: qkv, out, gate, up, down."""
    layer = base
    if "qkv" in own:
        layer = replace(layer, qkv=reader.qkv(number))
    if "out" in own:
        layer = replace(layer, out=reader.out(number))
    inner = own & {"gate", "up", "down"}
    if inner:
        merged, mlp = reader.mlp(number), base.mlp
        assert merged is not None and mlp is not None, "the layer has these weights"
        layer = replace(layer, mlp=replace(mlp, **{name: getattr(merged, name) for name in inner}))
    return layer


class Adapters:
    """The layers of a model's adapters, numbered from 1 on; 0 is the base. layers: by name."""

    def __init__(self, layers: Mapping[str, list[Layer]], *, base: list[Layer]) -> None:
        self._layers = [base, *layers.values()]
        self._numbers = {name: number for number, name in enumerate(layers, start=1)}
        self.nbytes = {
            name: sum(product.nbytes for product in self._own(number)) for name, number in self._numbers.items()
        }

    def products(self) -> list[Product]:
        """The products that are not the base's."""
        return [product for number in self._numbers.values() for product in self._own(number)]

    def rows(self, spans: list[Span], *, device: torch.device) -> "StepRows | None":
        """The rows of a step by adapter, or None if all use the base."""
        found: dict[int, list[int]] = {}
        for span in spans:
            found.setdefault(span.adapter, []).extend(range(span.row, span.row + span.length))
        if found.keys() <= {0}:
            return None
        return StepRows(
            layers=[self._layers[number] for number in found],
            rows=[torch.tensor(rows).to(device) for rows in found.values()],
        )

    def _own(self, number: int) -> list[Product]:
        base = {id(product) for layer in self._layers[0] for product in products_in(layer)}
        return [product for layer in self._layers[number] for product in products_in(layer) if id(product) not in base]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The rows of a step by adapter: layers of each one's model, and its rows, int64 [M] of each, on the device."""

    layers: list[list[Layer]]
    rows: list[Tensor]

    def layer(self, number: int) -> Layer:
        """Layer `number`, whose products compute each row with its own weights."""
        own = [layers[number] for layers in self.layers]
        if len(own) == 1:
            return own[0]
        qkv = self._parts([layer.qkv for layer in own])
        out = self._parts([layer.out for layer in own])
        mlp = self._parts([layer.mlp for layer in own])
        return replace(
            own[0],
            qkv=qkv[0][0] if len(qkv) == 1 else MixedProduct(qkv),
            out=out[0][0] if len(out) == 1 else MixedProduct(out),
            mlp=mlp[0][0] if len(mlp) == 1 else _mixed_mlp(mlp),
        )

    def _parts(self, items: list) -> list[tuple]:
        """Each of the different items once, with all of its rows."""
        found: dict[int, tuple] = {}
        for item, rows in zip(items, self.rows, strict=True):
            before = found.get(id(item))
            found[id(item)] = (item, rows if before is None else torch.cat([before[1], rows]))
        return list(found.values())


class MixedProduct(Product):
    """A product of each row with the weight of its adapter. parts: products, and their rows int64 [M]."""

    def __init__(self, parts: list[tuple[Product, Tensor]]) -> None:
        self._parts, self.shape = parts, parts[0][0].shape

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        def compute(product: Product, *, rows: Tensor) -> Tensor:
            return product(x[rows], None if residual is None else residual[rows])

        return _joined([(compute(product, rows=rows), rows) for product, rows in self._parts])


@dataclass(kw_only=True, slots=True)
class MixedMlp(Mlp):
    """MLPs of several adapters. parts: each with its rows int64 [M]; the other fields are the first one's."""

    parts: list[tuple[Mlp, Tensor]]

    def compute(self, by: _Compute, *, x: Tensor, residual: Tensor | None) -> Tensor:
        """x [M, C] -> [M, C], each row by its own MLP."""

        def own(mlp: Mlp, *, rows: Tensor) -> Tensor:
            return by(x[rows], weights=mlp, residual=None if residual is None else residual[rows])

        return _joined([(own(mlp, rows=rows), rows) for mlp, rows in self.parts])


def _mixed_mlp(parts: list[tuple[Mlp, Tensor]]) -> MixedMlp:
    first = parts[0][0]
    return MixedMlp(up=first.up, down=first.down, gate=first.gate, parts=parts)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One tensor [M, N] of the parts' rows, each with its places int64 [M]."""
    first = parts[0][0]
    found = first.new_empty(sum(len(rows) for _, rows in parts), first.shape[1])
    for part, rows in parts:
        found[rows] = part
    return found
