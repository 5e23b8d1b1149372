"""The forwards of modules whose weights are cut.

[Note: Shared inputs]
Query, key and value multiply the same input, so its gradient needs one sum over the ranks, not three. The axis therefore caches the copied
(or gathered) input as long as the input lives, and layers that get the same tensor share it. The cache owns the copy: in a recomputed
block it would not be kept alive otherwise. Recomputed activations are new tensors with copies of their own. Results have the dtype of x.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.core.runtime import Comm
from ztk.core.runtime.differentiable import LinearMap, through
from ztk.core.runtime.input_gradients import Taker, offer_to_take
from ztk.core.runtime.own_forward import has_own_forward, replace_forward
from ztk.kernels.launch.functions import Function, is_transformed
from ztk.nn.linear import Linear
from ztk.parallel.tensor.collectives import (
    Started,
    gather_last,
    gathered,
    scatter_out,
    scattered,
    split_last,
    start_scattering,
    start_summing,
    sum_out,
    summed,
)
from ztk.parallel.tensor.derived import is_conv1d

# Entry of an activation into column-parallel layers, whose gradients for it are summed over the ranks.
#
# [Note: Overlap] Layers that share an input (query, key and value; gate and up) share its `Entrance`. In the backward each hands over its
# part of the input's gradient before it computes the gradient of its weight (`ztk.core.runtime.input_gradients`). The last one's part
# completes the gradient, and its collective starts: it overlaps with the product of that weight, in place, without a copy (Megatron's
# asynchronous all-reduce, Narayanan et al. 2021, https://arxiv.org/abs/2104.04473). The entrance's own backward waits for it. Parts are added
# up in the order in which autograd would add them. If a layer does not hand over its part (because of an adapter, autocast, or a forward of
# its own), or gets no gradient, the sum begins when autograd has all parts, as without overlap.


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


_NO_COPY = (
    "this module holds one rank's part of its weights (tensor parallelism), and a copy would have no part in the sums over the ranks: copy or "
    "average the model before it is cut; ztk.checkpoint.full_state_dict(engine) has the full weights"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """The last activation that has entered. source: the original activation. with_grad: whether autograd was on."""

    source: weakref.ref
    entrance: Entrance
    entered: Tensor
    with_grad: bool


class TensorAxis:
    """Entry and exit of activations of tensor-parallel layers, along one mesh axis.

    sequence: sequence parallelism. Between such layers every rank keeps its part of the sequence (dim 1) instead of a full copy.
    """

    def __init__(self, comm: Comm, *, sequence: bool = False) -> None:
        self.comm, self.sequence = comm, sequence
        self._shared: _Shared | None = None
        self._cut = False  # whether this pass cuts the sequence

    def begin(self, length: int) -> None:
        """Begins a forward over sequences of `length` tokens. Raises ValueError in training if they cannot be cut."""
        self._cut = self.sequence and length % self.comm.size == 0
        if self.sequence and not self._cut and torch.is_grad_enabled():
            raise ValueError(
                f"data.seq_len={length} is not a multiple of topology.tensor={self.comm.size}, as "
                "topology.sequence_parallel=true needs; change one of them"
            )

    def enter(self, x: Tensor, *, label: str, alone: bool = False) -> Tensor:
        """x [..., C] -> [..., C]; of a cut sequence [B, T / ranks, C] -> [B, T, C]. See [Note: Shared inputs].

        alone: the result is only used by one product of `ztk.nn.linear`, so its gradient may be summed before autograd has it.
        """
        if is_transformed():  # such tensors must not be kept, and layers do not hand over their gradients
            passage = self._passage(label)
            return through(x, forward=passage.forward, backward=passage.adjoint)
        shared = self._shared
        if shared is None or shared.source() is not x or shared.with_grad != torch.is_grad_enabled():
            entrance = Entrance(self._passage(label))
            shared = self._shared = _Shared(
                source=weakref.ref(x, self._forget),
                entrance=entrance,
                entered=entrance.open(x),
                with_grad=torch.is_grad_enabled(),
            )
        shared.entrance.add_user(is_product=alone)
        return shared.entered

    def _passage(self, label: str) -> Passage:
        return (gathering if self._cut else copying)(self.comm, label=label)

    def _forget(self, source: weakref.ref) -> None:
        if self._shared is not None and self._shared.source is source:
            self._shared = None

    def leave(self, x: Tensor, *, label: str, in_place: bool = False) -> Tensor:
        """Partial results [..., C] -> their sum over the ranks, or with a cut sequence this rank's part of it, [B, T / ranks, C].

        in_place: nothing else needs `x`.
        """
        if self._cut:
            return scatter_out(x, comm=self.comm, label=label)
        return sum_out(x, comm=self.comm, label=label, in_place=in_place)


def cut_column(module: nn.Module, *, axis: TensorAxis, name: str) -> None:
    """Makes `module` column-parallel: x [..., in] -> this rank's outputs [..., out / n].

    A Conv1D of GPT-2 is a linear layer whose weight is [in, out].
    """
    original, alone = module.forward, _is_one_product(module)

    @functools.wraps(original)
    def forward(x: Tensor, *args, **kwargs) -> Tensor:
        return original(axis.enter(x, label=name, alone=alone), *args, **kwargs)

    replace_forward(module, by=forward, refusal=_NO_COPY)
    _set_size(module, name="out_features", dim=0)
    _set_size(module, name="nf", dim=1)


def cut_column_gathered(module: nn.Module, *, axis: TensorAxis, name: str, sizes: tuple[int, ...]) -> None:
    """Makes `module` column-parallel and gathers: x [..., in] -> all outputs [..., out] on every rank."""
    cut_column(module, axis=axis, name=name)
    local = module.forward

    @functools.wraps(local)
    def forward(x: Tensor, *args, **kwargs) -> Tensor:
        return gather_last(local(x, *args, **kwargs), comm=axis.comm, sizes=sizes, label=name)

    replace_forward(module, by=forward, refusal=_NO_COPY)


def cut_row(module: nn.Module, *, axis: TensorAxis, name: str) -> None:
    """Makes `module` row-parallel: this rank's inputs [..., in / n] -> [..., out], summed over the ranks. A bias is added once, to the sum.

    Raises ValueError for a module whose forward is not a linear layer's and which has a bias.
    """
    plain = _plain_forward(module)
    if plain is None and getattr(module, "bias", None) is not None:
        raise ValueError(
            f"tensor plan {name}=row: {type(module).__name__} has a bias and a forward of its own, so it is not known where "
            "the bias goes; use a linear layer, or leave this module out of the plan"
        )
    original, adapter = module.forward, getattr(module, "adapter", None)  # of ztk.nn.lora
    alone = _is_one_product(module)

    @functools.wraps(original)
    def forward(x: Tensor, *args, **kwargs) -> Tensor:
        if plain is None or module.bias is None:
            return axis.leave(original(x, *args, **kwargs), label=name, in_place=alone)
        local = plain(x)
        if adapter is not None:
            local = adapter(local, x=x)
        return axis.leave(local, label=name, in_place=alone) + module.bias

    replace_forward(module, by=forward, refusal=_NO_COPY)
    _set_size(module, name="in_features", dim=1)
    _set_size(module, name="nx", dim=0)


def split_input(module: nn.Module, *, axis: TensorAxis, name: str, sizes: tuple[int, ...]) -> None:
    """Before a row-parallel module: full inputs [..., in] -> this rank's part [..., in / n]."""
    original = module.forward

    @functools.wraps(original)
    def forward(x: Tensor, *args, **kwargs) -> Tensor:
        return original(split_last(x, comm=axis.comm, sizes=sizes, label=name), *args, **kwargs)

    replace_forward(module, by=forward, refusal=_NO_COPY)


