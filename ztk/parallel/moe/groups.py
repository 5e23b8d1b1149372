"""DeepSpeed's helpers that put expert parameters into separate groups. ztk does not need such groups; scripts make them."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ztk.parallel.moe.layer import MoE

MAX_GROUP_SIZE = 178956971  # elements, DeepSpeed's


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether `m` has a layer of experts, number of experts of the first such layer or 0)."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param(param: Tensor) -> bool:
    """Whether `param`, of any shape, belongs to an expert of `MoE`."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict) -> bool:
    """Whether the group consists of expert parameters."""
    return param_group.get("moe", False)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(parameters that belong to no expert, expert parameters)."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict | Sequence[dict], max_group_size: int | None = MAX_GROUP_SIZE
) -> list[dict]:
    """The groups without their expert parameters, then one or more groups with "moe": True per expert group name, with the same options.

    Groups need a "name". max_group_size: elements of an expert group. If None, there is no limit.

    Raises:
        ValueError: for anything but a dict or a list of dicts.
    """
    if not isinstance(param_groups, dict | list | tuple):
        raise ValueError(f"param_groups is a {type(param_groups).__name__}: must be a dict or a list of dicts")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    experts: list[dict] = []
    for group in groups:
        shared, own = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        # pyrefly: ignore[missing-attribute]  # the mark of DeepSpeed's expert parameters
        for name in sorted({parameter.group_name for parameter in own}):
            # pyrefly: ignore[missing-attribute]  # the mark of DeepSpeed's expert parameters
            of_name = [parameter for parameter in own if parameter.group_name == name]
            options = {**group, "name": name, "moe": True}
            experts += [{**options, "params": chunk} for chunk in _chunks(of_name, limit=max_group_size)]
    return groups + experts


def configure_moe_param_groups(model_parameters: list) -> list[dict]:
    """Converts a list of parameters or groups to groups with separate expert parameters. Groups with the key "moe" are not changed.

    Raises ValueError for anything but a list with elements.
    """
    if not isinstance(model_parameters, list) or not model_parameters:
        raise ValueError("model_parameters: must be a list with elements")
    if isinstance(model_parameters[0], nn.Parameter):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def _chunks(parameters: list[nn.Parameter], *, limit: int | None) -> list[list[nn.Parameter]]:
    chunks: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if chunks[-1] and limit is not None and size + parameter.numel() > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(parameter)
        size += parameter.numel()
    return chunks
