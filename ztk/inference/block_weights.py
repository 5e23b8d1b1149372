"""A model's weights for the kernels over rows: fused where one product does, experts stacked, on the device that computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ztk.inference.cut import Cut
from ztk.inference.describe import Description
from ztk.inference.products import Affine, Product, in_groups
from ztk.inference.quantised import GROUP
from ztk.inference.weights import Layer, Mlp, WeightReader, Weights
from ztk.kernels import quantise_weight

# What `InferencePolicy.weights` names: formats of `ztk.kernels` for the layers and the head.
FORMATS = {"stored": ("plain", "plain"), "int8": ("int8", "int8"), "int4": ("int4", "int8"), "fp8": ("fp8", "fp8")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where weights are, in which dtype they are computed with, and in which format they are stored (`FORMATS`)."""

    device: torch.device
    dtype: torch.dtype
    kind: str


class RowsProduct(Product):
    """weight [N, K], or [E, N, K] of experts, in a format of `ztk.kernels` with its scales, and bias [N]. Rows of int4 begin with `front`
    columns that are another rank's."""

    def __init__(self, affine: Affine, *, kind: str, placement: Placement) -> None:
        if kind == "plain":
            self.weight, self.scales = affine.weight.to(placement.device, placement.dtype).contiguous(), None
        else:
            full, own, self.front = in_groups(affine, group=GROUP if kind == "int4" else 1)
            weight, scales = quantise_weight(full.to(placement.device), kind=kind)
            assert scales is not None, "formats of 8 and 4 bits have them"
            each = weight.shape[1] / full.shape[1]  # bytes of an input
            self.weight = weight[:, int(own.start * each) : int(own.stop * each)].contiguous()
            self.scales = scales if kind != "int4" else scales[own.start // GROUP : own.stop // GROUP].clone()
        self.bias = None if affine.bias is None else affine.bias.to(placement.device, placement.dtype)
        self.shape = (affine.weight.shape[-2], affine.weight.shape[-1])

    @property
    def nbytes(self) -> int:
        """Of weight and scales."""
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @classmethod
    def stacked(cls, products: "list[RowsProduct]") -> "RowsProduct":
        """One product of as many experts."""
        found = cls.__new__(cls)
        found.weight = torch.stack([one.weight for one in products])
        found.scales = found.bias = None
        scales = [one.scales for one in products if one.scales is not None]
        if scales:
            found.scales = torch.stack(scales)
        biases = [one.bias for one in products if one.bias is not None]
        if biases:
            found.bias = torch.stack(biases)
        found.shape, found.front = products[0].shape, products[0].front
        return found


@dataclass(kw_only=True, slots=True)
class BlockLayer:
    """One block. qkv: queries, keys and values in one product. gate, up, down: of the MLP, and of a sparse MLP's shared expert.

    experts: gate, up and down of all of them, stacked. Norms: as of `Layer`.
    """

    qkv: RowsProduct
    out: RowsProduct
    norms: dict[str, Affine]
    gate: RowsProduct | None = None
    up: RowsProduct | None = None
    down: RowsProduct | None = None
    router: RowsProduct | None = None
    experts: tuple[RowsProduct, RowsProduct, RowsProduct] | None = None
    shared_gate: RowsProduct | None = None

    @property
    def nbytes(self) -> int:
        """Of all products."""
        single = (self.qkv, self.out, self.gate, self.up, self.down, self.router, self.shared_gate)
        return sum(one.nbytes for one in (*single, *(self.experts or ())) if one is not None)


@dataclass(kw_only=True, slots=True)
class BlockWeights:
    """As `Weights`, with layers for the kernels over rows."""

    embedding: Tensor
    layers: list[BlockLayer]
    norm: Affine
    head: RowsProduct
    positions: Tensor | None
    embedding_norm: Affine | None
    placement: Placement


def collect_blocks(
    state: Mapping[str, Tensor], *, description: Description, placement: Placement, cut: Cut | None = None
) -> BlockWeights:
    """The weights on the placement's device, one layer after the other, from parameters by name in their full shapes, of any dtype.
    cut: a tensor-parallel rank takes its part of them.

    Raises:
        ValueError: `state` lacks a parameter, or one is not finite.
    """
    layers, head = (partial(RowsProduct, kind=kind, placement=placement) for kind in FORMATS[placement.kind])
    plain = partial(RowsProduct, kind="plain", placement=placement)
    reader = WeightReader(state, description=description, products=(layers, head, plain), cut=cut)
    rest: Weights = reader.rest()
    return BlockWeights(
        embedding=rest.embedding.to(placement.device, placement.dtype),
        layers=[_layer(reader.layer(number), device=placement.device) for number in range(description.layers)],
        norm=_norm(rest.norm, device=placement.device),
        head=_rows(rest.head),
        positions=None if rest.positions is None else rest.positions.to(placement.device, placement.dtype),
        embedding_norm=None if rest.embedding_norm is None else _norm(rest.embedding_norm, device=placement.device),
        placement=placement,
    )


_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp", "query_norm", "key_norm")


def _layer(layer: Layer, *, device: torch.device) -> BlockLayer:
    found = {name: getattr(layer, name) for name in _NORMS}
    mlp = layer.mlp
    return BlockLayer(
        qkv=_rows(layer.qkv),
        out=_rows(layer.out),
        norms={name: _norm(norm, device=device) for name, norm in found.items() if norm is not None},
        gate=None if mlp is None or mlp.gate is None else _rows(mlp.gate),
        up=None if mlp is None else _rows(mlp.up),
        down=None if mlp is None else _rows(mlp.down),
        router=None if layer.router is None else _rows(layer.router),
        experts=None if layer.experts is None else _stacked(layer.experts),
        shared_gate=None if layer.shared_gate is None else _rows(layer.shared_gate),
    )


def _stacked(experts: list[Mlp]) -> tuple[RowsProduct, RowsProduct, RowsProduct]:
    gate, up, down = (
        RowsProduct.stacked([_rows(getattr(expert, part)) for expert in experts]) for part in ("gate", "up", "down")
    )
    return gate, up, down


def _rows(product: Product) -> RowsProduct:
    assert isinstance(product, RowsProduct), "the reader was given its kind"
    return product


def _norm(affine: Affine, *, device: torch.device) -> Affine:
    """In fp32: norms compute in it."""
    return Affine(weight=affine.weight.to(device), bias=None if affine.bias is None else affine.bias.to(device))
