"""The mesh that a script asks for by the layers of its model."""

from torch import nn

from ztk.core.runtime import Topology
from ztk.parallel.moe import MoE


def expert_topology(model: nn.Module, *, at_least: int = 1) -> Topology:
    """All ranks data-parallel, and experts spread over as many as the layers' `ep_size` or `at_least`, the configuration's, says.

    Raises ValueError for different sizes; 1, all experts on every rank, goes with any.
    """
    sizes = sorted({module.ep_size for module in model.modules() if isinstance(module, MoE)} | {at_least})
    sizes = [size for size in sizes if size > 1]
    if len(sizes) > 1:
        raise ValueError(
            f"experts over {' and '.join(map(str, sizes))} ranks: one model has one expert axis; use the same ep_size (and "
            "expert_parallel.autoep_size), or 1"
        )
    return Topology(expert=sizes[0] if sizes else 1)
