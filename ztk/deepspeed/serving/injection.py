"""`injection_policy`: derives a plan of cuts from the names of layers whose results are summed over ranks.

Inside a layer of a class in the policy, the linear layers are cut: listed ones by rows, with summed partial results, all others by
columns. Attention is cut between heads. If the model has a plan, or one follows from its modules, that plan is used and the policy must
agree.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from ztk.parallel.tensor import Heads, Style, TensorRule, is_attention, plan_of

Policy = Mapping[type[nn.Module], tuple[str, ...]]


def policy_of(model: nn.Module, *, suffixes: tuple[str, ...]) -> Policy:
    """Returns a policy from names without a class: their classes are found in the model's lists of layers.

    Raises ValueError if there are none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    kinds = {type(layer) for layers in lists for layer in layers if any(_ending(layer, suffixes=suffixes))}
    if not kinds:
        raise ValueError(f"injection_policy_tuple={suffixes}: no layer of {type(model).__name__} has such a module")
    return dict.fromkeys(kinds, suffixes)


def rules_of_policy(model: nn.Module, *, policy: Policy) -> dict[str, TensorRule]:
    """Returns module name -> its cut.

    Raises ValueError for unknown classes and names, and for layers that cannot be cut in this way.
    """
    own, heads = _own_rules(model), Heads.of(getattr(model, "config", None))
    rules: dict[str, TensorRule] = dict(own)
    for kind, suffixes in policy.items():
        layers = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
        if not layers:
            raise ValueError(f"injection_policy: {type(model).__name__} has no {kind.__name__}")
        for suffix in suffixes:
            if not any(any(_ending(layer, suffixes=(suffix,))) for layer in layers.values()):
                raise ValueError(
                    f"injection_policy[{kind.__name__}]: no {kind.__name__} has a module named ...{suffix}"
                )
        for prefix, layer in layers.items():
            names = {below: f"{prefix}.{below}".lstrip(".") for below, _ in layer.named_modules()}
            if any(name in own for name in names.values()):
                _check_agreement(names, own=own, rows=set(_ending(layer, suffixes=suffixes)))
                continue
            for below, rule in _rules(layer, suffixes=suffixes, heads=heads).items():
                rules[names[below]] = rule
    return rules


def _rules(layer: nn.Module, *, suffixes: tuple[str, ...], heads: Heads | None) -> dict[str, TensorRule]:
    """Returns name in the layer -> rule, for all of its linear layers."""
    rows, rules = set(_ending(layer, suffixes=suffixes)), {}
    for name, module in layer.named_modules():
        if name in rows and not isinstance(module, nn.Linear):
            raise ValueError(
                f"injection_policy: {name} is a {type(module).__name__}; only nn.Linear can be cut by rows (a Conv1D keeps its weight "
                "the other way round)"
            )
        if not isinstance(module, nn.Linear):
            continue
        of_heads = heads if is_attention(name) else None
        if of_heads is not None and name not in rows:
            _check_one_projection(module, name=name, heads=of_heads)
        style = Style.row if name in rows else Style.column
        rules[name] = TensorRule(style=style, grain=1 if of_heads is None else of_heads.grain(name))
    return rules


def _check_one_projection(module: nn.Linear, *, name: str, heads: Heads) -> None:
    if module.out_features not in (heads.query * heads.size, heads.key * heads.size):
        raise ValueError(
            f"injection_policy: {name} holds several projections in one weight, and how they lie there is not known; use a model "
            "that brings a tp_plan for it, or tp_size=1"
        )


def _check_agreement(names: Mapping[str, str], *, own: Mapping[str, TensorRule], rows: set[str]) -> None:
    """Checks that the policy agrees with the model's own plan, which cuts attention between heads."""
    summed = {below for below, name in names.items() if name in own and own[name].style in (Style.row, Style.row_split)}
    for below in sorted(rows ^ summed):
        fix = "is not summed over ranks" if below in rows else "is summed over ranks, too: name it"
        raise ValueError(f"injection_policy: {names[below]} {fix} in the model's own plan, which has precedence")


def _own_rules(model: nn.Module) -> dict[str, TensorRule]:
    try:
        return plan_of(model).matches(model)
    except ValueError:  # the model has no plan, and the policy is enough
        return {}


def _ending(layer: nn.Module, *, suffixes: tuple[str, ...]) -> Iterator[str]:
    for name, _ in layer.named_modules():
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes):
            yield name
