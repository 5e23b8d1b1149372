"""Makes a decoder work on this rank's part of each sequence."""

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ztk.nn import Decoder
from ztk.nn.attention import Attention
from ztk.nn.documents import Documents
from ztk.nn.loss import IGNORED
from ztk.nn.staged import Arguments, argument, sequence_length
from ztk.runtime import Comm, Mesh
from ztk.sequence.attention import UlyssesAttention, key_repeats


def cut_sequences(model: Decoder, *, mesh: Mesh, tokens_cut_along_tp: bool = False) -> None:
    """Rewires `model` in place: `model(tokens, targets)` takes full sequences [B, T], equal on all ranks of the axis, and works on this
    rank's part [B, T / n].

    tokens_cut_along_tp: between layers, tensor-parallel ranks cut this rank's part once more.
    The model returns this rank's share of the loss: the mean of the shares over the axis is the mean over all counted targets. Without
    targets every rank works on the full sequences.

    Raises:
        ValueError: for a model other than the native decoder, and for heads that the ranks do not divide; when the model is called, for
            sequences that they do not divide.
    """
    if not isinstance(model, Decoder):
        raise ValueError(f"topology.sequence: {type(model).__name__} is not a ztk.nn.Decoder; use topology.sequence=1")
    comm = mesh.comm("sp")
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    for name, layer in layers:
        heads = layer.query.weight.shape[0] // layer.head_dim
        key_repeats(heads=heads, key_heads=layer.key.weight.shape[0] // layer.head_dim, ranks=comm.size)
        layer.core = UlyssesAttention(layer.core, comm=comm, name=name)
    found = [layer for _, layer in layers]
    if hasattr(model.forward, "num_stages"):
        carry_parts = comm.size * (mesh.comm("tp").size if tokens_cut_along_tp else 1)
        model.forward = _cut_stages(model, layers=found, comm=comm, carry_parts=carry_parts)
    else:
        model.forward = _cut_model(model, layers=found, comm=comm)


def _cut_model(model: Decoder, *, layers: list[Attention], comm: Comm) -> Callable:
    """The forward `(tokens, targets)` of a model without stages."""
    original = model.forward

    @functools.wraps(original)
    def forward(tokens: Tensor, targets: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        _begin(layers, comm=comm, length=tokens.shape[1], is_cut=targets is not None)
        if targets is None:
            return original(tokens, documents=documents)
        own = _own(targets, comm=comm)
        return original(_own(tokens, comm=comm), own, documents) * _share(own, targets=targets, comm=comm)

    return forward


def _cut_stages(model: Decoder, *, layers: list[Attention], comm: Comm, carry_parts: int) -> Callable:
    """The forward `(stage, carry, micro-batch)` of a pipeline. carry_parts: into how many parts a training pass cuts a sequence."""
    original = model.forward

    @functools.wraps(original)
    def forward(stage: int, carry: object, batch: Arguments) -> object:
        tokens, targets = argument(batch, index=0, name="tokens"), argument(batch, index=1, name="targets")
        length = sequence_length(batch, carry=carry, parts=carry_parts)
        is_absent = tokens is None and targets is None  # on a middle rank, in training
        _begin(layers, comm=comm, length=length, is_cut=is_absent or targets is not None)
        if targets is None:
            # pyrefly: ignore[bad-argument-count]  # the forward of a stage, which a pipeline has put there
            return original(stage, carry, batch)
        own = _own(targets, comm=comm)
        own_tokens = None if tokens is None else _own(tokens, comm=comm)
        # pyrefly: ignore[bad-argument-count]  # the forward of a stage, which a pipeline has put there
        documents = argument(batch, index=2, name="documents")  # of the full sequences
        out = original(stage, carry, replace(batch, args=(own_tokens, own, documents), kwargs={}))
        # pyrefly: ignore[missing-attribute]  # the forward of a stage, which a pipeline has put there
        return out * _share(own, targets=targets, comm=comm) if stage == original.num_stages - 1 else out

    return forward


def _begin(layers: list[Attention], *, comm: Comm, length: int, is_cut: bool) -> None:
    """Tells the attention layers where this rank's part of the sequences starts."""
    if is_cut and length % comm.size:
        raise ValueError(
            f"data.seq_len={length} is not a multiple of topology.sequence={comm.size}; change one of them"
        )
    for layer in layers:
        layer.core.active = is_cut
        layer.first_position = comm.rank * length // comm.size if is_cut else 0


def _own(tokens: Tensor, *, comm: Comm) -> Tensor:
    return tokens.chunk(comm.size, dim=1)[comm.rank]


def _share(own: Tensor, *, targets: Tensor, comm: Comm) -> Tensor:
    """The weight of this rank's mean loss: 1, unless ignored targets are spread unevenly. A device scalar; the host does not wait."""
    counted = (own != IGNORED).sum()
    return counted * comm.size / (targets != IGNORED).sum().clamp(min=1)
