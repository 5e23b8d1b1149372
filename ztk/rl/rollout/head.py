"""Computes log-probabilities of answers, and losses of them, from a decoder's last hidden states, with logits in chunks if they would be
large.

See `ztk.kernels.linear_logprob`. On a CPU the results are bitwise equal to the computation over all logits. On a GPU a product's rows
depend on their number, which `rollout.identity` detects.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ztk.core.runtime.own_forward import has_own_forward
from ztk.kernels import chosen_logprobs, linear_logit_loss, linear_logprob, linear_token_loss
from ztk.kernels.ops.linear_logits import LogitLoss
from ztk.kernels.ops.linear_logprob import TokenLoss
from ztk.nn import Decoder
from ztk.nn import loss as losses
from ztk.nn.linear import Linear, linear
from ztk.parallel.sequence import divides_sequences
from ztk.rl.rollout.engine_attention import has_engine_attention
from ztk.rl.rollout.kept import Hide
from ztk.rl.rollout.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """The requested result of a forward.

    index: positions in the flattened rows, int64 [N]. tokens: the next tokens, int64 [N]; without them, logits are returned. loss_of:
    with it, the sum of losses is returned, else log-probabilities. hide: masks tokens in the log-probabilities. logit_loss: the sum of
    losses of the logits is returned.
    states: the hidden states are returned, and the output layer's weight, as a copy if `copies`.
    """

    index: Tensor
    tokens: Tensor | None = None
    temperature: float = 1.0
    loss_of: TokenLoss | None = None
    hide: Hide | None = None
    logit_loss: LogitLoss | None = None
    states: bool = False
    copies: bool = False


class AnswerHead(losses.LanguageLoss):
    """Replaces a decoder's `loss`: a forward without targets returns the requested result for some positions, else logits [B, T, V]."""

    def __init__(self, *, z_loss: float = 0.0) -> None:
        super().__init__(z_loss=z_loss)
        self._wanted: _Wanted | None = None
        self.kept_weight: Tensor | None = None  # of the output layer, from a forward that returns states

    def of_head(self, head: nn.Module, *, x: Tensor, targets: Tensor | None = None) -> Tensor:
        wanted = self._wanted
        if wanted is None:
            return super().of_head(head, x=x, targets=targets)
        rows = x.flatten(0, 1).index_select(0, wanted.index)
        if wanted.states:
            weight: Any = head.weight
            self.kept_weight = weight.detach().clone() if wanted.copies else weight.detach()
            return rows
        if wanted.logit_loss is not None:
            return linear_logit_loss(rows, head.weight, loss_of=wanted.logit_loss, product=_product)
        if wanted.tokens is None:
            return head(rows)
        options: dict[str, Any] = {"temperature": wanted.temperature, "product": _product, "hide": wanted.hide}
        if wanted.loss_of is None:
            return linear_logprob(rows, head.weight, wanted.tokens, **options)
        return linear_token_loss(rows, head.weight, wanted.tokens, loss_of=wanted.loss_of, **options)

    @contextmanager
    def wanting(self, wanted: _Wanted) -> Iterator[None]:
        """Sets the request for the forwards inside."""
        self._wanted = wanted
        try:
            yield
        finally:
            self._wanted = None


