"""The forward of every family: rows of several sequences at once, over a cache of blocks.

A layer is norm, projection of queries, keys and values, attention over the cache (`Step.attend`), output projection with the residual,
norm, MLP or experts with the residual. The cache places keys and values; the placement chooses the products and operations.
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.adapters import Adapters, MixedMlp, StepRows
from ztk.inference.base import Model
from ztk.inference.cache import Attention, Cache, Span, Step
from ztk.inference.describe import Subject
from ztk.inference.kernel_products import RowsProduct
from ztk.inference.ops import ops_of
from ztk.inference.placement import Placement
from ztk.inference.products import Product
from ztk.inference.ranks import Ranks
from ztk.inference.weights import Layer, Mlp, Weights
from ztk.kernels import draw_rows
from ztk.kernels.shared.cpu_rows import share

_YIELD = 0.001  # seconds between parts of an embedding, in which steps of answers take the lock


class InferenceModel(Model):
    """Computes the families that ztk reads itself. Not a Module: it has no gradients, and weights are replaced all at once.

    ranks: share the model. `weights` then are this rank's part. adapters: apply to rows whose span has one.

    Raises:
        ValueError: an activation that is not supported.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        weights: Weights,
        placement: Placement | None = None,
        ranks: Ranks | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.placement, self.ranks, self.weights = placement or Placement(), ranks, weights
        self.adapters = adapters
        self._full = subject.description
        self.description = self._full if ranks is None else ranks.cut.own(self._full)
        self.ops = ops_of(self.description, placement=self.placement)
        self._attention = self._attention_of(subject)

    @property
    def can_draw(self) -> bool:
        """Whether `draw` can draw tokens without their logits."""
        return self.placement.by_kernels and self.ranks is None

    def products(self) -> list[Product]:
        return [*(self.adapters.products() if self.adapters else ()), *self.weights.products()]

    def stream(self, layers: Iterable[Layer]) -> None:
        """Takes the layers from `layers` from now on."""
        self.weights.layers = layers

    def own_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int]) -> Tensor:
        x = self.forward(tokens, spans=spans, cache=cache)
        if not rows:
            return x.new_empty(0, self.description.vocab_size, dtype=torch.float32)
        return self.logits(x if rows == list(range(len(x))) else x[rows])

    def own_broken(self, tokens: list[int], *, span: Span, cache: Cache) -> int | None:
        found: list[int] = []
        self.forward(torch.tensor(tokens), spans=[span], cache=cache, broken=found)
        return found[0] if found else None

    def forward(self, tokens: Tensor, *, spans: list[Span], cache: Cache, broken: list[int] | None = None) -> Tensor:
        """tokens int64 [M] -> the last norm's output [M, C]; keys and values of all rows are in the cache afterwards.

        broken: gets the number of the first layer whose output is not finite.
        """
        place = self.placement.device
        by_adapter = None if self.adapters is None else self.adapters.rows(spans, device=place)
        return self.compute(tokens.to(place), step=cache.step(spans), broken=broken, by_adapter=by_adapter)

    def compute(
        self, tokens: Tensor, *, step: Step, broken: list[int] | None = None, by_adapter: StepRows | None = None
    ) -> Tensor:
        """Runs `forward` on tokens int64 [M] that are on the device, without a read by the host. by_adapter: if omitted, all rows use the
        base."""
        x = self.embed(tokens, step=step)
        for number, base in enumerate(self.weights.layers):
            layer = base if by_adapter is None else by_adapter.layer(number)
            x = self.block(x, layer=layer, number=number, step=step)
            if broken is not None and not broken and not x.isfinite().all():
                broken.append(number)
        return self.ops.norm(x, by=self.weights.norm)

    def chosen_experts(self, tokens: list[int]) -> Tensor:
        """The experts of each token of a text, in each layer that has some: int16 [tokens, layers, choices] on the CPU.

        A row does not depend on other rows, so these are the experts of the steps in which the text was drawn.
        """
        self.ops.chosen = chosen = []
        try:
            span = Span(slot=0, start=0, length=len(tokens), row=0)
            self.forward(torch.tensor(tokens), spans=[span], cache=self.scratch(len(tokens)))
        finally:
            self.ops.chosen = None
        return torch.stack(chosen, dim=1).to("cpu", torch.int16)

    @torch.inference_mode()
    def embedding(self, tokens: list[int], *, adapter: int, rows: int, lock: AbstractContextManager) -> Tensor:
        """One vector for a text, fp32 [C] of length 1 on the CPU: the mean of the last norm's outputs. rows: that are computed at a time, with
        the lock."""
        with lock:
            cache, total = self.scratch(len(tokens)), torch.zeros(())
        for start in range(0, len(tokens), rows):
            part = tokens[start : start + rows]
            span = Span(slot=0, start=start, length=len(part), row=0, adapter=adapter)
            with lock:
                hidden = self.forward(torch.tensor(part), spans=[span], cache=cache)
                total = total + hidden.float().sum(0).cpu()
            time.sleep(_YIELD)
        return F.normalize(total / len(tokens), dim=0)

    def logits(self, x: Tensor) -> Tensor:
        """x [R, C] of `forward` -> fp32 [R, V]."""
        found = self.weights.head(x)
        if self.ranks is not None:
            found = self.ranks.join(found)[:, : self.description.vocab_size].contiguous()
        if self.description.logit_softcap:
            cap = self.description.logit_softcap
            found = torch.tanh(found / cap) * cap
        return found

    def draw(self, x: Tensor, *, temperatures: Tensor, keys: Tensor) -> Tensor:
        """Where `can_draw`, a token for each row of x [R, C] of `forward`, without its logits: temperatures fp32 [R], keys int64 [R] of
        `noise_key` -> tokens and both log-probabilities, fp64 [3, R] on the device."""
        head, cap = RowsProduct.of(self.weights.head), self.description.logit_softcap or 0.0
        drawn = draw_rows(x, head.weight, head.scales, head.bias, temperatures, keys, softcap=cap)
        return torch.stack([part.double() for part in drawn])

    # Parts

    def embed(self, tokens: Tensor, *, step: Step) -> Tensor:
        """tokens int64 [M] -> the first block's input [M, C]."""
        of = self.description
        table = self.weights.embedding
        x = F.embedding(tokens, table) if self.ranks is None else self.ranks.look_up(tokens, table=table)
        if of.embedding_scale != 1:
            x = x * of.embedding_scale
        if self.weights.positions is not None:
            x = x + self.weights.positions[step.positions + of.position_offset]
        if self.weights.embedding_norm is not None:
            x = self.ops.norm(x, by=self.weights.embedding_norm)
        return x

    def block(self, x: Tensor, *, layer: Layer, number: int, step: Step) -> Tensor:
        """One block with the weights of `layer`: x [M, C] -> [M, C]. number: the layer's."""
        norm = self.ops.norm
        normed = x if layer.before_attention is None else norm(x, by=layer.before_attention)
        attended = self._attended(normed, layer=layer, number=number, step=step)
        if self.description.parallel:
            before = normed if layer.before_mlp is None else norm(x, by=layer.before_mlp)
            return self._feed_forward(before, layer=layer, residual=self._added(layer.out, attended, residual=x))
        if layer.after_attention is None:
            x = self._added(layer.out, attended, residual=x)
            normed = x if layer.before_mlp is None else norm(x, by=layer.before_mlp)
        else:
            added = norm(self._added(layer.out, attended), by=layer.after_attention)
            x, normed = self.ops.add_and_norm(x, added=added, by=layer.before_mlp)
        if layer.after_mlp is None:
            return self._feed_forward(normed, layer=layer, residual=x)
        return x + norm(self._feed_forward(normed, layer=layer), by=layer.after_mlp)

    def _attended(self, x: Tensor, *, layer: Layer, number: int, step: Step) -> Tensor:
        """x [M, C] -> the heads' outputs [M, H D]."""
        of, rows, norms = self.description, layer.qkv(x), None
        if of.qk_norm == "all":
            query, key, value = rows.split([of.heads * of.head_dim, *[of.kv_heads * of.head_dim] * 2], dim=1)
            rows = torch.cat([*self._normed_together(query, key=key, layer=layer), value], dim=1)
        elif of.qk_norm == "heads":
            assert layer.query_norm is not None and layer.key_norm is not None, "the family has these norms"
            norms = layer.query_norm.weight, layer.key_norm.weight
        return step.attend(rows, by=self._attention[number], norms=norms)

    def _normed_together(self, query: Tensor, *, key: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Norms over all heads, including other ranks' heads."""
        assert layer.query_norm is not None and layer.key_norm is not None, "the family has these norms"
        norm = self.ops.norm
        if self.ranks is None:
            return norm(query.contiguous(), by=layer.query_norm), norm(key.contiguous(), by=layer.key_norm)
        queries = norm(self.ranks.join(query), by=layer.query_norm)
        keys = norm(self.ranks.join_keys(key, description=self._full), by=layer.key_norm)
        return self.ranks.own_heads(queries, keys=keys, description=self._full)

    def _added(self, product: Product, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """The product of all ranks, plus `residual`."""
        if self.ranks is None:
            return product(x, residual)
        return _plus(self.ranks.sum(product(x)), residual=residual)

    def _feed_forward(self, x: Tensor, *, layer: Layer, residual: Tensor | None = None) -> Tensor:
        if self.ranks is None:
            return self._own_feed_forward(x, layer=layer, residual=residual)
        return _plus(self.ranks.sum(self._own_feed_forward(x, layer=layer, residual=None)), residual=residual)

    def _own_feed_forward(self, x: Tensor, *, layer: Layer, residual: Tensor | None) -> Tensor:
        """The MLP or the experts, plus `residual`."""
        if layer.experts is None:
            assert layer.mlp is not None, "a layer has an MLP or experts"
            return self._mlp(x, weights=layer.mlp, residual=residual)
        out = self.ops.experts(x, layer=layer)
        if layer.mlp is not None and layer.shared_gate is None:
            out = self._mlp(x, weights=layer.mlp, residual=out)
        elif layer.mlp is not None and layer.shared_gate is not None:
            out = out + share(layer.shared_gate(x)).to(x.dtype) * self._mlp(x, weights=layer.mlp)
        return _plus(out, residual=residual)

    def _mlp(self, x: Tensor, *, weights: Mlp, residual: Tensor | None = None) -> Tensor:
        """The MLP, with each row's adapter, plus `residual`."""
        if isinstance(weights, MixedMlp):
            return weights.compute(self.ops.mlp, x=x, residual=residual)
        return self.ops.mlp(x, weights=weights, residual=residual)

    def _attention_of(self, subject: Subject) -> list[Attention]:
        """Of each layer."""
        of, place = self.description, self.placement.device
        tables = [(cos.to(place), sin.to(place)) for cos, sin in subject.tables]
        slopes = alibi_slopes(self._full.heads) if self._full.is_alibi else None
        if slopes is not None:
            own = range(len(slopes)) if self.ranks is None else self.ranks.cut.heads(self._full)[0]
            slopes = slopes[own.start : own.stop].to(place)
        return [
            Attention(
                layer=number,
                heads=of.heads,
                kv_heads=of.kv_heads,
                head_dim=of.head_dim,
                scale=of.scale,
                window=of.windows[number],
                softcap=of.softcap,
                slopes=slopes,
                table=tables[of.tables[number]] if of.rotary_dims else None,
                eps=of.norm_eps,
            )
            for number in range(of.layers)
        ]


def _plus(x: Tensor, *, residual: Tensor | None) -> Tensor:
    return x if residual is None else residual + x


def alibi_slopes(heads: int) -> Tensor:
    """fp32 [H] (Press et al. 2021, https://arxiv.org/abs/2108.12409): powers of 2^(-8/n), and every other of the next n's for the rest."""
    power = 1 << (heads.bit_length() - 1)
    base = torch.tensor(2.0 ** -(8.0 / power))
    slopes = base ** torch.arange(1, power + 1)
    if power < heads:
        finer = torch.tensor(2.0 ** -(8.0 / (2 * power)))
        slopes = torch.cat([slopes, finer ** torch.arange(1, 2 * (heads - power), 2)])
    return slopes
