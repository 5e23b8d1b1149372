"""Linear layers of a model's own modules, computed in parts by tensor-parallel ranks.

The cut of each layer follows from the module tree (`ztk.parallel.tensor.derived`), or else from the model's own plan.
Layers without a rule are computed on every rank. Sums have the order of the ranks, as in the engine's own families.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ztk.core.policies.tensor import Style
from ztk.inference.cut import Cut
from ztk.inference.describe import Description
from ztk.inference.products import Affine, Product
from ztk.inference.ranks import Ranks
from ztk.parallel.tensor.derived import derived_rules
from ztk.parallel.tensor.heads import Heads, count_own_heads, head_by_head, is_attention
from ztk.parallel.tensor.tensor_plan import plan_of

_COLUMNS, _ROWS = (Style.column, Style.column_gathered, Style.head), (Style.row, Style.row_split)


class Linear(nn.Module):
    """A linear layer that calls `product`: x [..., in] -> [..., out] in x's dtype."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.out_features, self.in_features = product.shape

    @property
    def weight(self) -> Tensor:
        """Raises ValueError: only the product has the weight, in its own layout."""
        raise ValueError("multiplies by a linear layer's weight itself, as some routers of experts do")

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class CutLinear(Linear):
    """A linear layer that ranks share: x [..., in] -> [..., out] in its dtype.

    style: how it is cut. outputs: number on all ranks together. inputs: the part of x that this rank reads. Defaults to all.
    """

    def __init__(self, product: Product, *, ranks: Ranks, style: Style, outputs: int, inputs: range | None) -> None:
        super().__init__(product)
        self._ranks, self._style, self._outputs, self._inputs = ranks, style, outputs, inputs

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._inputs is not None:
            rows = rows[:, self._inputs.start : self._inputs.stop].contiguous()
        out = self.product(rows)
        if self._style in _ROWS:
            out = self._ranks.sum(out)
        elif self._style is not Style.column:
            out = self._ranks.join(out)[:, : self._outputs]
        return out.reshape(*x.shape[:-1], -1)


class ModuleCut:
    """How the linear layers of `module` are cut. description: counts all ranks' heads.

    Raises:
        ValueError: the ranks cannot divide its heads, or no plan follows from its modules.
    """

    def __init__(self, module: Any, *, ranks: Ranks, description: Description) -> None:
        rules = derived_rules(module)
        plan = rules or plan_of(module).matches(module)
        self._styles: Mapping[str, Style] = {name: rule.style for name, rule in plan.items()}
        self._ranks, self._full, self._config = ranks, description, module.config
        if any(style is Style.column and is_attention(name) for name, style in self._styles.items()):
            ranks.cut.heads(description, equal=True)  # raises an error for heads that cannot be divided

    def linear(self, name: str, *, full: Affine, product: Callable[[Affine], Product]) -> Linear:
        """The layer `name` on this rank: weight [out, in] and bias [out] of all ranks, in fp32."""
        style, cut = self._styles.get(name), self._ranks.cut
        if style not in (*_COLUMNS, *_ROWS):
            return Linear(product(full))
        outputs, inputs = full.weight.shape
        read = None
        if style is Style.column:
            own = self._columns(name, full=full, cut=cut)
        elif style is Style.row:
            attends = is_attention(name)
            own = cut.out(full, description=self._full) if attends else cut.inputs(full, part=cut.inner_of(inputs))
        elif style is Style.row_split:
            read = cut.inner_of(inputs)
            own = cut.inputs(full, part=read)
        else:
            own = cut.vocabulary(full)
        return CutLinear(product(own), ranks=self._ranks, style=style, outputs=outputs, inputs=read)

    def tell_attention(self, module: nn.Module) -> None:
        """Updates the numbers of heads in attention layers that are cut between heads."""
        heads, widths = Heads.of(self._config), dict[str, list[int]]()
        for name, style in self._styles.items():
            owner = name.rpartition(".")[0]
            if style is Style.column and is_attention(owner):
                layer = module.get_submodule(name)
                assert isinstance(layer, Linear), "it was replaced"
                fused = head_by_head(module.get_submodule(owner))
                widths.setdefault(owner, []).append(layer.out_features // (3 if fused else 1))
        for owner, found in widths.items():
            assert heads is not None, "the plan was made from them"
            count_own_heads(module.get_submodule(owner), heads=heads, widths=found)

    def _columns(self, name: str, *, full: Affine, cut: Cut) -> Affine:
        outputs, of = full.weight.shape[0], self._full
        if not is_attention(name):
            return cut.outputs(full, part=cut.inner_of(outputs))
        if outputs == of.kv_heads * of.head_dim:
            return cut.key(full, description=of)
        each = outputs // cut.size
        return cut.outputs(full, part=range(cut.rank * each, (cut.rank + 1) * each))
