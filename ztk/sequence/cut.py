"""Makes a decoder work on its rank's part of each sequence."""

import functools

from torch import Tensor

from ztk.nn import Decoder
from ztk.nn.attention import Attention
from ztk.runtime import Comm, Mesh
from ztk.sequence.attention import UlyssesAttention, key_repeats

IGNORED = -100


def cut_sequences(model: Decoder, *, mesh: Mesh) -> None:
    """Rewires `model` in place: `model(tokens, targets)` takes whole sequences, alike on all ranks of the axis, and works on the own part.

    The loss is this rank's share: its mean over the axis' ranks is the mean over all targets that count. Without targets every
    rank works on the whole sequences. Raises ValueError for a model other than the native decoder, heads that do not divide and, when
    called, sequences that do not.
    """
    if not isinstance(model, Decoder):
        raise ValueError(f"topology.sequence: {type(model).__name__} is not a ztk.nn.Decoder; use topology.sequence=1")
    comm = mesh.comm("sp")
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    for name, layer in layers:
        heads = layer.query.weight.shape[0] // layer.head_dim
        key_repeats(heads=heads, key_heads=layer.key.weight.shape[0] // layer.head_dim, ranks=comm.size)
        layer.core = UlyssesAttention(layer.core, comm=comm, name=name)
    original = model.forward

    @functools.wraps(original)
    def forward(tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        if targets is not None and length % comm.size:
            raise ValueError(
                f"data.seq_len={length} is not a multiple of topology.sequence={comm.size}; change one of them"
            )
        for _, layer in layers:
            layer.core.active = targets is not None
            layer.first_position = comm.rank * length // comm.size if targets is not None else 0
        if targets is None:
            return original(tokens)
        own = targets.chunk(comm.size, dim=1)[comm.rank]
        return original(tokens.chunk(comm.size, dim=1)[comm.rank], own) * _share(own, targets=targets, comm=comm)

    model.forward = forward


def _share(own: Tensor, *, targets: Tensor, comm: Comm) -> Tensor:
    """How much this rank's mean counts: one, unless ignored targets are spread unevenly. A device scalar; the host does not wait."""
    counted = (own != IGNORED).sum()
    return counted * comm.size / (targets != IGNORED).sum().clamp(min=1)
