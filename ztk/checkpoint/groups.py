"""The optimizer's hyperparameters in a checkpoint, for people and other frameworks. A load ignores them: the run's own policy applies."""

from typing import Any

import torch

from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.manifest import Manifest
from ztk.kernels import Hyper
from ztk.train.engine import Engine


def gather_groups(engine: Engine) -> list[dict[str, Any]]:
    """Returns one dictionary per set of hyperparameters. A collective call.

    Each has the optimizer's options by name and "params", the parameters' names. Rates are before the schedule's factor; they come from
    an fp32 table and are rounded to 7 digits. With Muon, "muon" marks the matrices that it updates, which have no second moment.
    """
    optimizer = engine.zero.optimizer
    muon = getattr(optimizer, "muon", None)
    options = optimizer.options if muon is None else {"muon_steps": muon.steps, "nesterov": muon.nesterov}
    if (lamb := getattr(optimizer, "lamb", None)) is not None:
        options = {"min_coeff": lamb.min_coeff, "max_coeff": lamb.max_coeff}
    table = engine.control.hyper.tolist()
    own = {
        placement.name: {column.name: float(f"{table[placement.group][column]:.7g}") for column in Hyper}
        for bucket in engine.zero.buckets
        if bucket.traits.trainable
        for placement in bucket.layout.placements
    }
    if muon is not None:
        own = {name: {**row, "muon": name in engine.zero.matrices} for name, row in own.items()}
    groups: dict[tuple, dict[str, Any]] = {}
    seen: set[str] = set()
    for rank_rows in engine.process.comm.gather_objects(own):  # pipeline stages have different parameters
        for name, row in rank_rows.items():
            if name not in seen:
                seen.add(name)
                groups.setdefault(tuple(row.values()), {**row, "options": options, "params": []})["params"].append(name)
    return list(groups.values())


def check_second_moments(engine: Engine, *, manifest: Manifest) -> None:
    """Raises CheckpointError if this run needs second moments of parameters that Muon updated and that have none.

    Zeros in their place would make the first steps 1 / sqrt(1 - beta2) times too long.
    """
    if "exp_avg_sq" not in engine.zero.state_names:
        return
    trained = (bucket for bucket in engine.zero.buckets if bucket.traits.trainable)
    own = {placement.name for bucket in trained for placement in bucket.layout.placements} - engine.zero.matrices
    matrices = {info.name for info in manifest.parameters if len(info.shape) == 2}
    without: set[str] = set()
    for group in manifest.groups or ():
        # Early checkpoints do not list Muon's matrices. A run with Muon assumes that they are the same as its own.
        is_early = "muon" not in group and "muon_steps" in group["options"] and not engine.zero.matrices
        without.update(matrices.intersection(group["params"]) if is_early or group.get("muon") else ())
    if lacking := sorted(name for name in own if manifest.tied.get(name, name) in without):
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise CheckpointError(
            f"{manifest.path} was saved by optimizer=muon, which keeps no second moment of {lacking[0]}{more}, and this run divides by it: "
            "use optimizer=muon with the same matrices, or load it with weights_only=True"
        )


def torch_param_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Returns the param_groups of `get_optimizer_state_dict` for torch's optimizer of the same kind.

    Returns None for lion and lamb, which torch lacks, for muon, which is two optimizers in torch, and for a class known only by name.
    """
    made = []
    for group in groups:
        optimizer = _torch_optimizer(group)
        if optimizer is None:
            return None
        (own,) = optimizer.state_dict()["param_groups"]  # with the flags of the installed torch
        made.append({**own, "params": group["params"], "initial_lr": group["lr"]})  # schedulers read initial_lr
    return made


def _torch_optimizer(group: dict[str, Any]) -> torch.optim.Optimizer | None:
    parameters, options = [torch.nn.Parameter(torch.zeros(1))], group["options"]
    if (
        "muon_steps" in options or "min_coeff" in options or "class" in options
    ):  # a torch optimizer's own step, whose options are not in the table
        return None
    common = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    if "decoupled" in options:
        kind = torch.optim.AdamW if options["decoupled"] else torch.optim.Adam
        return kind(parameters, betas=(group["beta1"], group["beta2"]), eps=group["eps"], **common)
    if "nesterov" in options or not group["beta1"]:  # SGD with or without momentum
        nesterov = bool(options.get("nesterov") and group["momentum"])
        return torch.optim.SGD(parameters, momentum=group["momentum"], nesterov=nesterov, **common)
    return None
