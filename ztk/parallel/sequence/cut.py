"""Makes a decoder work on this rank's part of each sequence."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ztk.core.runtime import Comm, Mesh
from ztk.core.runtime.differentiable import through
from ztk.nn import Decoder, Documents
from ztk.nn.loss import IGNORED
from ztk.nn.self_attention import Attention
from ztk.nn.staged import Arguments, argument, sequence_length
from ztk.parallel.sequence.ring import CHUNKS, RingAttention
from ztk.parallel.sequence.ulysses import UlyssesAttention, key_repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class Divisible:
    """The interface of a model for `cut_sequences`.

    layers: names and attention layers, which call their `core` with parts of sequences, and whose `positions` are set to the positions of
    their tokens. last_position: the largest position of the model. If omitted, there is no limit. check_length: raises ValueError for
    tokens [B, T] that are too long. If omitted, any length is valid.
    """

    layers: list[tuple[str, Any]]
    has_experts: bool = False
    last_position: int | None = None
    check_length: Callable[[Tensor], None] | None = None


def cut_sequences(model: Any, *, mesh: Mesh, tokens_cut_along_tp: bool = False, gathers_outputs: bool = False) -> None:
    """Rewires `model` in place: `model(tokens, targets)` takes full sequences [B, T], equal on all ranks that share them, and works on this
    rank's part [B, T / n].

    n is the number of ranks of the mesh's context axis (attention goes around a ring) times its sequence axis (Ulysses). With a context
    axis, a sequence may have any length: its end is padded. tokens_cut_along_tp: between layers, tensor-parallel ranks cut this rank's part
    again. The model returns this rank's share of the loss: the mean of the shares over these ranks is the mean over all counted targets.
    Without targets every rank works on the full sequences, or with `gathers_outputs` on its part, whose output [B, T / n, ...] is gathered
    to [B, T, ...]: every rank must compute the same loss from it.

    Raises:
        ValueError: for a model that is not the native decoder and has no method `divisible()` that returns a `Divisible`, and for heads
            that the ranks do not divide; when the model is called, for sequences that they do not divide, and experts with padding.
    """
    parts_of = _divisible(model)
    context, heads = mesh.comm("cp"), mesh.comm("sp")
    cores: list[nn.Module] = []
    for name, layer in parts_of.layers:
        if context.size > 1:
            layer.core = RingAttention(layer.core, comm=context, name=name)
            cores.append(layer.core)
        if heads.size > 1:
            if isinstance(layer, Attention):
                query_heads, key_heads = (x.weight.shape[0] // layer.head_dim for x in (layer.query, layer.key))
                key_repeats(heads=query_heads, key_heads=key_heads, ranks=heads.size)
            layer.core = UlyssesAttention(layer.core, comm=heads, name=name)
            cores.append(layer.core)
    parts = Parts(
        context=context,
        heads=heads,
        further=mesh.comm("tp").size if tokens_cut_along_tp else 1,
        has_experts=parts_of.has_experts,
        last_position=parts_of.last_position,
    )
    own = _Layers(parts_of, cores=cores, parts=parts)
    given = {"own": own, "gathers": gathers_outputs}
    model.forward = _cut_stages(model, **given) if hasattr(model.forward, "num_stages") else _cut_model(model, **given)


def divides_sequences(model: nn.Module) -> bool:
    """Whether `cut_sequences` has rewired `model`."""
    return any(isinstance(module, UlyssesAttention | RingAttention) for module in model.modules())


def _divisible(model: Any) -> Divisible:
    if isinstance(model, Decoder):
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
        return Divisible(
            layers=layers,
            has_experts=bool(model.config.experts),
            last_position=model.config.max_seq_len - 1,
            check_length=model.check_length,
        )
    if not hasattr(model, "divisible"):
        raise ValueError(
            f"topology.sequence, topology.context: {type(model).__name__} is not a ztk.nn.Decoder; use topology.sequence=1 "
            "topology.context=1"
        )
    return model.divisible()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A rank's tokens of a sequence: two chunks along the context axis (see `ztk.parallel.sequence.ring`), and a contiguous part of those.

    further: number of parts into which tensor-parallel ranks cut it again.
    """

    context: Comm
    heads: Comm
    further: int
    has_experts: bool
    last_position: int | None

    @property
    def count(self) -> int:
        """Ranks that share a sequence."""
        return self.context.size * self.heads.size

    def padded(self, length: int) -> int:
        """Tokens of a sequence with padding. Raises ValueError if the ranks do not divide it."""
        if self.context.size == 1:
            if length % self.heads.size:
                raise ValueError(
                    f"data.seq_len={length} is not a multiple of topology.sequence={self.heads.size}; change one of them"
                )
            return length
        unit = CHUNKS * self.count * self.further
        padded = -(-length // unit) * unit
        if padded != length and self.has_experts:
            raise ValueError(
                f"data.seq_len={length}: topology.context={self.context.size} pads it to a multiple of {unit}, and padding would be routed to "
                f"experts; use data.seq_len={padded}"
            )
        return padded

    def own(self, tokens: Tensor, *, fill: int) -> Tensor:
        """This rank's part of [B, T] whose end is padded by `fill`."""
        tokens = F.pad(tokens, (0, self.padded(tokens.shape[1]) - tokens.shape[1]), value=fill)
        if self.context.size > 1:
            chunks = tokens.chunk(CHUNKS * self.context.size, dim=1)
            tokens = torch.cat([chunks[self.context.rank], chunks[-1 - self.context.rank]], dim=1)
        return tokens.chunk(self.heads.size, dim=1)[self.heads.rank]

    def gathered(self, part: Tensor) -> Tensor:
        """Outputs [B, T / n, ...] of every rank -> [B, T, ...]. All ranks must compute the same loss from it, of which gradients are means
        over the ranks. Without a context axis.
        """
        comm = self.heads
        return through(
            part,
            forward=lambda x: torch.cat(list(comm.gather(x, label="outputs of sequences")), dim=1),
            backward=lambda d_out: d_out.chunk(comm.size, dim=1)[comm.rank] * comm.size,
        )

    def positions(self, length: int, *, device: torch.device) -> Tensor | slice:
        """The positions of this rank's tokens in a sequence of `length`, int64 [T / n] or a slice. Padding has the last position of the
        sequence or of the tables."""
        if self.context.size == 1:
            start = self.heads.rank * length // self.heads.size
            return slice(start, start + length // self.heads.size)
        with torch.device("cpu"):
            places = torch.arange(self.padded(length))[None]
            last = length - 1 if self.last_position is None else min(length - 1, self.last_position)
            own = self.own(places, fill=0)[0].clamp_(max=last)
        return own.to(device)


class _Layers:
    """The attention layers of a model, and this rank's part of the sequences."""

    def __init__(self, model: Divisible, *, cores: list[nn.Module], parts: Parts) -> None:
        self.parts = parts
        self._model, self._cores = model, cores
        self._positions: dict[tuple[int, torch.device], Tensor | slice] = {}

    def check(self, tokens: Tensor) -> None:
        """Raises ValueError for full sequences [B, T] that are too long. The embedding only gets a part and cannot check."""
        if self._model.check_length is not None:
            self._model.check_length(tokens)

    def begin(self, *, length: int, is_cut: bool, documents: Documents | None, device: torch.device) -> None:
        """Sets the positions of the layers. length: length of full sequences; on a stage without tokens, including their padding. Raises
        ValueError for sequences that cannot be cut."""
        length = length if documents is None else documents.positions.shape[1]
        for core in self._cores:
            core.active = is_cut
        positions = self._at(length, device=device) if is_cut else None
        for _, layer in self._model.layers:
            layer.positions = positions

    def _at(self, length: int, *, device: torch.device) -> Tensor | slice:
        key = length, device
        if key not in self._positions:
            self._positions[key] = self.parts.positions(length, device=device)
        return self._positions[key]


def _cut_model(model: Any, *, own: _Layers, gathers: bool) -> Callable:
    """The forward `(tokens, targets, documents)` of a model without stages."""
    original = model.forward

    @functools.wraps(original)
    def forward(tokens: Tensor, targets: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        is_cut = targets is not None or gathers
        own.begin(length=tokens.shape[1], is_cut=is_cut, documents=documents, device=tokens.device)
        if targets is None and gathers:
            own.check(tokens)
            return own.parts.gathered(original(own.parts.own(tokens, fill=0), documents=documents))
        if targets is None:
            return original(tokens, documents=documents)
        own.check(tokens)
        part = own.parts.own(targets, fill=IGNORED)
        loss = original(own.parts.own(tokens, fill=0), part, documents)
        return loss * _share(part, targets=targets, parts=own.parts.count)

    return forward


def _cut_stages(model: Any, *, own: _Layers, gathers: bool) -> Callable:
    """The forward `(stage, carry, micro-batch)` of a pipeline."""
    original = model.forward

    @functools.wraps(original)
    def forward(stage: int, carry: object, batch: Arguments) -> object:
        tokens, targets = argument(batch, index=0, name="tokens"), argument(batch, index=1, name="targets")
        documents = argument(batch, index=2, name="documents")  # of the full sequences
        length = sequence_length(batch, carry=carry, parts=own.parts.count * own.parts.further)
        is_cut = gathers or targets is not None or tokens is None  # a middle rank has none, in training
        device = next(leaf.device for leaf in tree_leaves((tokens, targets, carry)) if isinstance(leaf, Tensor))
        own.begin(length=length, is_cut=is_cut, documents=documents, device=device)
        if targets is None and gathers:
            if tokens is not None:
                own.check(tokens)
            given = None if tokens is None else own.parts.own(tokens, fill=0)
            out = original(stage, carry, replace(batch, args=(given, None, documents), kwargs={}))
            return out if stage < original.num_stages - 1 else own.parts.gathered(out)
        if targets is None:
            return original(stage, carry, batch)
        part = own.parts.own(targets, fill=IGNORED)
        if tokens is not None:
            own.check(tokens)
            tokens = own.parts.own(tokens, fill=0)
        out = original(stage, carry, replace(batch, args=(tokens, part, documents), kwargs={}))
        if stage < original.num_stages - 1:
            return out
        return out * _share(part, targets=targets, parts=own.parts.count)

    return forward


def _share(own: Tensor, *, targets: Tensor, parts: int) -> Tensor:
    """The weight of this rank's mean loss: 1, unless ignored targets are distributed unevenly. A device scalar, without a wait of the
    host."""
    counted = (own != IGNORED).sum()
    return counted * parts / (targets != IGNORED).sum().clamp(min=1)
