"""Expert usage since the metrics were last read. One gather covers all layers and ranks, with the only wait for the device."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from ztk.core.runtime import Comm, Mesh
from ztk.nn.balance import ExpertLoad, LoadSums
from ztk.nn.moe import SparseMLP
from ztk.parallel.moe.layer import MoE


def metrics_of_experts(model: nn.Module, *, mesh: Mesh) -> Callable[[], dict[str, object]] | None:
    """`expert_metrics` of `model`, a collective call of all ranks, or None if no rank has expert layers. Pipeline stages have different
    layers, so with a pipeline this is a collective call too.
    """
    has_some = next(_loads(model), None) is not None
    if mesh.comm("pp").size > 1:
        has_some = any(mesh.world.gather_objects(has_some))
    return functools.partial(expert_metrics, model, comm=mesh.world) if has_some else None


def expert_metrics(model: nn.Module, *, comm: Comm) -> dict[str, object]:
    """The metrics of the training forwards since the last call, over all ranks of `comm`. A collective call. Empty if there were none.

    moe.balance_loss: mean over layers, 1 when even. moe.z_loss: mean over layers. moe.dropped: share of choices that were dropped.
    moe.max_load, moe.min_load: tokens of the most and the least used expert of any layer, 1 being an even share. moe.load: every
    expert's share of the choices, per layer.
    """
    taken = {name: load.take() for name, load in _loads(model)}
    own = {name: (sums.assigned.tolist(), sums.totals.tolist()) for name, sums in taken.items() if sums is not None}
    layers: dict[str, LoadSums] = {}
    for everyone in comm.gather_objects(own):
        for name, (assigned, totals) in everyone.items():
            more = LoadSums(assigned=torch.tensor(assigned).double(), totals=torch.tensor(totals).double())
            before = layers.get(name)
            layers[name] = more if before is None else before + more
    if not layers:
        return {}
    dropped, balance, z, forwards = torch.stack([layer.totals for layer in layers.values()]).unbind(1)
    shares = {name: layer.assigned / layer.assigned.sum().clamp_min(1) for name, layer in layers.items()}
    relative = [share * len(share) for share in shares.values()]
    choices = sum(float(layer.assigned.sum()) for layer in layers.values())
    return {
        "moe.balance_loss": float((balance / forwards).mean()),
        "moe.z_loss": float((z / forwards).mean()),
        "moe.dropped": float(dropped.sum()) / max(choices, 1.0),
        "moe.max_load": max(float(load.max()) for load in relative),
        "moe.min_load": min(float(load.min()) for load in relative),
        "moe.load": {name: [round(value, 6) for value in share.tolist()] for name, share in shares.items()},
    }


def _loads(model: nn.Module):
    for name, module in model.named_modules():
        if isinstance(module, SparseMLP | MoE):
            load: ExpertLoad = module.load
            yield name, load
