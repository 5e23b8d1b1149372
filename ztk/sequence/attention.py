"""Attention between two exchanges: any attention that takes heads works, because each rank sees whole sequences of its heads."""

import math

from torch import Tensor, nn

from ztk.runtime import Comm
from ztk.sequence.exchange import to_heads, to_sequence


class UlyssesAttention(nn.Module):
    """Wraps `core(query, key=, value=)` on [B, T, H, D]; queries, keys and values arrive as parts [B, T / n, H, D].

    The number of query heads must be a multiple of the number of ranks. Key and value heads are repeated as often as the ranks need.
    `active` False: the core alone, for sequences that are not cut.
    """

    def __init__(self, core: nn.Module, *, comm: Comm, name: str) -> None:
        super().__init__()
        self.core, self.active = core, False
        self._comm, self._name = comm, name

    def forward(self, query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
        if not self.active:
            return self.core(query, key=key, value=value)
        repeats = key_repeats(heads=query.shape[2], key_heads=key.shape[2], ranks=self._comm.size)
        query = to_heads(query, comm=self._comm, label=f"{self._name} query")
        key, value = (
            to_heads(x.repeat_interleave(repeats, dim=2) if repeats > 1 else x, comm=self._comm, label=label)
            for x, label in ((key, f"{self._name} key"), (value, f"{self._name} value"))
        )
        out = self.core(query, key=key, value=value)
        return to_sequence(out, comm=self._comm, label=f"{self._name} out")


def key_repeats(*, heads: int, key_heads: int, ranks: int) -> int:
    """How often each key head is repeated so that `ranks` get equally many, each beside its queries.

    Raises ValueError if the query heads do not divide.
    """
    if heads % ranks:
        raise ValueError(
            f"topology.sequence={ranks}: {heads} heads cannot be shared out among {ranks} ranks; use a degree that divides {heads}"
        )
    repeats = ranks // math.gcd(key_heads, ranks)
    return repeats if heads % (key_heads * repeats) == 0 else heads // key_heads
