"""Sums and joins among the tensor-parallel ranks that share a model, in the order of the ranks, so that all have the same bits."""

from typing import TypeVar

import torch
from torch import Tensor

from ztk.inference.cut import Cut
from ztk.inference.describe import Description
from ztk.runtime.comm import Comm

T = TypeVar("T")


class Ranks:
    """Sums and joins among the ranks that share a model. comm: theirs."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.cut = comm, Cut(rank=comm.rank, size=comm.size)

    def sum(self, partial: Tensor) -> Tensor:
        """Of all ranks' partial [M, C], in their order and its dtype."""
        parts = self._gathered(partial)
        found = parts[0] + parts[1]
        for part in parts[2:]:
            found += part
        return found

    def join(self, part: Tensor) -> Tensor:
        """All ranks' columns: [M, N] of any dtype -> [M, size N]."""
        return torch.cat(list(self._gathered(part)), dim=1)

    def join_keys(self, part: Tensor, *, description: Description) -> Tensor:
        """The columns of all key heads, each once: [M, own heads D] of any dtype -> [M, all heads D]."""
        copies = max(1, self.cut.size // description.kv_heads)
        return torch.cat(list(self._gathered(part)[::copies]), dim=1)

    def own_heads(self, queries: Tensor, *, keys: Tensor, description: Description) -> tuple[Tensor, Tensor]:
        """The columns of this rank's heads: queries [M, H D], keys [M, K D] of all heads, of any dtype. description: of all heads."""
        cut, of = self.cut, description
        first, own = cut.rank * of.kv_heads // cut.size, max(1, of.kv_heads // cut.size)
        columns = keys[:, first * of.head_dim : (first + own) * of.head_dim]
        return queries.chunk(cut.size, dim=1)[cut.rank], columns

    def gather(self, one: T) -> list[T]:
        """Every rank's small object, in the order of the ranks."""
        with torch.inference_mode(False):
            return self.comm.gather_objects(one)

    def _gathered(self, part: Tensor) -> Tensor:
        with torch.inference_mode(False):  # the thread that communicates writes into it
            full = torch.empty(self.cut.size, *part.shape, dtype=part.dtype, device=part.device)
        full[self.cut.rank] = part
        self.comm.all_gather(full.view(-1), label="inference").wait()
        return full
