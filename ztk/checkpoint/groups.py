"""The optimizer's hyperparameters in a checkpoint: for people and for other frameworks. A load takes them from the run's own policy."""

from typing import Any

from ztk.checkpoint.subject import Subject
from ztk.kernels import Hyper


def gather_groups(engine: Subject) -> list[dict[str, Any]]:
    """One dictionary per set of hyperparameters, with the names of its parameters under "params". A collective call.

    Rates are those before the schedule's factor; they come from an fp32 table and are given to 7 digits.
    """
    table = engine.control.hyper.tolist()
    own = {
        placement.name: {column.name: float(f"{table[placement.group][column]:.7g}") for column in Hyper}
        for bucket in engine.zero.buckets
        if bucket.traits.trainable
        for placement in bucket.layout.placements
    }
    groups: dict[tuple, dict[str, Any]] = {}
    seen: set[str] = set()
    for rank_rows in engine.process.comm.gather_objects(own):  # pipeline stages have different parameters
        for name, row in rank_rows.items():
            if name not in seen:
                seen.add(name)
                groups.setdefault(tuple(row.values()), {**row, "params": []})["params"].append(name)
    return list(groups.values())


def torch_param_groups(groups: list[dict[str, Any]], *, state_names: list[str]) -> list[dict[str, Any]]:
    """As `torch.optim.Optimizer.state_dict` has them, with names for parameters, as `get_optimizer_state_dict` gives them."""
    made = []
    for group in groups:
        common = {"params": group["params"], "lr": group["lr"], "weight_decay": group["weight_decay"]}
        flags = dict.fromkeys(("maximize", "capturable", "differentiable"), False) | {"foreach": None, "fused": None}
        if state_names == ["exp_avg", "exp_avg_sq"]:
            own = {"betas": (group["beta1"], group["beta2"]), "eps": group["eps"], "amsgrad": False}
        else:
            own = {"momentum": group["momentum"], "dampening": 0.0, "nesterov": False}
        made.append({**common, **own, **flags})
    return made
