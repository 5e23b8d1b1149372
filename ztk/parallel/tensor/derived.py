"""Derives a tensor-parallel plan from the module tree, by finding which linear layers feed each other.

Linear layers that are children of one module belong together: layers that read the hidden states feed the one that writes them. The readers
are cut by columns and the writer by rows (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). The arrangement of a reader's outputs
decides between two forms:

- Attention with a query, a key and a value projection, or with one projection that stores them head by head, is cut between heads. A
  gated or plain MLP whose readers all have the writer's inputs is cut between columns.
- Any other arrangement (several projections in one weight, a norm over all heads) is cut by columns too, its outputs are gathered and the
  writer reads its part of them again: weights, gradients and states are divided, and the operations between them run on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ztk.core.policies.tensor import Style, TensorRule
from ztk.nn.linear import Linear
from ztk.parallel.tensor.heads import Heads, head_by_head, is_attention

_QUERY, _KEY, _VALUE = ("q_proj", "query", "q"), ("k_proj", "key", "k"), ("v_proj", "value", "v")
# Names of layers that write the hidden states, used if sizes do not distinguish them from layers that read them.
_WRITERS = ("o_proj", "out_proj", "dense", "c_proj", "fc2", "down_proj", "dense_4h_to_h", "fc_out", "wo", "w2")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """The linear layers of one module: readers of the hidden states and the one that writes them, by name below `prefix`."""

    prefix: str
    module: nn.Module
    readers: dict[str, nn.Module]
    writer: str

    @property
    def width(self) -> int:
        """Inputs of the writer."""
        return sizes_of(self.module.get_submodule(self.writer))[0]

    def rules(self, *, readers: Style, writer: Style, grains: dict[str, int]) -> dict[str, TensorRule]:
        """Full module name -> rule."""
        found = {name: TensorRule(style=readers, grain=grains.get(name, 1)) for name in self.readers}
        found[self.writer] = TensorRule(style=writer, grain=grains.get(self.writer, 1))
        return {f"{self.prefix}.{name}": rule for name, rule in found.items()}


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is the Conv1D of transformers' GPT-2: a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    # pyrefly: ignore[not-iterable]  # nn.Module types every attribute as Tensor or Module
    first, second = module.weight.shape
    return (first, second) if is_conv1d(module) else (second, first)


def derived_rules(model: Any) -> dict[str, TensorRule]:
    """Module name -> rule, for a model with a Hugging Face configuration. Empty if no module fits.

    Experts that are stacked in one weight stay copies: `topology.expert` distributes them.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width, heads = getattr(config, "hidden_size", None), Heads.of(config)
    if not isinstance(width, int) or heads is None:
        return {}
    rules: dict[str, TensorRule] = {}
    for group in _groups(model, width=width):
        if is_attention(group.prefix):
            rules |= _attention_rules(group, heads=heads)
        else:
            rules |= _mlp_rules(group, hidden=width)
    head = model.get_output_embeddings() if rules and hasattr(model, "get_output_embeddings") else None
    if isinstance(head, nn.Linear):
        name = next(name for name, module in model.named_modules() if module is head)
        rules[name] = TensorRule(style=Style.column_gathered)
    return rules


def _groups(model: nn.Module, *, width: int) -> Iterator[_Group]:
    """Groups of linear layers in the model's lists of layers."""
    lists = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for prefix, module in model.named_modules():
        if not any(prefix.startswith(within) for within in lists):
            continue
        linear = {name: child for name, child in module.named_children() if _is_linear(child)}
        writer = _writer(linear, width=width)
        readers = {n: child for n, child in linear.items() if n != writer and sizes_of(child)[0] == width}
        if writer is not None and readers and len(readers) == len(linear) - 1:
            yield _Group(prefix=prefix, module=module, readers=readers, writer=writer)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Linear)) or is_conv1d(module)


def _writer(linear: dict[str, nn.Module], *, width: int) -> str | None:
    """The layer that writes the hidden states: the only one of their size, or else the only one with such a name."""
    found = [name for name, module in linear.items() if sizes_of(module)[1] == width]
    if len(found) > 1:
        found = [name for name in found if name in _WRITERS]
    return found[0] if len(found) == 1 else None


def _gathered(group: _Group) -> dict[str, TensorRule]:
    return group.rules(readers=Style.column_gathered, writer=Style.row_split, grains={})


def _attention_rules(group: _Group, *, heads: Heads) -> dict[str, TensorRule]:
    """Rules for a cut between heads, if the arrangement of heads is known; see the module docstring."""
    others = _others(group)
    between_heads = group.width == heads.query * heads.size and all(
        parameter.shape == (heads.size,) for module in others.values() for parameter in module.parameters()
    )
    if not between_heads or list(group.module.parameters(recurse=False)):
        return _gathered(group)
    names = set(group.readers)
    if len(names) == 1 and head_by_head(group.module):
        known = sizes_of(*group.readers.values())[1] == 3 * heads.query * heads.size
    else:
        known = len(names) == 3 and all(names & set(kind) for kind in (_QUERY, _KEY, _VALUE))
        known = known and all(
            sizes_of(module)[1] == heads.size * (heads.query if name in _QUERY else heads.key)
            for name, module in group.readers.items()
        )
    if not known:
        return _gathered(group)
    grains = {name: heads.grain(name) for name in (*group.readers, group.writer)}
    rules = group.rules(readers=Style.column, writer=Style.row, grains=grains)
    for name, module in others.items():  # norms of single heads: each rank computes a part of their gradients
        if list(module.parameters()):
            rules[f"{group.prefix}.{name}"] = TensorRule(style=Style.partial, grain=1)
    return rules


def _mlp_rules(group: _Group, *, hidden: int) -> dict[str, TensorRule]:
    between = [p for module in _others(group).values() for p in module.parameters(recurse=False)]
    is_plain = all(sizes_of(module)[1] == group.width for module in group.readers.values())
    # A parameter of the MLP's own width may act between the readers and the writer; norms of the hidden states do not.
    if not is_plain or any(p.dim() == 1 and len(p) == group.width and len(p) != hidden for p in between):
        return _gathered(group)
    return group.rules(readers=Style.column, writer=Style.row, grains={})


def _others(group: _Group) -> dict[str, nn.Module]:
    """The children that are not linear layers of the group."""
    return {n: m for n, m in group.module.named_children() if n not in group.readers and n != group.writer}
