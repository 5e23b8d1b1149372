"""Policy of tensor parallelism. The topology has the number of ranks that share a layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from ztk.parallel.tensor.rules import TensorRule


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPolicy:
    """How layers are cut over the tensor-parallel ranks.

    plan: module patterns to "column", "row", "vocabulary", "column_gathered", "row_split", "partial" or a `TensorRule`. Defaults to the
    model's
        own plan, or one derived from its modules.
    sequence_parallel: between tensor-parallel layers, norms and residuals work on each rank's part of the sequence: the same bytes on the
        wire, 1/n of the activations there (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
    """

    plan: Mapping[str, str | TensorRule] | None = None
    sequence_parallel: bool = False
