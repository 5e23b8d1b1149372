"""`deepspeed.module_inject.layers.GatherReplacedLayerParams`: full parameters of tensor-parallel layers, to be read."""

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import nn

from ztk.deepspeed.owners import Owner, owner_of
from ztk.deepspeed.zero.gathered import GatheredParameters


class GatherReplacedLayerParams:
    """Inside, `param.data` is the full tensor on every rank, where ranks hold parts of it. Every rank enters and leaves.

    params: a parameter or parameters, of any shape; those that ranks hold in full stay as they are, and at stage 3 all are unsharded.
    module: the model or layer, accepted. What is written inside is lost: load weights by `engine.load_module_state_dict`.
    """

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor], module: nn.Module, enabled: bool = True) -> None:
        given = [params] if isinstance(params, torch.Tensor) else [param for param in params if param is not None]
        self.module, self.enabled, self.params = module, enabled, given if enabled else []
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(GatheredParameters(self.params))
        for param in self.params:
            owner = owner_of(param)
            full = None if owner is None else _full(param, owner=owner)
            if full is not None:
                self._own.append((param, param.data))
                param.data = full

    def __exit__(self, *error: object) -> None:
        for param, own in self._own:
            param.data = own
        self._own.clear()
        self._open.close()


def _full(param: torch.Tensor, *, owner: Owner) -> torch.Tensor | None:
    """The full tensor; None if this rank has it."""
    part = owner.engine.zero.state.part_of(owner.name, bucket=owner.bucket)
    if part.is_full:
        return None
    comm, numel = owner.engine.process.mesh.comm("tp"), 1
    for extent in part.full_shape:
        numel *= extent
    flat = torch.zeros(-(-numel // comm.size) * comm.size, dtype=param.dtype, device=param.device)
    full = flat[:numel].view(part.full_shape)
    if part.replica == 0:
        part.of(full).copy_(param.detach())
    comm.all_reduce(flat, label=owner.name).wait()
    return full
