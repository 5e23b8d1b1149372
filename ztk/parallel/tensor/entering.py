"""Entry of an activation into column-parallel layers, whose gradients for it are summed over the ranks.

[Note: Overlap]
Layers that share an input (query, key and value; gate and up) share its `Entrance`. In the backward each hands over its part of the input's
gradient before it computes the gradient of its weight (`ztk.core.runtime.input_gradients`). The last one's part completes the gradient, and
its collective starts: it overlaps with the product of that weight, in place, without a copy (Megatron's asynchronous all-reduce, Narayanan
et al. 2021, https://arxiv.org/abs/2104.04473). The entrance's own backward waits for it. Parts are added up in the order in which
autograd would add them. If a layer does not hand over its part (because of an adapter, autocast, or a forward of its own), or gets no
gradient, the sum begins when autograd has all parts, as without overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ztk.core.runtime import Comm
from ztk.core.runtime.differentiable import LinearMap, through
from ztk.core.runtime.input_gradients import Taker, offer_to_take
from ztk.kernels.launch.functions import Function
from ztk.parallel.tensor.collectives import Started, gathered, scattered, start_scattering, start_summing, summed


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """forward: runs on the input. adjoint: runs on its gradient. start: begins the adjoint of a gradient that is not referenced elsewhere.
    Returns None if the gradient must be copied first."""

    forward: LinearMap
    adjoint: LinearMap
    start: Callable[[Tensor], Started | None]


def copying(comm: Comm, *, label: str) -> Passage:
    """The forward returns x (any shape) in the same memory; its gradient is summed over the ranks."""
    name = f"gradient of {label}"
    return Passage(
        forward=lambda x: x.detach(),  # a view of x would keep x alive, and `TensorAxis` would never drop either
        adjoint=partial(summed, comm=comm, label=name),
        start=partial(start_summing, comm=comm, label=name),
    )


def gathering(comm: Comm, *, label: str) -> Passage:
    """[B, T / n, ...] of every rank -> [B, T, ...]; each rank gets its part of the gradient's sum."""
    name = f"gradient of {label}"
    return Passage(
        forward=partial(gathered, comm=comm, label=label),
        adjoint=partial(scattered, comm=comm, label=name),
        start=partial(start_scattering, comm=comm, label=name),
    )


class Entrance:
    """The gradient of one activation, from the layers that share it. See [Note: Overlap].

    It does not reference the activation, whose autograd node references this object: no garbage collector would find such a cycle.
    """

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self._users = 0  # layers that use the activation
        self._is_for_products = True  # whether only products use it
        self._attached = 0  # layers that hand over their gradient
        self._parts = 0  # handed over in this backward
        self._sum: Tensor | None = None
        self._started: Started | None = None

    def open(self, x: Tensor) -> Tensor:
        """The input of the layers: x [B, T, C], or of a cut sequence [B, T / n, C], as [B, T, C] in x's dtype."""
        entered = _Enter.apply(x, self)
        if entered.requires_grad:
            offer_to_take(entered, attach=self._attach)
        return entered

    def add_user(self, *, is_product: bool) -> None:
        """Adds a layer that uses the activation. is_product: it multiplies it once, by `ztk.nn.linear`, without other reads."""
        self._users += 1
        self._is_for_products &= is_product

    def forward(self, x: Tensor) -> Tensor:
        """The passage's forward of x (any shape)."""
        return self._passage.forward(x)

    def backward(self, d_out: Tensor | None) -> Tensor | None:
        """The gradient of x (any shape). d_out: the gradient from autograd, without the parts that layers have handed over."""
        started, total = self._started, self._sum
        self._parts, self._sum, self._started = 0, None, None
        if started is not None:
            return started.result()
        if total is None:
            total = d_out
        elif d_out is not None:
            total = total + d_out
        return None if total is None else self._passage.adjoint(total)

    def differentiable_backward(self, d_out: Tensor) -> Tensor:
        """Returns the same as `backward` (any shape), for a backward that will be differentiated, in which no layer hands over its part."""
        return through(d_out, forward=self._passage.adjoint, backward=self._passage.forward)

    def _attach(self) -> Taker:
        self._attached += 1
        return self._take

    def _take(self, d_x: Tensor) -> Tensor | None:
        if not self._is_for_products or self._attached != self._users:
            return d_x
        self._sum = d_x if self._sum is None else self._sum.add_(d_x)
        self._parts += 1
        if self._parts == self._users:
            self._started = self._passage.start(self._sum)
        return None


class _Enter(Function):
    @staticmethod
    def forward(ctx, x: Tensor, entrance: Entrance) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entrance = entrance
        return entrance.forward(x)

    @staticmethod
    def backward(ctx, d_out: Tensor | None) -> tuple[Tensor | None, None]:
        if d_out is not None and torch.is_grad_enabled():
            return ctx.entrance.differentiable_backward(d_out), None
        return ctx.entrance.backward(d_out), None
