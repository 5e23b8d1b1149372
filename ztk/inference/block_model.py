"""The forward of every family over a cache of blocks: one kernel per step of a layer, for rows of several sequences at once.

A layer is norm, projection of queries, keys and values, `cache_rows`, `paged_attention`, output projection with the residual, norm, gate and
up with the activation, and down with the residual. On a GPU these are Triton kernels; on a CPU torch's operations, which keep the same
promise: a row's bits depend on its sequence, the weights and its position alone ([Note: Exactness] in `ztk.inference.attention`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.block_cache import BlockCache
from ztk.inference.block_steps import BlockStep
from ztk.inference.block_weights import BlockLayer, BlockWeights, RowsProduct
from ztk.inference.cut import own_slopes
from ztk.inference.describe import Subject
from ztk.inference.model import ACTIVATIONS, alibi_slopes
from ztk.inference.over_blocks import OverBlocks, drawn_of
from ztk.inference.products import Affine
from ztk.inference.ranks import Ranks
from ztk.inference.rows import share
from ztk.inference.sample import Drawn
from ztk.inference.steps import Span
from ztk.kernels import (
    cache_rows,
    draw_rows,
    gated_rows,
    layer_norm,
    linear_rows,
    moe_combine,
    moe_route,
    paged_attention,
    rms_norm,
)


class BlockModel(OverBlocks):
    """Computes a step of several sequences. Not a Module: it has no gradients, and weights are replaced all at once.

    exact: see `ztk.kernels.linear_rows`. ranks: those that share the model; `weights` are this rank's part then, and `description` says its
    heads.

    Raises:
        ValueError: an activation that is not supported.
    """

    def __init__(
        self, subject: Subject, *, weights: BlockWeights, exact: bool = True, ranks: Ranks | None = None
    ) -> None:
        super().__init__(device=weights.embedding.device, dtype=weights.embedding.dtype, ranks=ranks)
        self._full, self.weights, self._exact = subject.description, weights, exact
        self.description = self._full if ranks is None else ranks.cut.own(self._full)
        if self.description.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.description.activation} is not supported by the inference engine: it has "
                f"{', '.join(ACTIVATIONS)}"
            )
        self._tables = [tuple(table.to(self.device) for table in pair) for pair in subject.tables]
        self._activation = ACTIVATIONS[self.description.activation]
        slopes = alibi_slopes(self._full.heads) if self._full.is_alibi else None
        if ranks is not None and slopes is not None:
            slopes = own_slopes(slopes, cut=ranks.cut)
        self._slopes = None if slopes is None else slopes.to(self.device)

    @property
    def nbytes(self) -> int:
        """Of the products' weights and scales."""
        return sum(layer.nbytes for layer in self.weights.layers) + self.weights.head.nbytes

    def own_logits(self, tokens: Tensor, *, spans: list[Span], cache: BlockCache, rows: list[int]) -> Tensor:
        """As `step_logits`, where every rank that shares the model makes the call: tokens int64 [M]."""
        x = self.forward(tokens, spans=spans, cache=cache)
        return self.logits(x[rows]) if rows else x.new_empty(0, self.description.vocab_size, dtype=torch.float32)

    def own_broken(self, tokens: list[int], *, span: Span, cache: BlockCache) -> int | None:
        """The first layer whose output is not finite, where every rank that shares the model makes the call; None: all are."""
        found: list[int] = []
        self.forward(torch.tensor(tokens), spans=[span], cache=cache, broken=found)
        return found[0] if found else None

    def forward(
        self, tokens: Tensor, *, spans: list[Span], cache: BlockCache, broken: list[int] | None = None
    ) -> Tensor:
        """tokens int64 [M] -> the last norm's output [M, C]; keys and values of all rows are in the cache afterwards.

        broken: gets the number of the first layer whose output is not finite.
        """
        step = BlockStep.of(spans, cache=cache, group=self.description.heads // self.description.kv_heads)
        return self.compute(tokens.to(self.device), step=step, cache=cache, broken=broken)

    def compute(self, tokens: Tensor, *, step: BlockStep, cache: BlockCache, broken: list[int] | None = None) -> Tensor:
        """As `forward`, of tokens int64 [M] on the device. The host reads nothing of it."""
        x = self._embed(tokens, step=step)
        for number, layer in enumerate(self.weights.layers):
            x = self._block(x, layer=layer, number=number, step=step, cache=cache)
            if broken is not None and not broken and not x.isfinite().all():
                broken.append(number)
        return self._norm(x, by=self.weights.norm)

    def logits(self, x: Tensor) -> Tensor:
        """x [R, C] of `forward` -> fp32 [R, V]."""
        found = self._linear(x, self.weights.head, wide=True)
        if self.ranks is not None:
            found = self.ranks.join(found)[:, : self.description.vocab_size].contiguous()
        cap = self.description.logit_softcap
        return torch.tanh(found / cap) * cap if cap else found

    def draw(self, x: Tensor, *, temperatures: list[float], keys: list[int]) -> list[Drawn]:
        """A token for each row of x [R, C] of `forward`, in its dtype, without its logits; keys: see `noise_key`."""
        heat = torch.tensor(temperatures, dtype=torch.float32).to(self.device)
        return drawn_of(self.drawn(x, temperatures=heat, keys=torch.tensor(keys, dtype=torch.int64).to(self.device)))

    def drawn(self, x: Tensor, *, temperatures: Tensor, keys: Tensor) -> Tensor:
        """As `draw`, on the device: temperatures fp32 [R], keys int64 [R] -> tokens and both log-probabilities, fp64 [3, R]."""
        head, cap = self.weights.head, self.description.logit_softcap or 0.0
        return torch.stack([
            part.double() for part in draw_rows(x, head.weight, head.scales, temperatures, keys, softcap=cap)
        ])  # fmt: skip

    # Parts

    def _embed(self, tokens: Tensor, *, step: BlockStep) -> Tensor:
        of = self.description
        x = self.weights.embedding[tokens]
        if of.embedding_scale != 1:
            x = x * of.embedding_scale
        if self.weights.positions is not None:
            x = x + self.weights.positions[step.positions + of.position_offset]
        if self.weights.embedding_norm is not None:
            x = self._norm(x, by=self.weights.embedding_norm)
        return x

    def _block(self, x: Tensor, *, layer: BlockLayer, number: int, step: BlockStep, cache: BlockCache) -> Tensor:
        norms = layer.norms
        normed = self._norm(x, by=norms["before_attention"]) if "before_attention" in norms else x
        attended = self._attend(normed, layer=layer, number=number, step=step, cache=cache)
        if self.description.parallel:
            before = self._norm(x, by=norms["before_mlp"]) if "before_mlp" in norms else normed
            return self._feed_forward(before, layer=layer, residual=self._out(attended, layer=layer, residual=x))
        if "after_attention" in norms:
            added = self._norm(self._out(attended, layer=layer, residual=None), by=norms["after_attention"])
            x, normed = self._add_and_norm(x, added=added, by=norms.get("before_mlp"))
        else:
            x = self._out(attended, layer=layer, residual=x)
            normed = self._norm(x, by=norms["before_mlp"]) if "before_mlp" in norms else x
        if "after_mlp" in norms:
            return x + self._norm(self._feed_forward(normed, layer=layer, residual=None), by=norms["after_mlp"])
        return self._feed_forward(normed, layer=layer, residual=x)

    def _attend(self, x: Tensor, *, layer: BlockLayer, number: int, step: BlockStep, cache: BlockCache) -> Tensor:
        of = self.description
        rows = self._linear(x, layer.qkv)
        norms = layer.norms
        if of.qk_norm == "all":
            sizes = [of.heads * of.head_dim, of.kv_heads * of.head_dim, of.kv_heads * of.head_dim]
            query, key, value = rows.split(sizes, dim=1)
            rows = torch.cat([*self._normed_together(query, key=key, norms=norms), value], dim=1)
        query_norm, key_norm = (
            norms[name].weight if of.qk_norm == "heads" else None for name in ("query_norm", "key_norm")
        )
        cos, sin = self._tables[of.tables[number]] if of.rotary_dims else (None, None)
        keys, values = cache.keys(number), cache.values(number)
        query = cache_rows(
            rows,
            query_norm,
            key_norm,
            cos,
            sin,
            step.positions,
            step.places,
            keys,
            values,
            cache.scales_of(number),
            eps=of.norm_eps,
        )
        out = paged_attention(
            query,
            keys,
            values,
            step.tables,
            step.tiles,
            self._slopes,
            cache.scales_of(number),
            scale=of.scale,
            window=of.windows[number] or 0,
            softcap=of.softcap or 0.0,
            split=step.split,
        )
        return out.flatten(1)

    def _normed_together(self, query: Tensor, *, key: Tensor, norms: dict[str, Affine]) -> tuple[Tensor, Tensor]:
        """Norms over all heads, those of other ranks included."""
        if self.ranks is None:
            return self._norm(query, by=norms["query_norm"]), self._norm(key, by=norms["key_norm"])
        queries = self._norm(self.ranks.join(query), by=norms["query_norm"])
        keys = self._norm(self.ranks.join_keys(key, description=self._full), by=norms["key_norm"])
        return self.ranks.own_heads(queries, keys=keys, description=self._full)

    def _out(self, attended: Tensor, *, layer: BlockLayer, residual: Tensor | None) -> Tensor:
        if self.ranks is None:
            return self._linear(attended, layer.out, residual=residual)
        total = self.ranks.sum(self._linear(attended, layer.out))
        return total if residual is None else residual + total

    def _feed_forward(self, x: Tensor, *, layer: BlockLayer, residual: Tensor | None) -> Tensor:
        if self.ranks is None:
            return self._own_feed_forward(x, layer=layer, residual=residual)
        total = self.ranks.sum(self._own_feed_forward(x, layer=layer, residual=None))
        return total if residual is None else residual + total

    def _own_feed_forward(self, x: Tensor, *, layer: BlockLayer, residual: Tensor | None) -> Tensor:
        if layer.experts is not None:
            added = self._experts(x, layer=layer)
            residual = added if residual is None else residual + added
        if layer.up is None or layer.down is None:
            assert residual is not None, "a layer has an MLP or experts"
            return residual
        if layer.gate is None:
            inner = self._linear(x, layer.up, activation=self._activation)
        else:
            inner = gated_rows(x, *_pair(layer.gate, layer.up), activation=self._activation, exact=self._exact)
        if layer.shared_gate is None:
            return self._linear(inner, layer.down, residual=residual)
        part = share(self._linear(x, layer.shared_gate, wide=True)).to(x.dtype)
        return residual + part * self._linear(inner, layer.down)

    def _experts(self, x: Tensor, *, layer: BlockLayer) -> Tensor:
        of = self.description
        assert layer.router is not None and layer.experts is not None, "experts have a router"
        gate, up, down = layer.experts
        logits = self._linear(x, layer.router, wide=True)
        routing = moe_route(logits, top_k=of.experts_per_token, normalise=of.normalise_experts)
        where = {"offsets": routing.offsets, "order": routing.order, "top_k": of.experts_per_token}
        inner = gated_rows(x, *_pair(gate, up), activation=self._activation, **where)
        out = linear_rows(_behind(inner, front=down.front), down.weight, down.scales, offsets=routing.offsets)
        return moe_combine(out, weights=routing.weights, position=routing.position)

    def _linear(
        self,
        x: Tensor,
        product: RowsProduct,
        *,
        residual: Tensor | None = None,
        activation: str = "none",
        wide: bool = False,
    ) -> Tensor:
        options = {"activation": activation, "exact": self._exact, "wide": wide}
        x = _behind(x, front=product.front)
        return linear_rows(x, product.weight, product.scales, product.bias, residual, **options)

    def _norm(self, x: Tensor, *, by: Affine | None) -> Tensor:
        assert by is not None, "the family has this norm"
        if self.description.norm == "layer":
            return layer_norm(x, by.weight, by.bias, eps=self.description.norm_eps)
        return rms_norm(x, by.weight, eps=self.description.norm_eps)

    def _add_and_norm(self, x: Tensor, *, added: Tensor, by: Affine | None) -> tuple[Tensor, Tensor]:
        """(x + added, its norm, or the sum again without one)."""
        if by is None or self.description.norm == "layer":
            total = x + added
            return total, total if by is None else self._norm(total, by=by)
        normed, total = rms_norm(added, by.weight, eps=self.description.norm_eps, residual=x)
        return total, normed


def _behind(x: Tensor, *, front: int) -> Tensor:
    """x [M, K] behind zeros."""
    return F.pad(x, (front, 0)) if front else x


def _pair(gate: RowsProduct, up: RowsProduct) -> tuple[Tensor | None, ...]:
    return gate.weight, up.weight, gate.scales, up.scales, gate.bias, up.bias
