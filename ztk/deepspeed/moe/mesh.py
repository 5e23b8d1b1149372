"""The mesh that a script asks for by the layers of its model."""

from torch import nn

from ztk.moe import MoE
from ztk.runtime import Topology


def expert_topology(model: nn.Module) -> Topology:
    """All ranks data-parallel, and experts spread over as many as the layers' `ep_size` says.

    Raises ValueError for layers that ask for different sizes; 1, all experts on every rank, goes with any.
    """
    sizes = sorted({module.ep_size for module in model.modules() if isinstance(module, MoE)} - {1})
    if len(sizes) > 1:
        raise ValueError(
            f"MoE layers with ep_size={' and '.join(map(str, sizes))}: one model has one expert axis; use the same ep_size, or 1"
        )
    return Topology(expert=sizes[0] if sizes else 1)
