"""Sections that divide a model over ranks: tensor_parallel, expert_parallel and moe.

expert_parallel (DeepSpeed's AutoEP) spreads the experts of a Hugging Face model over ranks. moe, with moe_expert_parallel_size, has
arguments for a model's `MoE` layers; guides recommend it, but DeepSpeed itself ignores it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ztk.core.policies.ranges import pattern_faults
from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    at_least,
    boolean,
    fixed,
    hint,
    one_of,
    one_or_more_texts,
    optional,
    read_section,
    takes,
    text,
    whole_number,
)
from ztk.parallel.tensor import TensorPolicy, plan_of

_GRAIN = "attention is cut between groups of heads, everything else between columns; parts need not be equal"
_GROUP = "the number of tensor-parallel ranks determines the groups"
_MODEL = "the model brings its own plan (transformers' tp_plan), or partition_config gives one"
_TP = {
    "enabled": hint(boolean, "tp_size determines this", usual=(True,)),
    "tp_size": takes(whole_number(1)),
    "tp_grain_size": hint(whole_number(1), _GRAIN, usual=(1,)),
    "mpu": fixed(None, why=f"{_GROUP}; leave it out"),
    "tp_group": fixed(None, why=f"{_GROUP}; leave it out"),
}
# Guides write tp_size and its neighbours at the top of the section; DeepSpeed itself reads them only inside "tp".
_TENSOR_KEYS = _TP | {
    "autotp_size": takes(whole_number(0)),
    "tp": takes(anything),
    "dtype": hint(anything, "bf16 and fp16 say in which dtype the model trains"),
    "tp_overlap_comm": hint(boolean, "sums run on a thread of their own anyway", usual=(False,)),
    "vocab_parallel_lm_head": hint(anything, "the model's plan determines the cut of the head", usual=(None,)),
    "vocab_parallel_ce_backend": hint(anything, "the native decoder's loss never gathers its logits", usual=("torch",)),
    "injection_policy_tuple": fixed(None, why="use partition_config.layer_specs instead"),
    "partition_config": takes(anything),
    "preset_model": hint(anything, _MODEL, usual=(None,)),
    "keep_module_on_host": fixed(False, why="use zero_optimization.offload_param instead"),
    "kernel_inject": fixed(False, why="belongs to init_inference; leave it out"),
}
_PARTITION = {
    "use_default_specs": takes(boolean),
    "layer_specs": takes(anything),
}
_SPEC = {
    "patterns": takes(one_or_more_texts),
    "partition_type": takes(one_of("row", "column", "skip")),
    "shape": fixed(None, why="weights that hold several layers are cut by the model's own plan only; leave it out"),
    "partition_dim": fixed(None, why="partition_type determines the dimension; leave it out"),
    "model_types": hint(anything, "patterns alone choose the layers"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSettings:
    """degree: number of ranks that share a layer.
    specs: ordered regular expressions of parameter names -> "row", "column" or "skip". None uses only the model's own plan.
    keeps_plan: layers that no expression matches follow the model's own plan.
    """

    degree: int = 1
    specs: tuple[tuple[str, str], ...] | None = None
    keeps_plan: bool = True

    def policy(self, model: nn.Module) -> TensorPolicy | None:
        """Returns the plan for `model`, or None if nothing is cut. Raises ValueError for an expression that matches none of its
        layers.
        """
        if self.degree == 1:
            return None
        if self.specs is None:
            return TensorPolicy()
        plan: dict[str, object] = dict(plan_of(model).matches(model)) if self.keeps_plan else {}
        unused = {pattern for pattern, _ in self.specs}
        for name, module in model.named_modules():
            if not isinstance(weight := getattr(module, "weight", None), nn.Parameter) or weight.dim() != 2:
                continue
            for pattern, kind in self.specs:
                if re.search(pattern, f"{name}.weight"):
                    unused.discard(pattern)
                    plan.pop(name, None)
                    if kind != "skip":
                        plan[name] = kind
                    break
        if unused:
            raise ValueError(
                f"tensor_parallel.partition_config: {min(unused)!r} matches no layer of the model; patterns are regular "
                "expressions of parameter names"
            )
        return TensorPolicy(plan=plan)


def read_tensor_parallel(given: object, *, world_size: int, findings: Findings) -> TensorSettings:
    """Reads the section for `world_size` ranks."""
    if given is None:
        return TensorSettings()
    values = read_section(given, path="tensor_parallel.", keys=_TENSOR_KEYS, findings=findings)
    inner = values.get("tp")
    nested = {} if inner is None else read_section(inner, path="tensor_parallel.tp.", keys=_TP, findings=findings)
    degrees = {values.get("autotp_size") or 1, values.get("tp_size", 1), nested.get("tp_size", 1)} - {1}
    if len(degrees) > 1:
        findings.faults.append(
            f"tensor_parallel: {sorted(degrees)} ranks are asked for in different keys; keep one of autotp_size and tp.tp_size"
        )
    degree = min(degrees, default=1)
    if world_size % degree:
        findings.faults.append(
            f"tensor_parallel: {degree} ranks share a layer, and {world_size} ranks cannot be divided by {degree}"
        )
        degree = 1
    partition = values.get("partition_config")
    if partition is None:
        return TensorSettings(degree=degree)
    path = "tensor_parallel.partition_config."
    chosen = read_section(partition, path=path, keys=_PARTITION, findings=findings)
    return TensorSettings(
        degree=degree,
        specs=tuple(_specs(chosen.get("layer_specs", []), path=path, findings=findings)),
        keeps_plan=chosen.get("use_default_specs", True),
    )


def _specs(given: object, *, path: str, findings: Findings) -> Iterator[tuple[str, str]]:
    if not isinstance(given, list):
        findings.faults.append(f"{path}layer_specs: must be a list of objects, not {given!r}")
        return
    for number, spec in enumerate(given):
        where = f"{path}layer_specs[{number}]."
        values = read_section(spec, path=where, keys=_SPEC, findings=findings)
        patterns = values.get("patterns", ())
        if not patterns or "partition_type" not in values:
            findings.faults.append(f"{where.rstrip('.')}: needs patterns and partition_type")
            continue
        for pattern in patterns:
            faults = [*pattern_faults(pattern, key=f"{where}patterns")]
            findings.faults += faults
            if not faults:
                yield pattern, values["partition_type"]


_FOUND = "layers, their sizes and their routing are the model's own; only the experts are spread"
_OWN = "the model's own forward runs its experts"
_WIRES = "tokens are sent by ztk's own all-to-all, as many rows as were routed"
_ROUTING = "the model routes as it always does; change its configuration instead, and leave it out"
_EXPERT_KEYS = {
    "enabled": takes(boolean),
    "autoep_size": takes(whole_number(1)),
    "moe_layer_pattern": takes(optional(text)),
    "expert_tensor_parallel_size": fixed(1, why="an expert is never cut over ranks; use 1 and raise autoep_size"),
    "validate_folding_routing": hint(boolean, _FOUND, usual=(False,)),
    "async_split_plan": hint(boolean, _WIRES, usual=(False,)),
    **{
        name: hint(anything, _FOUND, usual=(None, "auto"))
        for name in (
            *("preset_model", "expert_pattern", "router_pattern", "expert_w1", "expert_w2", "expert_w3"),
            *("num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern"),
            *("shared_experts_gate_pattern", "expert_activation"),
        )
    },
    "use_grouped_mm": hint(boolean, _OWN, usual=(True,)),
    "disable_triton_grouped_mm": hint(boolean, _OWN, usual=(False,)),
    "combine_impl": hint(one_of("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"), _OWN, usual=("auto",)),
    "row_weighting_impl": hint(one_of("auto", "eager", "fused"), _OWN, usual=("auto",)),
    "gate_up_impl": hint(one_of("separate", "fused"), _OWN, usual=("separate",)),
    "comm_backend": fixed("comm", why="not offered by ztk; use 'comm'"),
    "comm_num_sm": hint(whole_number(), _WIRES, usual=(12,)),
    "comm_qp_margin": hint(whole_number(), _WIRES, usual=(4,)),
    "comm_max_tokens_per_rank": hint(whole_number(), _WIRES, usual=(0,)),
    "route_norm": fixed(None, why=_ROUTING),
    "route_scale": fixed(1.0, 1, why=_ROUTING),
    "score_apply": fixed("auto", why=_ROUTING),
    "score_func": fixed("auto", why=_ROUTING),
    "top_k": fixed("auto", why=_ROUTING),
    "routed_scaling_factor": fixed("auto", why=_ROUTING),
    "num_expert_groups": fixed(None, why=_ROUTING),
    "num_limited_groups": fixed(None, why=_ROUTING),
    "load_balance_coeff": fixed(None, why="DeepSpeed has no use for it either; leave it out"),
}


_BUILT = "belongs to the layer that the script makes"
_LAYER_KEYS = {
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
class ExpertParallel:
    """size: number of data-parallel ranks over which experts are spread.
    pattern: a regular expression for the names of the layers, or None for all with experts.
    layers: arguments of `MoE` by name, for layers that use the defaults. A layer with another value is rejected.
    """

    size: int = 1
    pattern: str | None = None
    layers: dict[str, Any] = field(default_factory=dict)


def read_experts(given: dict, *, top: dict, ranks: int, findings: Findings) -> ExpertParallel:
    """Reads both sections, of which a disabled one has no effect.

    given: the full configuration. top: its effective top-level values. ranks: number of data-parallel ranks.
    """
    section, values = given.get("expert_parallel"), {}
    if section is not None:
        values = read_section(section, path="expert_parallel.", keys=_EXPERT_KEYS, findings=findings)
    if not values.get("enabled", False):
        values = {}
    layers = _read_layers(given.get("moe"), asked=top.get("moe_expert_parallel_size"), findings=findings)
    sizes = {"expert_parallel.autoep_size": values.get("autoep_size", 1), "moe.ep_size": layers.get("ep_size", 1)}
    asked = {key: size for key, size in sizes.items() if size > 1}
    if len(set(asked.values())) > 1:
        findings.faults.append(f"{' and '.join(f'{key}={size}' for key, size in asked.items())}: keep one")
    for key, size in asked.items():
        if ranks % size:
            findings.faults.append(
                f"{key}={size}: {ranks} data-parallel rank{'s' if ranks > 1 else ''} cannot be divided by {size}; start a multiple of "
                f"{size}, or write a divisor of {ranks}"
            )
    return ExpertParallel(size=max(sizes.values()), pattern=values.get("moe_layer_pattern"), layers=layers)


def _read_layers(section: object, *, asked: int | None, findings: Findings) -> dict[str, Any]:
    """Returns the arguments in `moe`. asked: moe_expert_parallel_size."""
    values: dict[str, Any] = {}
    if section is not None:
        values = read_section(section, path="moe.", keys=_LAYER_KEYS, findings=findings)
    is_on = values.pop("enabled", True)
    values = values if is_on else {}
    if asked is not None and not is_on and asked > 1:
        findings.faults.append(
            f"moe_expert_parallel_size={asked}: asks for experts, and moe.enabled is false; keep one"
        )
    if asked is not None and values.setdefault("ep_size", asked) != asked:
        findings.faults.append(f"moe_expert_parallel_size={asked}: moe.ep_size={values['ep_size']} differs; keep one")
    return values
