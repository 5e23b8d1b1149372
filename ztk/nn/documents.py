"""Documents that share a sequence and do not see each other."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Where the documents of a micro-batch of B sequences of T tokens lie. An argument of the model, no batch of tensors: what a technique
    does to tensors of a batch, it does not do to these.

    positions: int64 [B, T], the place of each token in its document. cu_seqlens: int32 [documents + 1] over the B T tokens, as
    `ztk.kernels.attention_varlen` takes them. longest: tokens of the longest document. starts: of each sequence the places where its
    documents begin, on the host. continued: of each document the number of the one whose tokens precede its own, -1: none do; None: no
    document goes on with another. Only an attention that says so takes that.
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
        """The same on `device`; from pinned memory a copy to a GPU waits for nothing."""
        if device.type == "cpu":
            return self
        moved = (x.pin_memory().to(device, non_blocking=True) for x in (self.positions, self.cu_seqlens))
        positions, cu_seqlens = moved
        return replace(self, positions=positions, cu_seqlens=cu_seqlens)
