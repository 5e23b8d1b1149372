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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.core.runtime import Comm
from ztk.core.runtime.differentiable import through
from ztk.core.runtime.own_forward import has_own_forward, replace_forward
from ztk.kernels.launch.functions import is_transformed
from ztk.nn.linear import Linear
from ztk.parallel.tensor.collectives import gather_last, scatter_out, split_last, sum_out
from ztk.parallel.tensor.derived import is_conv1d
from ztk.parallel.tensor.entering import Entrance, Passage, copying, gathering

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
