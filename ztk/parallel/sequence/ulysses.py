"""Attention between two all-to-alls. Any attention over heads works inside, because each rank has the full sequence of its heads.

Results have the dtype of the query.
"""

import math

from torch import Tensor, nn

from ztk.core.runtime import Comm
from ztk.parallel.sequence.exchange import to_heads, to_sequence


class UlyssesAttention(nn.Module):
    """Wraps `core(query, key=, value=)` on [B, T, H, D]; its inputs and output are parts [B, T / n, H, D] of the sequence.

    The number of query heads must be a multiple of the number of ranks. Key and value heads are repeated as often as the ranks need.
    If `active` is False, only the core runs, for sequences that are not cut.
    """

    def __init__(self, core: nn.Module, *, comm: Comm, name: str) -> None:
        super().__init__()
        self.core, self.active = core, False
        self._comm, self._name = comm, name

    def forward(self, query: Tensor, *, key: Tensor, value: Tensor, **options: object) -> Tensor:
        """options: the core's, for the full sequence."""
        if not self.active:
            return self.core(query, key=key, value=value, **options)
        repeats = key_repeats(heads=query.shape[2], key_heads=key.shape[2], ranks=self._comm.size)
        query = to_heads(query, comm=self._comm, label=f"{self._name} query")
        key, value = (
            to_heads(x.repeat_interleave(repeats, dim=2) if repeats > 1 else x, comm=self._comm, label=label)
            for x, label in ((key, f"{self._name} key"), (value, f"{self._name} value"))
        )
        out = self.core(query, key=key, value=value, **options)
        return to_sequence(out, comm=self._comm, label=f"{self._name} out")


def key_repeats(*, heads: int, key_heads: int, ranks: int) -> int:
    """Number of repetitions of each key head so that every rank gets equally many, together with their query heads.

    Raises ValueError if the number of query heads is not a multiple of `ranks`.
    """
    if heads % ranks:
        raise ValueError(
            f"topology.sequence={ranks}: {heads} heads cannot be distributed over {ranks} ranks; use a degree that divides {heads}"
        )
    repeats = ranks // math.gcd(key_heads, ranks)
    return repeats if heads % (key_heads * repeats) == 0 else heads // key_heads
