"""moe and moe_expert_parallel_size, which documents write and DeepSpeed does not read: arguments for the `MoE` layers of a model."""

from dataclasses import dataclass, field

from ztk.deepspeed.config.experts import ExpertParallel
from ztk.deepspeed.config.keys import (
    Findings,
    at_least,
    boolean,
    fixed,
    hint,
    one_of,
    optional,
    read_section,
    takes,
    whole_number,
)

_BUILT = "belongs to the layer that the script makes"
KEYS = {
    "enabled": takes(boolean),
    "ep_size": takes(whole_number(1)),
    "num_experts": takes(whole_number(1)),
    "k": takes(whole_number(1)),
    "capacity_factor": takes(at_least(0)),
    "eval_capacity_factor": takes(at_least(0)),
    "min_capacity": takes(whole_number(0)),
    "use_residual": takes(boolean),
    "noisy_gate_policy": takes(optional(one_of("Jitter", "RSample"))),
    "drop_tokens": takes(boolean),
    "use_rts": takes(boolean),
    "top2_2nd_expert_sampling": takes(boolean),
    "moe_param_group": hint(
        boolean, "experts may be in any parameter group; ztk reduces their gradients rightly in each"
    ),
    "use_tutel": fixed(False, why=f"{_BUILT}, and ztk routes by its own kernels; leave it out"),
    "enable_expert_tensor_parallelism": fixed(False, why="an expert is never cut over ranks; leave it out"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Arguments of `MoE` by their names, for layers that leave them at their defaults; a layer that has another value is refused."""

    values: dict[str, object] = field(default_factory=dict)


def read_moe(given: dict, *, top: dict, findings: Findings) -> LayerOptions:
    """given: the full configuration; top: its top-level values that take effect. A section that is switched off gives nothing."""
    section = given.get("moe")
    values = {} if section is None else read_section(section, path="moe.", keys=KEYS, findings=findings)
    is_on = values.pop("enabled", True)
    values = values if is_on else {}
    size = top.get("moe_expert_parallel_size")
    if size is not None and not is_on and size > 1:
        findings.faults.append(f"moe_expert_parallel_size={size}: asks for experts, and moe.enabled is false; keep one")
    if size is not None and values.setdefault("ep_size", size) != size:
        findings.faults.append(
            f"moe_expert_parallel_size={size}: moe.ep_size={values['ep_size']} says another; keep one"
        )
    return LayerOptions(values=values)


def join_sizes(experts: ExpertParallel, *, options: LayerOptions, ranks: int, findings: Findings) -> ExpertParallel:
    """Over how many of `ranks` data-parallel ranks both sections together spread the experts."""
    sizes = {"expert_parallel.autoep_size": experts.size, "moe.ep_size": options.values.get("ep_size", 1)}
    asked = {key: size for key, size in sizes.items() if size > 1}
    if len(set(asked.values())) > 1:
        findings.faults.append(f"{' and '.join(f'{key}={size}' for key, size in asked.items())}: keep one")
    for key, size in asked.items():
        if ranks % size:
            findings.faults.append(
                f"{key}={size}: {ranks} data-parallel rank{'s' if ranks > 1 else ''} cannot be divided by {size}; start a multiple of "
                f"{size}, or write a divisor of {ranks}"
            )
    return ExpertParallel(size=max(sizes.values()), pattern=experts.pattern)
