"""Computes log-probabilities of answers, and losses of them, from a decoder's last hidden states, with logits in chunks if they would be
large.

See `ztk.kernels.linear_logprob`. On a CPU the results are bitwise equal to the computation over all logits. On a GPU a product's rows
depend on their number, which `rollout.identity` detects.

`layout` has the texts of a forward. `mask` is bool [S, length] on the CPU: N tokens of these texts, never a text's first. `model` is an
engine, or the model that a micro-batch's `loss_of` receives.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

from torch import Tensor, nn

from ztk.core.runtime.own_forward import has_own_forward
from ztk.inference.sample import fp32_logprobs
from ztk.kernels import chosen_logprobs, linear_logit_loss, linear_logprob, linear_token_loss, logit_loss
from ztk.kernels.ops.linear_logits import LogitLoss
from ztk.kernels.ops.linear_logprob import TokenLoss
from ztk.nn import Decoder
from ztk.nn import loss as losses
from ztk.nn.linear import Linear, linear
from ztk.parallel.sequence import divides_sequences
from ztk.rl.rollout.engine_attention import has_engine_attention
from ztk.rl.rollout.kept import Hide
from ztk.rl.rollout.layout import Layout
from ztk.train.engine import Engine

# (hidden states [N, C], output layer) -> a forward's result
OfStates = Callable[[Tensor, nn.Module], Tensor]


class AnswerHead(losses.LanguageLoss):
    """Replaces a decoder's `loss`: inside `forward_of` a forward returns a result for some positions, otherwise as `LanguageLoss`."""

    def __init__(self, *, z_loss: float = 0.0) -> None:
        super().__init__(z_loss=z_loss)
        self._wanted: tuple[Tensor, OfStates] | None = None

    def of_head(self, head: nn.Module, *, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self._wanted is None:
            return super().of_head(head, x=x, targets=targets)
        index, of_states = self._wanted
        return of_states(x.flatten(0, 1).index_select(0, index), head)

    def forward_of(self, model: Any, *, layout: Layout, index: Tensor, of_states: OfStates) -> Tensor:
        """Runs a forward over `layout` and returns the result of `of_states` for the tokens at `index`, int64 [N], of the flattened ones."""
        self._wanted = index, of_states
        try:
            return layout.forward(model)
        finally:
            self._wanted = None


def has_large_logits(model: Any, *, tokens: int) -> bool:
    """Returns whether the logits of so many tokens are large, and the module is a native decoder with a plain output layer."""
    module = getattr(model, "module", None)
    if not _has_plain_head(module):
        return False
    weight: Any = module.head.weight
    return tokens * len(weight) * weight.dtype.itemsize > losses.LARGE_LOGITS


def answer_logits(model: Any, *, layout: Layout, mask: Tensor, are_large: bool = False) -> Tensor:
    """Returns the logits that predict the tokens of `mask`: [N, V].

    The output layer multiplies only these rows if the logits of the forward `are_large`, or if the decoder's rows are bitwise independent
    of their pack, else all tokens.
    """
    index, module = layout.before(mask), getattr(model, "module", None)
    is_exact = layout.documents is not None and _has_plain_head(module) and has_engine_attention(module)
    if not (are_large or is_exact):
        return layout.forward(model).flatten(0, 1).index_select(0, index)
    pair = index.repeat(2) if len(index) == 1 else index  # the product of a single row may have other bits
    return _forward(model, layout=layout, index=pair, of_states=lambda rows, head: head(rows))[: len(index)]


def answer_logprobs(
    model: Any, *, layout: Layout, mask: Tensor, temperature: float = 1.0, hide: Hide | None = None
) -> Tensor:
    """Returns the log-probabilities of the tokens of `mask`, float32 [N], in chunks if all logits would be large. hide: masks tokens."""
    tokens = _tokens_of(layout, mask=mask)
    if not has_large_logits(model, tokens=mask.numel()):
        logits = answer_logits(model, layout=layout, mask=mask)
        logits = logits if hide is None else hide(logits, slice(0, len(logits)))
        return fp32_logprobs(logits, temperature=temperature).gather(1, tokens.unsqueeze(1)).squeeze(1)

    def of_states(rows: Tensor, head: Any) -> Tensor:
        return linear_logprob(rows, head.weight, tokens, temperature=temperature, product=_product, hide=hide)

    return _forward(model, layout=layout, index=layout.before(mask), of_states=of_states)


def token_loss(
    model: Any,
    *,
    layout: Layout,
    mask: Tensor,
    loss_of: TokenLoss,
    temperature: float = 1.0,
    hide: Hide | None = None,
) -> Tensor:
    """Returns the sum of losses of the tokens of `mask` in order, a scalar, for large logits. `loss_of` is called once per chunk."""
    tokens = _tokens_of(layout, mask=mask)
    options: Any = {"loss_of": loss_of, "temperature": temperature, "product": _product, "hide": hide}

    def of_states(rows: Tensor, head: Any) -> Tensor:
        return linear_token_loss(rows, head.weight, tokens, **options)

    return _forward(model, layout=layout, index=layout.before(mask), of_states=of_states)


def answer_logit_loss(model: Any, *, layout: Layout, mask: Tensor, loss_of: LogitLoss) -> Tensor:
    """Returns the sum of losses of the logits that predict the tokens of `mask` in order, a scalar.

    `loss_of` is called once per chunk.
    """
    if not has_large_logits(model, tokens=mask.numel()):
        return logit_loss(answer_logits(model, layout=layout, mask=mask), loss_of=loss_of)

    def of_states(rows: Tensor, head: Any) -> Tensor:
        return linear_logit_loss(rows, head.weight, loss_of=loss_of, product=_product)

    return _forward(model, layout=layout, index=layout.before(mask), of_states=of_states)


def logits_by_part(engine: Engine, *, layout: Layout, mask: Tensor) -> Callable[[slice], Tensor]:
    """Runs a forward inside `engine.evaluating`. Returns a function that computes the logits [n, V] that predict a slice of the tokens of
    `mask`, until the next optimizer step.

    If all logits would be large it keeps their hidden states, and at stage 3 a copy of the output layer, which is released after the
    forward.
    """
    if not has_large_logits(engine, tokens=mask.numel()):
        logits = answer_logits(engine, layout=layout, mask=mask)
        return lambda cut: logits[cut]
    weights: list[Tensor] = []

    def of_states(rows: Tensor, head: Any) -> Tensor:
        weight = head.weight.detach()
        weights.append(weight.clone() if engine.zero.policy.stage == 3 else weight)
        return rows

    states = _forward(engine, layout=layout, index=layout.before(mask), of_states=of_states)
    [weight] = weights
    return lambda cut: _product(states[cut], weight)


def sampled_logprobs(logits: Tensor, *, tokens: Tensor, temperature: float) -> Tensor:
    """Returns the log-probabilities of `tokens`, int64 [S], under large logits [S, V], with the bits of `answer_logprobs`: float32 [S] on
    the CPU.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return chosen_logprobs(scaled, tokens.to(logits.device)).cpu()


def _has_plain_head(module: Any) -> TypeGuard[Decoder]:
    if not isinstance(module, Decoder) or type(module.loss) not in (losses.LanguageLoss, AnswerHead):
        return False
    if divides_sequences(module):  # the output layer gets a part of the tokens
        return False
    head = module.head
    return type(head) is Linear and head.bias is None and not has_own_forward(head)


def _forward(model: Any, *, layout: Layout, index: Tensor, of_states: OfStates) -> Tensor:
    module = model.module
    if not isinstance(module.loss, AnswerHead):
        module.loss = AnswerHead(z_loss=module.loss.z_loss).train(module.loss.training)
    return module.loss.forward_of(model, layout=layout, index=index, of_states=of_states)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight=weight)


def _tokens_of(layout: Layout, *, mask: Tensor) -> Tensor:
    """Returns the tokens of `mask`, int64 [N]."""
    return layout.tokens.flatten().index_select(0, layout.places(mask))
