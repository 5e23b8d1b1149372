"""The forward of every family over the cache: rows of several sequences at once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ztk.inference.attention import BLOCK, attend
from ztk.inference.cache import Cache
from ztk.inference.describe import Subject
from ztk.inference.weights import Affine, Layer, Mlp, Weights
from ztk.kernels import rms_norm, rope, swiglu
from ztk.nn.linear import linear

_QUERIES = 2 * BLOCK  # queries whose scores exist at one time
_ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """`length` rows from `row` on belong to the sequence in `slot`, at positions from `start` on."""

    slot: int
    start: int
    length: int
    row: int


class InferenceModel:
    """Computes a step of several sequences. Not a Module: it has no gradients, and weights are replaced all at once.

    Raises:
        ValueError: an activation that is not supported.
    """

    def __init__(self, subject: Subject, *, weights: Weights) -> None:
        self.description, self.weights = subject.description, weights
        if self.description.activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation {self.description.activation} is not supported by the inference engine: it has "
                f"{', '.join(_ACTIVATIONS)}"
            )
        self._tables = subject.tables
        self._activation = _ACTIVATIONS[self.description.activation]
        self._slopes = _alibi_slopes(self.description.heads) if self.description.is_alibi else None

    def forward(self, tokens: Tensor, *, spans: list[Span], cache: Cache, broken: list[int] | None = None) -> Tensor:
        """tokens int64 [M] -> the last norm's output [M, C]; keys and values of all rows are in the cache afterwards.

        broken: gets the number of the first layer whose output is not finite.
        """
        # A lone row takes another path through a product than many: it is computed twice.
        lone = len(tokens) == 1
        x = self._embed(tokens.repeat(2) if lone else tokens, spans=spans)
        for number, layer in enumerate(self.weights.layers):
            x = self._block(x, layer=layer, number=number, spans=spans, cache=cache)
            if broken is not None and not broken and not x.isfinite().all():
                broken.append(number)
        x = self._norm(x, self.weights.norm)
        return x[:1] if lone else x

    def logits(self, x: Tensor) -> Tensor:
        """x [R, C] of `forward` -> fp32 [R, V]."""
        lone = len(x) == 1
        found = _linear(x.repeat(2, 1) if lone else x, self.weights.head)
        if self.description.logit_softcap:
            cap = self.description.logit_softcap
            found = torch.tanh(found / cap) * cap
        return found[:1] if lone else found

    # Parts

    def _positions(self, spans: list[Span], *, rows: int) -> Tensor:
        found = torch.cat([torch.arange(span.start, span.start + span.length) for span in spans])
        return found.repeat(rows // len(found))

    def _embed(self, tokens: Tensor, *, spans: list[Span]) -> Tensor:
        of = self.description
        x = self.weights.embedding[tokens]
        if of.embedding_scale != 1:
            x = x * torch.tensor(of.embedding_scale)
        if self.weights.positions is not None:
            x = x + self.weights.positions[self._positions(spans, rows=len(tokens)) + of.position_offset]
        if self.weights.embedding_norm is not None:
            x = self._norm(x, self.weights.embedding_norm)
        return x

    def _block(self, x: Tensor, *, layer: Layer, number: int, spans: list[Span], cache: Cache) -> Tensor:
        normed = x if layer.before_attention is None else self._norm(x, layer.before_attention)
        attended = self._attention(normed, layer=layer, number=number, spans=spans, cache=cache)
        if layer.after_attention is not None:
            attended = self._norm(attended, layer.after_attention)
        if self.description.parallel:
            before = normed if layer.before_mlp is None else self._norm(x, layer.before_mlp)
            return attended + self._feed_forward(before, layer=layer) + x
        x = x + attended
        normed = x if layer.before_mlp is None else self._norm(x, layer.before_mlp)
        fed = self._feed_forward(normed, layer=layer)
        if layer.after_mlp is not None:
            fed = self._norm(fed, layer.after_mlp)
        return x + fed

    def _attention(self, x: Tensor, *, layer: Layer, number: int, spans: list[Span], cache: Cache) -> Tensor:
        of = self.description
        query, key, value = (_linear(x, part) for part in (layer.query, layer.key, layer.value))
        if of.qk_norm == "all":
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        query, key, value = (part.unflatten(1, (-1, of.head_dim)) for part in (query, key, value))
        if of.qk_norm == "heads":
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        if of.rotary_dims:
            cos, sin = (table[self._positions(spans, rows=len(x))] for table in self._tables[of.tables[number]])
            query, key = (rope(part.unsqueeze(0), cos=cos, sin=sin)[0] for part in (query, key))
        out = torch.zeros_like(query)
        for group in _groups(spans):
            self._attend_group(group, query=query, key=key, value=value, out=out, number=number, cache=cache)
        if len(out) > sum(span.length for span in spans):  # the copy of a lone row
            out[1] = out[0]
        return _linear(out.flatten(1), layer.out)

    def _attend_group(
        self, group: list[Span], *, query: Tensor, key: Tensor, value: Tensor, out: Tensor, number: int, cache: Cache
    ) -> None:
        """Writes keys and values, then attends: one sequence with any number of rows, or several with one row each."""
        of, keys, values = self.description, cache.keys[number], cache.values[number]
        options = {"scale": of.scale, "window": of.windows[number], "softcap": of.softcap, "slopes": self._slopes}
        if len(group) == 1:
            span = group[0]
            rows, places = slice(span.row, span.row + span.length), slice(span.start, span.start + span.length)
            keys[span.slot, :, places] = key[rows].transpose(0, 1)
            values[span.slot, :, places] = value[rows].transpose(0, 1)
            for first in range(0, span.length, _QUERIES):
                stop = min(first + _QUERIES, span.length)
                until = _blocks(span.start + stop)
                out[span.row + first : span.row + stop] = attend(
                    query[span.row + first : span.row + stop].unsqueeze(0),
                    keys=keys[span.slot : span.slot + 1, :, :until],
                    values=values[span.slot : span.slot + 1, :, :until],
                    starts=torch.tensor([span.start + first]),
                    **options,
                )[0]
            return
        rows, slots, starts = (
            torch.tensor(part) for part in zip(*((s.row, s.slot, s.start) for s in group), strict=True)
        )
        keys[slots, :, starts] = key[rows]
        values[slots, :, starts] = value[rows]
        until = _blocks(int(starts.max()) + 1)
        out[rows] = attend(
            query[rows].unsqueeze(1),
            keys=keys[slots, :, :until],
            values=values[slots, :, :until],
            starts=starts,
            **options,
        )[:, 0]

    def _feed_forward(self, x: Tensor, *, layer: Layer) -> Tensor:
        if layer.experts is None:
            assert layer.mlp is not None, "a layer has an MLP or experts"
            return self._mlp(x, layer.mlp)
        assert layer.router is not None, "experts have a router"
        probabilities = torch.softmax(_linear(x, Affine(weight=layer.router)), dim=-1)
        weights, chosen = probabilities.topk(self.description.experts_per_token, dim=-1)
        if self.description.normalise_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(layer.experts):  # in this order for every token
            rows, place = torch.where(chosen == number)
            if len(rows):
                fed = self._mlp(x[rows.repeat(2) if len(rows) == 1 else rows], expert)[: len(rows)]
                out[rows] += fed * weights[rows, place, None]
        if layer.mlp is not None and layer.shared_gate is not None:
            shared = self._mlp(x, layer.mlp)
            out = out + torch.sigmoid(_linear(x, Affine(weight=layer.shared_gate))) * shared
        return out

    def _mlp(self, x: Tensor, mlp: Mlp) -> Tensor:
        raised = _linear(x, mlp.up)
        if mlp.gate is None:
            return _linear(self._activation(raised), mlp.down)
        gate = _linear(x, mlp.gate)
        inner = swiglu(gate, raised) if self.description.activation == "silu" else self._activation(gate) * raised
        return _linear(inner, mlp.down)

    def _norm(self, x: Tensor, norm: Affine | None) -> Tensor:
        assert norm is not None, "the family has this norm"
        if self.description.norm == "layer":
            return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.description.norm_eps)
        return rms_norm(x.contiguous(), norm.weight, eps=self.description.norm_eps)


def _linear(x: Tensor, affine: Affine) -> Tensor:
    return linear(x, weight=affine.weight, bias=affine.bias)


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK) * BLOCK


def _groups(spans: list[Span]) -> list[list[Span]]:
    """The spans of one row together, the others alone."""
    single = [span for span in spans if span.length == 1]
    return [*([single] if single else []), *([span] for span in spans if span.length > 1)]


def _alibi_slopes(heads: int) -> Tensor:
    """fp32 [H] (Press et al. 2021, https://arxiv.org/abs/2108.12409): powers of 2^(-8/n), and every other of the next n's for the rest."""
    power = 1 << (heads.bit_length() - 1)
    base = torch.tensor(2.0 ** -(8.0 / power))
    slopes = base ** torch.arange(1, power + 1)
    if power < heads:
        finer = torch.tensor(2.0 ** -(8.0 / (2 * power)))
        slopes = torch.cat([slopes, finer ** torch.arange(1, 2 * (heads - power), 2)])
    return slopes
