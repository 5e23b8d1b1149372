"""Chooses how each module is cut: by the native model's plan, a Hugging Face model's `tp_plan`, the module
tree, or the user's patterns."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from ztk.core.policies.tensor import Style, TensorRule, tensor_rule
from ztk.nn import Decoder
from ztk.parallel.tensor.derived import derived_rules
from ztk.parallel.tensor.heads import Heads, is_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """Patterns of module names (`blocks.*.mlp.up`; * stands for any text without a dot) to rules. Modules that no pattern
    matches are copied."""

    rules: Mapping[str, TensorRule]

    @staticmethod
    def of(patterns: Mapping[str, "str | TensorRule"]) -> "TensorPlan":
        """From a user's `{pattern: "column"|"row"|"column:64"|...}`. Raises ValueError for an unknown style.

        A user's loss takes full logits, so the outputs of a head are gathered.
        """
        rules = {}
        for pattern, given in patterns.items():
            rule = given
            if not isinstance(rule, TensorRule):
                style, grain = tensor_rule(pattern, text=given)
                rule = TensorRule(style=Style(style), grain=grain)
            rules[pattern] = replace(rule, style=Style.column_gathered) if rule.style is Style.head else rule
        return TensorPlan(rules=rules)

    def matches(self, model: nn.Module, *, is_stage: bool = False) -> dict[str, TensorRule]:
        """Module name -> rule, in order of definition. Raises ValueError for a pattern without a matching module, unless `model` is a
        pipeline stage, which has only some of the modules."""
        found, unused = {}, set(self.rules)
        for name, _ in model.named_modules():
            for pattern, rule in self.rules.items():
                if _matches(name, pattern=pattern):
                    found[name] = rule
                    unused.discard(pattern)
        if unused and not is_stage:
            raise ValueError(
                f"tensor plan {sorted(unused)[0]}: the model has no such module; name modules as model.named_modules() does, "
                "with * for a part of a name"
            )
        return found


def plan_of(model: nn.Module) -> TensorPlan:
    """The model's own plan, or else one derived from its module tree. Raises ValueError if there is neither."""
    if isinstance(model, Decoder):
        return _decoder_plan(model)
    if own := getattr(model, "tensor_plan", None):
        return TensorPlan.of(own)
    if plan := _hugging_face_plan(model):
        return plan
    if rules := derived_rules(model):
        return TensorPlan(rules=rules)
    raise ValueError(
        f"topology.tensor: {type(model).__name__} has no tensor plan, and none follows from its modules; give the class an attribute "
        "tensor_plan = {'layers.*.up': 'column', 'layers.*.down': 'row', ...}, or set topology.plan"
    )


def _decoder_plan(model: Decoder) -> TensorPlan:
    config = model.config
    key_grain = config.head_dim
    query_grain = config.head_dim * (config.heads // config.kv_heads)  # query heads stay with their key head
    rules = {
        "embedding": TensorRule(style=Style.vocabulary),
        "blocks.*.attention.query": TensorRule(style=Style.column, grain=query_grain),
        "blocks.*.attention.key": TensorRule(style=Style.column, grain=key_grain),
        "blocks.*.attention.value": TensorRule(style=Style.column, grain=key_grain),
        "blocks.*.attention.out": TensorRule(style=Style.row, grain=query_grain),
        "blocks.*.mlp.gate": TensorRule(style=Style.column),
        "blocks.*.mlp.up": TensorRule(style=Style.column),
        "blocks.*.mlp.down": TensorRule(style=Style.row),
        "head": TensorRule(style=Style.head),
        "loss": TensorRule(style=Style.loss),
    }
    if (
        model.head is not None and len(model.head.weight) != config.vocab_size
    ):  # a value per token, copied on every rank
        del rules["head"], rules["loss"]
    here = TensorPlan(rules=rules)
    names = [name for name, _ in model.named_modules()]  # a model whose weights are tied has no head
    return TensorPlan(
        rules={
            pattern: rule
            for pattern, rule in here.rules.items()
            if any(_matches(name, pattern=pattern) for name in names)
        }
    )


# transformers' `tp_plan` styles -> ours. Modules with other styles are copied.
_HUGGING_FACE = {
    "colwise": Style.column,
    "colwise_rep": Style.column_gathered,
    "colwise_gather_output": Style.column_gathered,
    "rowwise": Style.row,
    "rowwise_split_input": Style.row_split,
    "replicated_with_grad_allreduce": Style.partial,
    "embedding_rowwise": Style.vocabulary,
}


def _hugging_face_plan(model: nn.Module) -> TensorPlan | None:
    """From `model.tp_plan` (transformers 5): {"model.layers.*.self_attn.q_proj": "colwise", ...}."""
    patterns = getattr(model, "tp_plan", None)
    if not patterns:
        return None
    heads = Heads.of(getattr(model, "config", None))
    names = [name for name, _ in model.named_modules()]
    rules = {}
    for pattern, style in patterns.items():
        if style in _HUGGING_FACE and any(_matches(name, pattern=pattern) for name in names):
            grain = heads.grain(pattern) if heads is not None and is_attention(pattern) else 1
            rules[pattern] = TensorRule(style=_HUGGING_FACE[style], grain=grain)
    return TensorPlan(rules=rules)


def _matches(name: str, *, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
