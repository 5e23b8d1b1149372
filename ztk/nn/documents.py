"""Documents that share a sequence without attending to each other."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Positions of the documents in a micro-batch of B sequences of T tokens. This is an argument of the model rather than a tensor of the
    batch, so techniques that transform the batch's tensors do not change it.

    positions: int64 [B, T], the position of each token in its document. cu_seqlens: int32 [documents + 1] over the B T tokens, as in
    `ztk.kernels.attention_varlen`. longest: tokens of the longest document. starts: per sequence, the positions where its documents begin,
    on the host. continued: per document, the number of the document whose tokens precede its own, or -1. None if no document continues
    another.
    Only some implementations of attention support it.
    """

    positions: Tensor
    cu_seqlens: Tensor
    longest: int
    starts: tuple[tuple[int, ...], ...]
    continued: tuple[int, ...] | None = None

    @staticmethod
    def at(positions: Tensor) -> "Documents":
        """From positions on the CPU, int64 [B, T]: a document starts where they are 0, and with every sequence."""
        starts = torch.nonzero(positions.flatten() == 0).flatten()
        cu_seqlens = torch.cat([starts, starts.new_tensor([positions.numel()])])
        return Documents(
            positions=positions,
            cu_seqlens=cu_seqlens.to(torch.int32),
            longest=int(cu_seqlens.diff().max()),
            starts=tuple(tuple(torch.nonzero(row == 0).flatten().tolist()) for row in positions),
        )

    def to(self, device: torch.device) -> "Documents":
        """Copies to `device`. From pinned memory, a copy to a GPU does not block."""
        if device.type == "cpu":
            return self
        moved = (x.pin_memory().to(device, non_blocking=True) for x in (self.positions, self.cu_seqlens))
        positions, cu_seqlens = moved
        return replace(self, positions=positions, cu_seqlens=cu_seqlens)
