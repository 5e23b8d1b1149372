"""Experts as one module with stacked weights, as in Hugging Face's transformers since version 5.

Such a module has `num_experts`, parameters that all start with that dimension, and is called as `experts(hidden [T, C], choices [T, k],
weights [T, k])` for the weighted sum [T, C]. After it is distributed over ranks it keeps its own forward, which then gets this rank's
weights and one choice of weight 1 per row. Results have the dtype of their inputs.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ztk.kernels import Routing, moe_combine, moe_slots
from ztk.parallel.moe.exchange import ExpertExchange

CALLS = (
    ("top_k_index", "top_k_weights"),
    ("router_indices", "routing_weights"),
)  # names of choices and weights in models


def is_stacked_experts(module: nn.Module) -> bool:
    """Whether `module` has stacked experts as described in the module docstring."""
    number, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(number, int) or not parameters or any(p.dim() < 2 or p.shape[0] != number for p in parameters):
        return False
    names = set(inspect.signature(type(module).forward).parameters)
    return any(names.issuperset(call) for call in CALLS)


class SpreadExperts:
    """The forward of a module whose experts are distributed over ranks. `forward` is the module's own, over this rank's experts:
    (hidden [T, C], choices [T, 1], weights [T, 1]) -> [T, C]."""

    def __init__(self, forward: Callable[..., Tensor], *, num_experts: int, exchange: ExpertExchange) -> None:
        self._forward, self._num_experts, self._exchange = forward, num_experts, exchange

    def __call__(self, hidden_states: Tensor, choices: Tensor | None = None, weights: Tensor | None = None, **by_name):
        """hidden_states [.., C], choices int [T, k], weights [T, k] -> [.., C], through experts on all ranks."""
        choices = _given(choices, by_name=by_name, index=0)
        weights = _given(weights, by_name=by_name, index=1)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        slots = moe_slots(choices, num_experts=self._num_experts)
        routing = Routing(
            weights=weights.float(),
            experts=choices,
            counts=slots.counts,
            offsets=slots.offsets,
            order=slots.order,
            position=slots.position,
        )
        rows = self._exchange(tokens, routing=routing, experts=self._run).rows
        return moe_combine(rows, weights=routing.weights, position=routing.position).view_as(hidden_states)

    def _run(self, x: Tensor, *, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor:
        """x [R, C], each row for one expert -> results by slot. A rank without rows computes one row of zeros: other ranks with the same
        experts gather their weights, and it must take part."""
        by_slot = x.index_select(0, order) if len(x) else x.new_zeros(1, x.shape[1])
        sizes = offsets.diff() if len(x) else torch.ones(1, dtype=torch.int32, device=x.device)
        experts = torch.arange(len(sizes), device=x.device).repeat_interleave(sizes, output_size=len(by_slot))
        results = self._forward(by_slot, experts[:, None], x.new_ones(len(by_slot), 1))
        return results[: len(x)]


def _given(value: Tensor | None, *, by_name: dict, index: int) -> Tensor:
    return value if value is not None else next(by_name[call[index]] for call in CALLS if call[index] in by_name)
