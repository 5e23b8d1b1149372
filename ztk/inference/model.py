"""The forward of every family over the cache: rows of several sequences at once.

Rows have the dtype that the engine computes in.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.answer_cache import AnswerCache
from ztk.inference.answer_step import AnswerStep
from ztk.inference.cache import Cache
from ztk.inference.cut import own_slopes
from ztk.inference.describe import Subject
from ztk.inference.over_slabs import OverSlabs
from ztk.inference.products import Affine, Product
from ztk.inference.ranks import Ranks
from ztk.inference.rows import rms_norm, rope, share
from ztk.inference.steps import Span, Step
from ztk.inference.weights import Layer, Mlp, Weights
from ztk.kernels import activate_cpu

ACTIVATIONS = {  # transformers' names -> those of `ztk.kernels`
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class InferenceModel(OverSlabs):
    """Computes a step of several sequences. Not a Module: it has no gradients, and weights are replaced all at once.

    ranks: those that share the model; `weights` are this rank's part then, and `description` says its heads.

    Raises:
        ValueError: an activation that is not supported.
    """

    def __init__(self, subject: Subject, *, weights: Weights, ranks: Ranks | None = None) -> None:
        self._full, self.ranks, self.weights = subject.description, ranks, weights
        self.description = self._full if ranks is None else ranks.cut.own(self._full)
        if self.description.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.description.activation} is not supported by the inference engine: it has "
                f"{', '.join(ACTIVATIONS)}"
            )
        self._tables = subject.tables
        self._activation = ACTIVATIONS[self.description.activation]
        self._slopes = alibi_slopes(self._full.heads) if self._full.is_alibi else None
        if ranks is not None and self._slopes is not None:
            self._slopes = own_slopes(self._slopes, cut=ranks.cut)

    def products(self) -> list[Product]:
        """Those in memory, the head last."""
        return self.weights.products()

    def own_logits(self, tokens: Tensor, *, spans: list[Span], cache: Cache, rows: list[int]) -> Tensor:
        """As `step_logits`, where every rank that shares the model makes the call: tokens int64 [M]."""
        x = self.forward(tokens, spans=spans, cache=cache)
        if not rows:
            return x.new_empty(0, self.description.vocab_size)
        return self.logits(x if rows == list(range(len(x))) else x[rows])

    def own_broken(self, tokens: list[int], *, span: Span, cache: Cache) -> int | None:
        """The first layer whose output is not finite, where every rank that shares the model makes the call; None: all are."""
        found: list[int] = []
        self.forward(torch.tensor(tokens), spans=[span], cache=cache, broken=found)
        return found[0] if found else None

    def forward(self, tokens: Tensor, *, spans: list[Span], cache: Cache, broken: list[int] | None = None) -> Tensor:
        """tokens int64 [M] -> the last norm's output [M, C]; keys and values of all rows are in the cache afterwards.

        broken: gets the number of the first layer whose output is not finite.
        """
        of = self.description
        sizes = {"group": of.heads // of.kv_heads, "kv_heads": of.kv_heads, "head_dim": of.head_dim}
        step = Step(spans, scratch=cache.scratch, **sizes)
        return self._through(tokens, step=step, cache=cache, broken=broken)

    def next_logits(self, tokens: Tensor, *, step: AnswerStep, cache: AnswerCache) -> Tensor:
        """One token of every answer in `cache`, int64 [A], in memory that one process has alone -> logits of the next ones, fp32 [A, V]."""
        return self.logits(self._through(tokens, step=step, cache=cache))

    def _through(
        self,
        tokens: Tensor,
        *,
        step: Step | AnswerStep,
        cache: Cache | AnswerCache,
        broken: list[int] | None = None,
    ) -> Tensor:
        x = self.embed(tokens, step=step)
        for number, layer in enumerate(self.weights.layers):
            x = self.block(x, layer=layer, number=number, step=step, cache=cache)
            if broken is not None and not broken and not x.isfinite().all():
                broken.append(number)
        return self.norm(x, by=self.weights.norm)

    def logits(self, x: Tensor) -> Tensor:
        """x [R, C] of `forward` -> fp32 [R, V]."""
        found = self.weights.head(x)
        if self.ranks is not None:
            found = self.ranks.join(found)[:, : self.description.vocab_size]
        if self.description.logit_softcap:
            cap = self.description.logit_softcap
            found = torch.tanh(found / cap) * cap
        return found

    # Parts

    def embed(self, tokens: Tensor, *, step: Step | AnswerStep) -> Tensor:
        """tokens int64 [M] -> the first block's input [M, C]."""
        of = self.description
        x = F.embedding(tokens, self.weights.embedding)
        if of.embedding_scale != 1:
            x = x * torch.tensor(of.embedding_scale)
        if self.weights.positions is not None:
            x = x + self.weights.positions[step.positions + of.position_offset]
        if self.weights.embedding_norm is not None:
            x = self.norm(x, by=self.weights.embedding_norm)
        return x

    def block(
        self, x: Tensor, *, layer: Layer, number: int, step: Step | AnswerStep, cache: Cache | AnswerCache
    ) -> Tensor:
        """One block with the weights of `layer`: x [M, C] -> [M, C]. number: of the layer."""
        normed = x if layer.before_attention is None else self.norm(x, by=layer.before_attention)
        attended = self._attention(normed, layer=layer, number=number, step=step, cache=cache)
        if layer.after_attention is not None:
            attended = self.norm(attended, by=layer.after_attention)
        if self.description.parallel:
            before = normed if layer.before_mlp is None else self.norm(x, by=layer.before_mlp)
            return attended + self._feed_forward(before, layer=layer) + x
        x = x + attended
        normed = x if layer.before_mlp is None else self.norm(x, by=layer.before_mlp)
        fed = self._feed_forward(normed, layer=layer)
        if layer.after_mlp is not None:
            fed = self.norm(fed, by=layer.after_mlp)
        return x + fed

    def _attention(self, x: Tensor, *, layer: Layer, number: int, step: Any, cache: Any) -> Tensor:
        """step, cache: of one kind."""
        of = self.description
        rows, both = layer.qkv(x).view(x.shape[0], -1, of.head_dim), of.heads + of.kv_heads
        turned, value = rows[:, :both], rows[:, both:]
        if of.qk_norm != "none":
            turned = self._normed(turned[:, : of.heads], key=turned[:, of.heads :], layer=layer)
        if of.rotary_dims:
            cos, sin = step.rotary(self._tables[of.tables[number]])
            turned = rope(turned, cos=cos, sin=sin)
        step.write(turned[:, of.heads :], value=value, cache=cache, layer=number)
        out = step.attend(
            turned[:, : of.heads],
            keys=cache.keys[number],
            values=cache.values[number],
            scale=of.scale,
            window=of.windows[number],
            softcap=of.softcap,
            slopes=self._slopes,
        )
        return self._summed(layer.out(out.flatten(1)))

    def _normed(self, query: Tensor, *, key: Tensor, layer: Layer) -> Tensor:
        """Queries and keys [M, heads, D] after their norms, one after the other."""
        of = self.description
        if of.qk_norm == "heads":
            return torch.cat([self.norm(query, by=layer.query_norm), self.norm(key, by=layer.key_norm)], dim=1)
        query, key = self._normed_together(query.flatten(1), key=key.flatten(1), layer=layer)
        return torch.cat([query, key], dim=1).unflatten(1, (-1, of.head_dim))

    def _normed_together(self, query: Tensor, *, key: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Norms over all heads, those of other ranks included."""
        if self.ranks is None:
            return self.norm(query, by=layer.query_norm), self.norm(key, by=layer.key_norm)
        queries = self.norm(self.ranks.join(query), by=layer.query_norm)
        keys = self.norm(self.ranks.join_keys(key, description=self._full), by=layer.key_norm)
        return self.ranks.own_heads(queries, keys=keys, description=self._full)

    def _summed(self, partial: Tensor) -> Tensor:
        return partial if self.ranks is None else self.ranks.sum(partial)

    def _feed_forward(self, x: Tensor, *, layer: Layer) -> Tensor:
        if layer.experts is None:
            assert layer.mlp is not None, "a layer has an MLP or experts"
            return self._summed(self.mlp(x, weights=layer.mlp))
        assert layer.router is not None, "experts have a router"
        probabilities = torch.softmax(layer.router(x), dim=-1)
        weights, chosen = probabilities.topk(self.description.experts_per_token, dim=-1)
        if self.description.normalise_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(layer.experts):  # in this order for every token
            rows, place = torch.where(chosen == number)
            if len(rows):
                out[rows] += self.mlp(x[rows], weights=expert) * weights[rows, place, None]
        if layer.mlp is not None:  # the shared expert
            shared = self.mlp(x, weights=layer.mlp)
            out = out + (shared if layer.shared_gate is None else share(layer.shared_gate(x)) * shared)
        return self._summed(out)

    def mlp(self, x: Tensor, *, weights: Mlp) -> Tensor:
        """x [M, C] -> [M, C]; of a model that ranks share this rank's part of the sum."""
        raised = weights.up(x)
        if weights.gate is None:
            return weights.down(activate_cpu(raised, activation=self._activation))
        gate = weights.gate(x)
        return weights.down(activate_cpu(gate, activation=self._activation).mul_(raised))

    def norm(self, x: Tensor, *, by: Affine | None) -> Tensor:
        """The family's norm over the last dimension: x [M, C] -> [M, C]."""
        assert by is not None, "the family has this norm"
        if self.description.norm == "layer":
            return F.layer_norm(x, x.shape[-1:], by.weight, by.bias, self.description.norm_eps)
        return rms_norm(x, weight=by.weight, eps=self.description.norm_eps)


def alibi_slopes(heads: int) -> Tensor:
    """fp32 [H] (Press et al. 2021, https://arxiv.org/abs/2108.12409): powers of 2^(-8/n), and every other of the next n's for the rest."""
    power = 1 << (heads.bit_length() - 1)
    base = torch.tensor(2.0 ** -(8.0 / power))
    slopes = base ** torch.arange(1, power + 1)
    if power < heads:
        finer = torch.tensor(2.0 ** -(8.0 / (2 * power)))
        slopes = torch.cat([slopes, finer ** torch.arange(1, 2 * (heads - power), 2)])
    return slopes
