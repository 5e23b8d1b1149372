"""Models that run their own modules, over a cache of blocks: on a GPU, or where sequences share blocks.

Linear layers are `linear_rows`, keys and values are written by `cache_rows` and read by `paged_attention`; between them the modules compute
with torch's operations, whose rows are compared when the model is loaded. A step ends with logits, from which tokens are drawn on the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ztk.inference.block_cache import BlockCache
from ztk.inference.block_steps import BlockStep
from ztk.inference.block_weights import FORMATS, Placement, RowsProduct
from ztk.inference.module_model import Attention, Form, OwnModules
from ztk.inference.over_blocks import OverBlocks
from ztk.inference.products import Affine
from ztk.inference.steps import Span
from ztk.kernels import cache_rows, linear_rows, paged_attention


class _Rows(RowsProduct):
    """x [M, in] -> [M, out]. wide: in fp32 whatever x is."""

    def __init__(self, affine: Affine, *, kind: str, placement: Placement, exact: bool, wide: bool) -> None:
        super().__init__(affine, kind=kind, placement=placement)
        self._exact, self._wide = exact, wide

    def __call__(self, x: Tensor) -> Tensor:
        options = {"activation": "none", "exact": self._exact, "wide": self._wide}
        return linear_rows(x, self.weight, self.scales, self.bias, None, **options)


class ModuleBlockModel(OwnModules, OverBlocks):
    """state: the parameters by name, in their full shapes and any dtype. exact: see `ztk.kernels.linear_rows`.

    Raises:
        ValueError: as `OwnModules`.
    """

    def __init__(self, module: Any, *, state: Mapping[str, Tensor], placement: Placement, exact: bool) -> None:
        OverBlocks.__init__(self, device=placement.device, dtype=placement.dtype, ranks=None)
        self.placement = placement
        layer, head = FORMATS[placement.kind]

        def place(value: Tensor) -> Tensor:
            return value.detach().to(placement.device, placement.dtype)

        form = Form(
            layer=lambda affine: _Rows(affine, kind=layer, placement=placement, exact=exact, wide=False),
            head=lambda affine: _Rows(affine, kind=head, placement=placement, exact=exact, wide=True),
            place=place,
        )
        OwnModules.__init__(self, module, state=state, form=form, ranks=None, device=placement.device)

    @property
    def nbytes(self) -> int:
        """Of the products' weights and scales."""
        return sum(product.nbytes for product in self._products)

    def attention(self, spans: list[Span], *, cache: BlockCache) -> Attention:
        """How a step attends over `cache`."""
        of = self.description
        step = BlockStep.of(spans, cache=cache, group=of.heads // of.kv_heads)

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            layer: int,
            scale: float,
            window: int | None,
            softcap: float | None,
        ) -> Tensor:
            keys, values, scales = cache.keys(layer), cache.values(layer), cache.scales_of(layer)
            rows = torch.cat([part.flatten(1).to(self.dtype) for part in (query, key, value)], dim=1)
            placed = cache_rows(
                rows, None, None, None, None, step.positions, step.places, keys, values, scales, eps=of.norm_eps
            )
            return paged_attention(
                placed,
                keys,
                values,
                step.tables,
                step.tiles,
                None,
                scales,
                scale=scale,
                window=window or 0,
                softcap=softcap or 0.0,
                split=step.split,
            )

        return Attention(positions=step.positions, attend=attend)
