"""A LoRA adapter without its model: two matrices for each adapted layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """The adapter of one linear layer: down [rank, in], up [out, rank] of any dtype, and the factor of their product."""

    down: Tensor
    up: Tensor
    scale: float

    def delta(self) -> Tensor:
        """The difference that a merge adds to the weight: fp32 [out, in] on the CPU."""
        up, down = (part.detach().to("cpu").float() for part in (self.up, self.down))
        return up @ down * self.scale


Adapter = Mapping[str, LowRank]  # by the name of the layer in the base
