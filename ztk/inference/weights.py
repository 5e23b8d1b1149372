"""A model's weights under the engine's names, from the names of each family.

Shapes: C width of the residual stream, H query heads, K key heads, D head size, F inner width, E experts, V vocabulary. A linear layer's
weight is [out, in]. The inner width is padded with zeros to a multiple of 64: on a CPU, an activation's last elements take another path of
the vectorised code than the others, so that an element's bits would depend on the number of rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.cut import Cut
from ztk.inference.describe import NAMES, Description
from ztk.inference.kernel_products import RowsProduct
from ztk.inference.placement import Placement
from ztk.inference.products import Affine, Product, UnreadAffine
from ztk.inference.quantised import FORMATS
from ztk.inference.stored import Stored, divided

_INNER = 64
# By `InferencePolicy.weights`: formats of `ztk.kernels` for the layers and the head.
_KERNEL_FORMATS = {
    "stored": ("plain", "plain"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
    "fp8": ("fp8", "fp8"),
}

Products = tuple[
    Callable[[Affine], Product], ...
]  # for linear layers, the head, and routers with the weights of experts


@dataclass(kw_only=True, slots=True)
class Mlp:
    """gate (None if not gated) and up [F, C], down [C, F]."""

    up: Product
    down: Product
    gate: Product | None = None


@dataclass(kw_only=True, slots=True)
class Layer:
    """One block. qkv: queries, keys and values in one product. A norm that the family does not have is None.

    experts: experts of a sparse MLP, with router [E, C]; for the kernels they are stacked in one. mlp is the shared expert then, whose result
    shared_gate [1, C] weights where there is one.
    """

    qkv: Product
    out: Product
    mlp: Mlp | None = None
    before_attention: Affine | None = None
    after_attention: Affine | None = None
    before_mlp: Affine | None = None
    after_mlp: Affine | None = None
    query_norm: Affine | None = None
    key_norm: Affine | None = None
    router: Product | None = None
    experts: list[Mlp] | Mlp | None = None
    shared_gate: Product | None = None


Inputs = Callable[
    [int], Iterator[Tensor]
]  # from a layer's number to the moments of its products' inputs, as in `Affine`


Values = Mapping[
    str, Product | Affine
]  # products and norms of a layer by path (`qkv`, `experts.3.up`), in memory order


@dataclass(kw_only=True, slots=True)
class Weights:
    """embedding [V, C], positions [P, C] or None, embedding_norm (BLOOM), layers in order: a list or `StreamedLayers`, norm, head [V, C].

    Ranks that share a model divide the rows of embedding and head.
    """

    embedding: Tensor
    layers: Iterable[Layer]
    norm: Affine
    head: Product
    positions: Tensor | None = None
    embedding_norm: Affine | None = None

    @property
    def held(self) -> list[Layer]:
        """Layers in memory now, at least one; streamed ones are built alike."""
        return list(getattr(self.layers, "held", self.layers))

    def products(self) -> list[Product]:
        """All products in memory, the head last."""
        return [*(product for layer in self.held for product in products_in(layer)), self.head]


def values_of(layer: Layer) -> Values:
    """Its products and norms by path."""
    found = {}
    for own in fields(layer):
        value, mlps = getattr(layer, own.name), {}
        if isinstance(value, Product | Affine):
            found[own.name] = value
        elif isinstance(value, Mlp):
            mlps = {own.name: value}
        elif isinstance(value, list):
            mlps = {f"{own.name}.{number}": mlp for number, mlp in enumerate(value)}
        for group, mlp in mlps.items():
            parts = {f"{group}.{part.name}": getattr(mlp, part.name) for part in fields(mlp)}
            found |= {path: product for path, product in parts.items() if product is not None}
    return found


def products_in(layer: Layer) -> list[Product]:
    """The products of a layer."""
    return [value for value in values_of(layer).values() if isinstance(value, Product)]


def collect(
    state: Mapping[str, Tensor],
    *,
    description: Description,
    placement: Placement | None = None,
    cut: Cut | None = None,
    inputs: Inputs | None = None,
) -> Weights:
    """Makes the engine's weights, layer by layer, from a model's parameters by name, in their full shapes and any dtype. placement: fp32 on the
    CPU by default. cut: the part of a tensor-parallel rank. inputs: the same as in `WeightReader`.

    Raises:
        ValueError: `state` lacks a parameter, or one is not finite.
    """
    reader = WeightReader(state, description=description, placement=placement or Placement(), cut=cut, inputs=inputs)
    weights = reader.rest()
    weights.layers = [reader.layer(number) for number in range(description.layers)]
    return weights


def products_of(placement: Placement) -> Products:
    """For layers, head and routers."""
    if not placement.by_kernels:
        return (*FORMATS[placement.kind], Product)
    layer, head = _KERNEL_FORMATS[placement.kind]
    forms = ((layer, False), (head, True), ("plain", True))
    layers, heads, routers = (partial(RowsProduct, form=form, placement=placement, wide=wide) for form, wide in forms)
    return layers, heads, routers


def _stacked(experts: list[Mlp]) -> Mlp:
    gate, up, down = ([getattr(expert, part) for expert in experts] for part in ("gate", "up", "down"))
    return Mlp(gate=RowsProduct.stacked(gate), up=RowsProduct.stacked(up), down=RowsProduct.stacked(down))


def _joined(parts: list[Affine]) -> Affine:
    """All outputs, one after the other. Either all have a bias, or none."""
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    return Affine(weight=torch.cat([part.weight for part in parts]), bias=bias)


class WeightReader:
    """Builds the parts of the weights one at a time, and reads only the parameters of that part from `state`, which have any shape.

    products: by default the placement's. inputs: called for each layer in order, whose weights are quantised for these inputs; its products are
    in the order in which `layer` makes them.

    Raises:
        ValueError: as `collect`.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        *,
        description: Description,
        placement: Placement,
        cut: Cut | None = None,
        products: Products | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self._state, self._source = state, divided(state)
        self._of, self._names = description, NAMES[description.family]
        self._cut, self._placement, self._inputs = cut or Cut(), placement, inputs
        self._moments: Iterator[Tensor] | None = None
        self._layer_product, self._head_product, self._plain_product = products or products_of(placement)

    def rest(self) -> Weights:
        """Everything but the layers."""
        names, cut, vocabulary = self._names, self._cut, self._of.vocab_size
        table = UnreadAffine(weight=self._stored(f"{names.embedding}.weight"))
        rows = cut.padded(self._read(cut.tokens(table)), vocabulary=table.weight.shape[0])
        unread = self._unread(names.head) if not self._of.is_tied else None
        head = rows if unread is None else cut.padded(self._read(cut.tokens(unread)), vocabulary=vocabulary)
        embedding = self._placement.place(rows.weight)
        if cut.size > 1 and embedding.untyped_storage().nbytes() > embedding.nbytes:  # a view would keep all rows
            embedding = embedding.clone()
        return Weights(
            embedding=embedding,
            positions=self._placement.place(self._tensor(f"{names.positions}.weight")) if names.positions else None,
            embedding_norm=self._norm(names.embedding_norm) if names.embedding_norm else None,
            layers=[],
            norm=self._norm(names.norm),
            head=self._head_product(head),
        )

    def layer(self, number: int) -> Layer:
        """One block."""
        names, of = self._names, self._of
        block, self._moments = names.block.format(number), None if self._inputs is None else self._inputs(number)
        norms = {
            kind: self._norm(block + getattr(names, kind))
            for kind in ("before_attention", "after_attention", "before_mlp", "after_mlp")
            if getattr(names, kind)
        }
        layer = Layer(qkv=self.qkv(number), out=self.out(number), **norms)
        if of.qk_norm != "none":
            layer.query_norm, layer.key_norm = (self._norm(f"{block}self_attn.{part}_norm") for part in "qk")
        if self._is_sparse(number):
            self._add_experts(layer, block=f"{block}mlp.")
        layer.mlp = self.mlp(number)
        return layer

    def qkv(self, number: int) -> Product:
        """The projections of queries, keys and values of a block."""
        return self._product(_joined(self._projections(self._names.block.format(number))))

    def out(self, number: int) -> Product:
        """The output projection of a block's attention."""
        out = self._matrix(self._names.block.format(number) + self._names.out)
        return self._product(self._read(self._cut.out(out, description=self._of)))

    def mlp(self, number: int) -> Mlp | None:
        """The MLP of a block, or the shared expert next to its experts; None where there is neither."""
        block, names = self._names.block.format(number), self._names
        if not self._is_sparse(number):
            return self._mlp(block)
        shared = f"{block}mlp.{names.shared}."
        if f"{shared}{names.parts[1]}.weight" not in self._state:
            return None
        gate, up, down = (self._unread(shared + part) for part in names.parts)
        return self._padded(gate=gate, up=up, down=down)

    def places(self, number: int) -> dict[str, tuple[str, ...]]:
        """The weights of a block's projections by name, with the products that each is in: qkv, out, gate, up, down."""
        names, block = self._names, self._names.block.format(number)
        found = {part: ("qkv",) for part in (names.query, names.key, names.value) if part} | {names.out: ("out",)}
        if self._is_sparse(number):
            parts = zip(names.parts, ("gate", "up", "down"), strict=True)
            found |= {f"mlp.{names.shared}.{part}": (place,) for part, place in parts}
        else:
            found |= {names.gate: ("gate",) if names.up else ("gate", "up"), names.up: ("up",), names.down: ("down",)}
        return {f"{block}{name}.weight": at for name, at in found.items() if name}

    def _is_sparse(self, number: int) -> bool:
        return bool(self._of.experts) and number not in self._of.dense_layers

    def _projections(self, block: str) -> list[Affine]:
        """This rank's queries, keys and values."""
        names, of, cut = self._names, self._of, self._cut
        if not names.fused:
            full = [self._unread(block + part) for part in (names.query, names.key, names.value)]
        elif names.fused == "heads":
            return self._by_head(self._matrix(block + names.query))
        else:
            fused, width = self._matrix(block + names.query), of.kv_heads * of.head_dim
            first = of.heads * of.head_dim
            full = [_rows_of(fused, 0, first), *(_rows_of(fused, at, at + width) for at in (first, first + width))]
        query, *others = full
        own = [cut.query(query, description=of), *(cut.key(part, description=of) for part in others)]
        return [self._read(part) for part in own]

    def _by_head(self, fused: UnreadAffine) -> list[Affine]:
        """Queries, keys and values that follow each other per head: rows [heads, 3, D]. There are as many key heads as query heads."""
        of, own = self._of, self._cut.heads(self._of)[0]
        read = self._read(_rows_of(fused, own.start * 3 * of.head_dim, own.stop * 3 * of.head_dim))

        def part(tensor: Tensor, number: int) -> Tensor:
            return tensor.view(len(own), 3, of.head_dim, *tensor.shape[1:])[:, number].flatten(0, 1).contiguous()

        biases = [None] * 3 if read.bias is None else [part(read.bias, number) for number in range(3)]
        return [Affine(weight=part(read.weight, number), bias=biases[number]) for number in range(3)]

    def _product(self, affine: Affine) -> Product:
        return self._layer_product(affine if self._moments is None else replace(affine, moments=next(self._moments)))

    def _mlp(self, block: str) -> Mlp:
        names = self._names
        down = self._matrix(block + names.down)
        if names.gate and not names.up:  # both in one
            gate, up = _halves(self._stored(f"{block}{names.gate}.weight"))
            return self._padded(gate=gate, up=up, down=down)
        gate = self._unread(block + names.gate) if names.gate else None
        return self._padded(gate=gate, up=self._matrix(block + names.up), down=down)

    def _add_experts(self, layer: Layer, *, block: str) -> None:
        experts = self._native_experts if self._of.family == "native" else self._pretrained_experts
        layer.router, triples = experts(block)
        layer.experts = [self._padded(gate=gate, up=up, down=down) for gate, up, down in triples]
        if self._placement.by_kernels:
            layer.experts = _stacked(layer.experts)
        if f"{block}shared_expert_gate.weight" in self._state:
            layer.shared_gate = self._plain_product(self._affine(f"{block}shared_expert_gate"))

    def _native_experts(self, block: str) -> tuple[Product, Iterator[tuple[UnreadAffine, UnreadAffine, UnreadAffine]]]:
        """`ztk.nn.moe`: gate and up [E, C, F], down [E, F, C]."""
        stacked = [self._stored(f"{block}experts.{part}") for part in ("gate", "up", "down")]
        count = stacked[0].shape[0]
        each = (tuple(UnreadAffine(weight=part[number].t()) for part in stacked) for number in range(count))
        return self._plain_product(self._affine(f"{block}router")), each

    def _pretrained_experts(
        self, block: str
    ) -> tuple[Product, Iterator[tuple[UnreadAffine, UnreadAffine, UnreadAffine]]]:
        """transformers: gate and up [E, 2 F, C] one after the other, down [E, C, F]."""
        gate_up, down = self._stored(f"{block}experts.gate_up_proj"), self._stored(f"{block}experts.down_proj")
        each = ((*_halves(gate_up[number]), UnreadAffine(weight=down[number])) for number in range(gate_up.shape[0]))
        return self._plain_product(self._affine(f"{block}gate")), each

    def _padded(self, *, up: UnreadAffine, down: UnreadAffine, gate: UnreadAffine | None) -> Mlp:
        own_gate, own_up, own_down = self._cut.inner(gate=gate, up=up, down=down)
        gating = None if own_gate is None else self._read(own_gate)
        raising, lowering = self._read(own_up), self._read(own_down)
        extra = -raising.weight.shape[0] % _INNER

        def rows(part: Affine) -> Affine:
            if not extra:
                return part
            bias = None if part.bias is None else F.pad(part.bias, (0, extra))
            return Affine(weight=F.pad(part.weight, (0, 0, 0, extra)), bias=bias)

        columns = F.pad(lowering.weight, (0, extra)) if extra else lowering.weight
        return Mlp(
            up=self._product(rows(raising)),
            down=self._product(replace(lowering, weight=columns)),
            gate=None if gating is None else self._product(rows(gating)),
        )

    def _norm(self, name: str) -> Affine:
        """A norm in fp32, in which norms compute."""
        norm = self._affine(name)
        weight, bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
        return Affine(weight=weight + self._of.norm_offset if self._of.norm_offset else weight, bias=bias)

    def _matrix(self, name: str) -> UnreadAffine:
        """A linear layer, or GPT-2's Conv1D, whose weight is [in, out]."""
        found = self._unread(name)
        return replace(found, weight=found.weight.t()) if self._names.fused == "columns" else found

    def _affine(self, name: str) -> Affine:
        return self._read(self._unread(name))

    def _unread(self, name: str) -> UnreadAffine:
        bias = self._stored(f"{name}.bias") if f"{name}.bias" in self._state else None
        return UnreadAffine(weight=self._stored(f"{name}.weight"), bias=bias)

    def _read(self, unread: UnreadAffine) -> Affine:
        weight, bias = self._values(unread.weight), None if unread.bias is None else self._values(unread.bias)
        return Affine(weight=weight, bias=bias, full=unread.full, start=unread.start, columns=unread.columns)

    def _stored(self, name: str) -> Stored:
        if name not in self._state:
            raise ValueError(f"the weights lack {name}, which a model of the family {self._of.family} has")
        return Stored.of(self._source, name)

    def _tensor(self, name: str) -> Tensor:
        return self._values(self._stored(name))

    def _values(self, stored: Stored) -> Tensor:
        found = stored.read()
        if (
            not found.sum().isfinite() and not found.isfinite().all()
        ):  # a sum is five times faster, and finite only where all are
            raise ValueError(
                f"the parameter {stored.name} is not finite: a model whose parameters are sharded is passed as its engine, Generator(engine); "
                "otherwise look for NaN or inf in the weights"
            )
        if self._placement.by_kernels:  # as stored: a product on the same device and of the same dtype is a view of it
            return found.to(self._placement.device)
        return found.to(device="cpu", dtype=torch.float32)


def _rows_of(full: UnreadAffine, start: int, stop: int) -> UnreadAffine:
    return replace(full, weight=full.weight[start:stop], bias=None if full.bias is None else full.bias[start:stop])


def _halves(both: Stored) -> tuple[UnreadAffine, UnreadAffine]:
    """Gate and up in one: the first and the second half of the rows."""
    half = both.shape[0] // 2
    return UnreadAffine(weight=both[:half]), UnreadAffine(weight=both[half:])
