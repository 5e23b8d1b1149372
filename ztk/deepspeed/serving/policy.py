"""`injection_policy`: from the names of layers whose results are summed over ranks to a plan of cuts.

Inside a layer of the class that the policy names, its linear layers are cut: those it lists by rows, whose partial results are summed, all
others by columns. Attention is cut between heads. Outside of these layers the model's own plan holds, where it brings one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ztk.tensor import Heads, Style, TensorRule, is_attention, plan_of

Policy = Mapping[type[nn.Module], tuple[str, ...]]
_QUERY_HEADS = ("num_heads", "num_attention_heads", "num_attn_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_WIDTHS = ("all_head_size", "inner_dim", "embed_dim", "hidden_size", "d_model")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPlan:
    """rules: module name -> how it is cut. attention: names of modules that hold the projections into heads."""

    rules: dict[str, TensorRule]
    attention: tuple[str, ...]


def policy_of(model: nn.Module, *, suffixes: tuple[str, ...]) -> Policy:
    """Names without a class are those of the layers in the model's lists of layers. Raises ValueError if none holds any."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    kinds = {type(layer) for layers in lists for layer in layers if any(_ending(layer, suffixes=suffixes))}
    if not kinds:
        raise ValueError(f"injection_policy_tuple={suffixes}: no layer of {type(model).__name__} has such a module")
    return dict.fromkeys(kinds, suffixes)


def plan_of_policy(model: nn.Module, *, policy: Policy) -> PolicyPlan:
    """Raises ValueError for a class or a name that the model does not have, and for layers that cannot be cut so."""
    own, heads = _own_rules(model), Heads.of(getattr(model, "config", None))
    rules: dict[str, TensorRule] = {}
    attention: dict[str, None] = {}
    inside: set[str] = set()
    for kind, suffixes in policy.items():
        layers = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
        if not layers:
            raise ValueError(f"injection_policy: {type(model).__name__} has no {kind.__name__}")
        for suffix in suffixes:
            if not any(any(_ending(layer, suffixes=(suffix,))) for layer in layers.values()):
                raise ValueError(
                    f"injection_policy[{kind.__name__}]: no {kind.__name__} has a module named ...{suffix}"
                )
        for name, layer in layers.items():
            inside.update(f"{name}.{below}" for below, _ in layer.named_modules())
            for below, rule in _rules(layer, suffixes=suffixes, heads=heads):
                full = f"{name}.{below}"
                rules[full] = rule if rule is not None else _declared(full, own=own)
                if rules[full].style is Style.column and is_attention(below):
                    attention[full.rpartition(".")[0]] = None
    rules |= {name: rule for name, rule in own.items() if name not in inside}
    return PolicyPlan(rules=rules, attention=tuple(attention))


def count_own_heads(model: nn.Module, *, plan: PolicyPlan) -> None:
    """After the cut: modules that remember numbers of heads and widths learn those of their own part."""
    heads = Heads.of(getattr(model, "config", None))
    if heads is None:
        return
    for name in plan.attention:
        module = model.get_submodule(name)
        widths = [
            child.out_features
            for leaf, child in module.named_children()
            if f"{name}.{leaf}" in plan.rules and plan.rules[f"{name}.{leaf}"].style is Style.column
        ]
        own = {
            **dict.fromkeys(_WIDTHS, (heads.query * heads.size, max(widths))),
            **dict.fromkeys(_QUERY_HEADS, (heads.query, max(widths) // heads.size)),
            **dict.fromkeys(_KEY_HEADS, (heads.key, min(widths) // heads.size)),
        }
        for attribute, (whole, here) in own.items():
            if module.__dict__.get(attribute) == whole:
                setattr(module, attribute, here)


def _rules(
    layer: nn.Module, *, suffixes: tuple[str, ...], heads: Heads | None
) -> Iterator[tuple[str, TensorRule | None]]:
    """(name in the layer, rule); None: one that only the model's own plan could know."""
    rows = set(_ending(layer, suffixes=suffixes))
    for name, module in layer.named_modules():
        if name in rows and not isinstance(module, nn.Linear):
            raise ValueError(
                f"injection_policy: {name} is a {type(module).__name__}; only nn.Linear can be cut by rows (a Conv1D keeps its weight "
                "the other way round)"
            )
        if not isinstance(module, nn.Linear):
            continue
        in_heads = heads is not None and is_attention(name)
        grain = heads.grain(name) if in_heads else 1
        if name in rows:
            yield name, TensorRule(style=Style.row, grain=grain)
        elif in_heads and module.out_features not in (heads.query * heads.size, heads.key * heads.size):
            yield name, None
        else:
            yield name, TensorRule(style=Style.column, grain=grain)


def _declared(name: str, *, own: Mapping[str, TensorRule]) -> TensorRule:
    if name in own:
        return own[name]
    raise ValueError(
        f"injection_policy: {name} holds several projections in one weight, and how they lie there is not known; use a model that "
        "brings a tp_plan for it, or tp_size=1"
    )


def _own_rules(model: nn.Module) -> dict[str, TensorRule]:
    try:
        return plan_of(model).matches(model)
    except ValueError:  # it brings none, and the policy is enough
        return {}


def _ending(layer: nn.Module, *, suffixes: tuple[str, ...]) -> Iterator[str]:
    for name, _ in layer.named_modules():
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes):
            yield name
