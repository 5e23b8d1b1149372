"""Log-probabilities of answers, and losses of them, from a decoder's last hidden states: no logits beyond a chunk, where all would be large.

See `ztk.kernels.linear_logprob` for what is computed. On a CPU the results have the bits of the way over all logits; on a GPU a product's rows
depend on their number, which `rollout.identity` finds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.kernels import chosen_logprobs, linear_logprob, linear_token_loss
from ztk.kernels.linear_logprob import TokenLoss
from ztk.nn import Decoder
from ztk.nn import loss as losses
from ztk.nn.linear import Linear, linear
from ztk.runtime.own_forward import has_own_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """index: of positions in the flattened rows, int64 [N]. tokens: what follows there, int64 [N]; None: the logits are wanted. loss_of: None:
    log-probabilities are wanted, else the sum of their losses."""

    index: Tensor
    tokens: Tensor | None = None
    temperature: float = 1.0
    loss_of: TokenLoss | None = None


class AnswerHead(losses.LanguageLoss):
    """In place of a decoder's `loss`: a forward without targets returns what the calls below want of some positions, else logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted: _Wanted | None = None

    def of_head(self, head: nn.Module, *, x: Tensor, targets: Tensor | None = None) -> Tensor:
        wanted = self._wanted
        if wanted is None:
            return super().of_head(head, x=x, targets=targets)
        rows = x.flatten(0, 1).index_select(0, wanted.index)
        if wanted.tokens is None:
            return head(rows)
        options: dict[str, Any] = {"temperature": wanted.temperature, "product": _product}
        if wanted.loss_of is None:
            return linear_logprob(rows, head.weight, wanted.tokens, **options)
        return linear_token_loss(rows, head.weight, wanted.tokens, loss_of=wanted.loss_of, **options)

    @contextmanager
    def wanting(self, wanted: _Wanted) -> Iterator[None]:
        """Of the forwards inside."""
        self._wanted = wanted
        try:
            yield
        finally:
            self._wanted = None


class Answers:
    """The answers of rows of tokens to an engine whose logits would be large. See `large_answers`.

    engine: called as a forward, with rows of tokens int64 [S, T] on its device.
    """

    def __init__(self, engine: Any, *, head: AnswerHead) -> None:
        self._engine, self._head = engine, head

    def logits(self, tokens: Tensor, *, positions: Tensor) -> Tensor:
        """Of one position of every row, int64 [S]: [S, V]."""
        index = torch.arange(len(tokens)) * tokens.shape[1] + positions
        with self._head.wanting(_Wanted(index=index.to(tokens.device))):
            return self._engine(tokens)

    def chosen(self, logits: Tensor, *, tokens: Tensor, temperature: float) -> Tensor:
        """The log-probabilities of `tokens`, int64 [S], under logits [S, V]: float32 [S] on the CPU, as `logprobs` gives them."""
        scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
        return chosen_logprobs(scaled, tokens.to(logits.device)).cpu()

    def logprobs(self, tokens: Tensor, *, mask: Tensor, temperature: float = 1.0) -> Tensor:
        """Of the tokens of `mask`, bool [S, T] on the CPU, never the first of a row: float32 [S, T], 0 elsewhere."""
        wanted, places = _of_mask(tokens, mask=mask, temperature=temperature)
        with self._head.wanting(wanted):
            found = self._engine(tokens)
        return found.new_zeros(tokens.numel()).index_copy(0, places, found).view_as(tokens)

    def token_loss(self, tokens: Tensor, *, mask: Tensor, loss_of: TokenLoss, temperature: float = 1.0) -> Tensor:
        """The sum of losses of the tokens of `mask` in the order of the flattened rows, a scalar; `loss_of` is called once per chunk."""
        wanted, _ = _of_mask(tokens, mask=mask, temperature=temperature, loss_of=loss_of)
        with self._head.wanting(wanted):
            return self._engine(tokens)


def large_answers(engine: Any, *, rows: int, length: int) -> Answers | None:
    """None if the logits of `rows` x `length` tokens are small, or the engine's module is no native decoder with a plain output layer."""
    module = getattr(engine, "module", None)
    if not isinstance(module, Decoder) or not isinstance(module.loss, losses.LanguageLoss):
        return None
    head = module.head
    if type(head) is not Linear or head.bias is not None or has_own_forward(head):
        return None
    itemsize = head.weight.dtype.itemsize
    if rows * length * head.out_features * itemsize <= losses.LARGE_LOGITS:
        return None
    if not isinstance(module.loss, AnswerHead):
        module.loss = AnswerHead()
    return Answers(engine, head=module.loss)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight=weight)


def _of_mask(
    tokens: Tensor, *, mask: Tensor, temperature: float, loss_of: TokenLoss | None = None
) -> tuple[_Wanted, Tensor]:
    """What is wanted of the tokens of `mask`, and their places in the flattened rows, int64 [N]."""
    places = mask.flatten().nonzero().squeeze(1).to(tokens.device)
    chosen = tokens.flatten().index_select(0, places)
    return _Wanted(index=places - 1, tokens=chosen, temperature=temperature, loss_of=loss_of), places
