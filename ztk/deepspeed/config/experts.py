"""expert_parallel (DeepSpeed's AutoEP): the experts of a Hugging Face model, spread over ranks."""

from dataclasses import dataclass

from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    boolean,
    fixed,
    hint,
    one_of,
    optional,
    read_section,
    takes,
    text,
    whole_number,
)

_FOUND = "layers, their sizes and their routing are the model's own; only the experts are spread"
_OWN = "the model's own forward runs its experts"
_WIRES = "tokens are sent by ztk's own all-to-all, as many rows as were routed"
_ROUTING = "the model routes as it always does; change its configuration instead, and leave it out"
KEYS = {
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallel:
    """Over how many ranks experts are spread, and of which layers: a regular expression for their names, None for all that have some."""

    size: int = 1
    pattern: str | None = None


def read_expert_parallel(given: object, *, findings: Findings) -> ExpertParallel:
    """The section, or its defaults while it is off or missing."""
    if given is None:
        return ExpertParallel()
    values = read_section(given, path="expert_parallel.", keys=KEYS, findings=findings)
    if not values.get("enabled", False):
        return ExpertParallel()
    return ExpertParallel(size=values.get("autoep_size", 1), pattern=values.get("moe_layer_pattern"))