class Answers:
    """The answers in a layout, for an engine whose logits would be large. See `large_answers`.

    engine: called as a forward. mask: bool [S, length] on the CPU, N tokens of the layout's texts, never a text's first.
    """

    def __init__(self, engine: Any, *, head: AnswerHead) -> None:
        self._engine, self._head = engine, head

    def logits(self, layout: Layout, *, index: Tensor, model: Any = None) -> Tensor:
        """Returns logits at some of the flattened tokens, int64 [S] on the device: [S, V]. model: called in the place of the engine."""
        pair = index.repeat(2) if len(index) == 1 else index  # the product of a single row may have other bits
        with self._head.wanting(_Wanted(index=pair)):
            return layout.forward(model or self._engine)[: len(index)]

    def chosen(self, logits: Tensor, *, tokens: Tensor, temperature: float) -> Tensor:
        """Returns the log-probabilities of `tokens`, int64 [S], under logits [S, V]: float32 [S] on the CPU, as returned by
        `logprobs`.
        """
        scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
        return chosen_logprobs(scaled, tokens.to(logits.device)).cpu()

    def logprobs(self, layout: Layout, *, mask: Tensor, temperature: float = 1.0, hide: Hide | None = None) -> Tensor:
        """Returns the log-probabilities of the tokens of `mask`: float32 [N]."""
        with self._head.wanting(_tokens_of(layout, mask=mask, temperature=temperature, hide=hide)):
            return layout.forward(self._engine)

    def token_loss(
        self,
        layout: Layout,
        *,
        mask: Tensor,
        loss_of: TokenLoss,
        temperature: float = 1.0,
        hide: Hide | None = None,
    ) -> Tensor:
        """Returns the sum of losses of the tokens of `mask` in order, a scalar. `loss_of` is called once per chunk."""
        wanted = _tokens_of(layout, mask=mask, temperature=temperature, loss_of=loss_of, hide=hide)
        with self._head.wanting(wanted):
            return layout.forward(self._engine)

    def logit_loss(self, layout: Layout, *, mask: Tensor, loss_of: LogitLoss) -> Tensor:
        """Returns the sum of losses of the logits that predict the tokens of `mask` in order, a scalar.

        `loss_of` is called once per chunk.
        """
        with self._head.wanting(_Wanted(index=layout.before(mask), logit_loss=loss_of)):
            return layout.forward(self._engine)

    def logits_by_part(self, layout: Layout, *, mask: Tensor) -> Callable[[slice], Tensor]:
        """Returns a function that computes the logits [n, V] that predict a slice of the tokens of `mask`, without a gradient, until the
        next optimizer step.

        It keeps their hidden states, and at stage 3 a copy of the output layer, which is released after the forward.
        """
        is_sharded = self._engine.zero.policy.stage == 3
        with self._head.wanting(_Wanted(index=layout.before(mask), states=True, copies=is_sharded)), torch.no_grad():
            states = layout.forward(self._engine)
        weight, self._head.kept_weight = self._head.kept_weight, None
        assert weight is not None, "set by the forward"
        return lambda cut: _product(states[cut], weight)


def large_answers(engine: Any, *, rows: int, length: int) -> Answers | None:
    """Returns None if the logits of `rows` x `length` tokens are small, or the engine's module is not a native decoder with a plain
    output layer.
    """
    module = getattr(engine, "module", None)
    if not _has_plain_head(module):
        return None
    weight = module.head.weight
    is_large = rows * length * len(weight) * weight.dtype.itemsize > losses.LARGE_LOGITS
    return _answers(engine) if is_large else None


def answer_logits(engine: Any, *, layout: Layout, mask: Tensor) -> Tensor:
    """Returns the logits that predict the tokens of `mask`, bool [S, length] on the CPU, never a text's first: [N, V].

    The output layer multiplies only these rows if the decoder's rows are bitwise independent of their pack, else all tokens.
    """
    index, module = layout.before(mask), getattr(engine, "module", None)
    if layout.documents is not None and _has_plain_head(module) and has_engine_attention(module):
        return _answers(engine).logits(layout, index=index)
    return layout.forward(engine).flatten(0, 1).index_select(0, index)


def _has_plain_head(module: Any) -> TypeGuard[Decoder]:
    if not isinstance(module, Decoder) or type(module.loss) not in (losses.LanguageLoss, AnswerHead):
        return False
    if divides_sequences(module):  # the output layer gets a part of the tokens
        return False
    head = module.head
    return type(head) is Linear and head.bias is None and not has_own_forward(head)


def _answers(engine: Any) -> Answers:
    module = engine.module
    if not isinstance(module.loss, AnswerHead):
        module.loss = AnswerHead(z_loss=module.loss.z_loss).train(module.loss.training)
    return Answers(engine, head=module.loss)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight=weight)


def _tokens_of(
    layout: Layout,
    *,
    mask: Tensor,
    temperature: float,
    loss_of: TokenLoss | None = None,
    hide: Hide | None = None,
) -> _Wanted:
    chosen = layout.tokens.flatten().index_select(0, layout.places(mask))
    return _Wanted(index=layout.before(mask), tokens=chosen, temperature=temperature, loss_of=loss_of, hide=hide)