def cut_vocabulary(module: nn.Embedding, *, axis: TensorAxis, name: str, words: range) -> None:
    """Makes `module` vocabulary-parallel: tokens [B, T] -> [B, T, width]. Each rank looks up its own rows, with zeros for all other
    tokens, and the results are summed over the ranks.

    Raises ValueError for an embedding with max_norm or sparse gradients.
    """
    if module.max_norm is not None or module.sparse:
        raise ValueError(
            f"tensor plan {name}=vocabulary: an embedding with max_norm or sparse gradients cannot be cut; leave it out of the plan"
        )

    original = module.forward  # it may scale the rows

    @functools.wraps(original)
    def forward(tokens: Tensor) -> Tensor:
        axis.begin(tokens.shape[1] if tokens.dim() > 1 else 1)
        here = (tokens >= words.start) & (tokens < words.stop)
        local = torch.where(here, tokens - words.start, 0)
        return axis.leave(original(local) * here.unsqueeze(-1), label=name, in_place=True)

    replace_forward(module, by=forward, refusal=_NO_COPY)
    if module.padding_idx is not None:  # only the rank with its row skips the gradient
        module.padding_idx = module.padding_idx - words.start if module.padding_idx in words else None
    _set_size(module, name="num_embeddings", dim=0)


def _is_one_product(module: nn.Module) -> bool:
    """Whether its forward is a linear layer's, and nothing else reads the input or keeps the result."""
    is_linear = type(module).forward in (Linear.forward, nn.Linear.forward)
    return is_linear and not has_own_forward(module) and getattr(module, "adapter", None) is None


def _plain_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The product without the bias, for known linear layers."""
    forward = type(module).forward
    if forward is Linear.forward:
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        return lambda x: module.product(x, weight=module.weight)
    if forward is nn.Linear.forward:
        return lambda x: F.linear(x, module.weight)
    if is_conv1d(module):
        return lambda x: x @ module.weight
    return None


def _set_size(module: nn.Module, *, name: str, dim: int) -> None:
    if hasattr(module, name):
        # pyrefly: ignore[bad-index]  # nn.Module types every attribute as Tensor or Module
        setattr(module, name, module.weight.shape[dim])
