"""torch's `flop_registry`, extended by formulas that torch lacks."""

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["flop_registry"]
_GROUPED = torch.ops.aten._grouped_mm  # used for experts in transformers


def _grouped_flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """Every row is multiplied by one matrix, so all groups together cost one product. [E, M, K] by [K, S]: each matrix of a has its own
    columns of b."""
    matrices = a[0] if len(a) == 3 and len(b) == 2 else 1
    return 2 * a.numel() * b[-1] // matrices


if _GROUPED not in flop_registry:  # later versions of torch may define it
    register_flop_formula(_GROUPED)(_grouped_flops)
