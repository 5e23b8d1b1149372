"""`GatherReplacedLayerParams`: parameters of layers that are shared by tensor-parallel ranks, full for a while."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ztk.deepspeed.owners import owner_of


class GatherReplacedLayerParams:
    """Inside, every parameter has the values and shape of the full model on all tensor-parallel ranks, to read; after it the rank's part is
    back. Every rank of the group enters with the same parameters.

    params: a parameter or parameters of an engine; those that no layer cuts stay as they are. module: accepted. enabled: false does nothing.
    At stage 3 it belongs inside `GatheredParameters`, as OpenRLHF writes it.
    """

    def __init__(
        self, params: nn.Parameter | Iterable[nn.Parameter], module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        del module
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = given if enabled else []
        self._parts: dict[nn.Parameter, Tensor] = {}

    def __enter__(self) -> None:
        for parameter in self._params:
            if (full := _full(parameter)) is not None:
                self._parts[parameter] = parameter.data
                parameter.data = full

    def __exit__(self, *error: object) -> None:
        for parameter, part in self._parts.items():
            parameter.data = part
        self._parts.clear()


def _full(parameter: nn.Parameter) -> Tensor | None:
    """The full model's values, put together from the ranks' parts; None for a parameter that is not cut."""
    owner = owner_of(parameter)
    if owner is None:
        return None
    part = owner.engine.zero.state.part_of(owner.name, bucket=owner.bucket)
    if part.is_full:
        return None
    comm = owner.engine.process.mesh.comm("tp")
    full = torch.empty(part.full_shape, dtype=parameter.dtype, device=parameter.device)
    for place, values in comm.gather_objects((part, parameter.detach().cpu())):
        place.of(full).copy_(values)
    return full
