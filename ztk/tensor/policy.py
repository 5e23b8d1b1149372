"""What a user chooses about tensor parallelism; how many ranks share a layer is the topology's to say."""

from collections.abc import Mapping
from dataclasses import dataclass

from ztk.tensor.plan import TensorRule


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPolicy:
    """plan: module patterns to "column", "row", "vocabulary", "column_gathered", "row_split", "partial" or a `TensorRule`; None: the plan
    that comes with the model.

    sequence_parallel: norms and residuals between the layers that are cut work on a part of the sequence each: the same bytes on the wire,
        1/n of the activations there (Korthikanti et al. 2022).
    """

    plan: Mapping[str, str | TensorRule] | None = None
    sequence_parallel: bool = False
