"""tensor_parallel: the number of ranks that share a layer, and how layers are cut."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    boolean,
    fixed,
    hint,
    one_of,
    read_section,
    takes,
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
KEYS = _TP | {
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
    "patterns": takes(anything),
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
    values = read_section(given, path="tensor_parallel.", keys=KEYS, findings=findings)
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
        patterns: Any = values.get("patterns", [])
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not patterns or "partition_type" not in values:
            findings.faults.append(f"{where.rstrip('.')}: needs patterns and partition_type")
            continue
        for pattern in patterns:
            if not _is_expression(pattern):
                findings.faults.append(f"{where}patterns: {pattern!r} is not a regular expression")
            else:
                yield pattern, values["partition_type"]


def _is_expression(pattern: object) -> bool:
    try:
        # pyrefly: ignore[no-matching-overload]  # of the converter's type
        re.compile(pattern)
    except (re.error, TypeError):
        return False
    return True
