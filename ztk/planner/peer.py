"""Replaces ztk's operations by another library's while a plan traces them.

A peer differs in the operations of a block, in how its loss reads the logits, in the results that recompute=selective keeps, and in the
memory of gradients. Each difference is a function of torch's operations that replaces one of ztk's, so the tracker counts the peer's
allocations.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ztk.core.policies.peers import Gradients, Kept, Logits, Peer, Way
from ztk.core.runtime import MemoryLedger
from ztk.data.borders import IGNORED
from ztk.kernels import attention
from ztk.nn.loss import LanguageLoss
from ztk.parallel.recompute import selective
from ztk.parallel.tensor.collectives import gather_last
from ztk.parallel.tensor.loss import VocabularyParallelLoss
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.reduction import GradientReduction

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@contextmanager
def as_peer(peer: Peer) -> Iterator[None]:
    """Context in which planned tensors use the operations of `peer`."""
    with ExitStack() as stack:
        for name, function in _block(peer.way).items():
            stack.enter_context(mock.patch(f"ztk.nn.{name}", function))
        if peer.logits is not Logits.ztk:
            stack.enter_context(_losses(peer.logits))
        if peer.kept is Kept.half:
            stack.enter_context(mock.patch.object(selective, "contexts", half_contexts))
        if peer.gradients is Gradients.ddp:
            stack.enter_context(_ddp_gradients())
        yield


# A block


def _block(way: Way) -> dict[str, Callable]:
    """Names of functions in the modules of `ztk.nn` -> the peer's functions."""
    gated: dict[str, Callable] = {"mlp.swiglu": _swiglu, "moe.swiglu": _swiglu}
    repeated: dict[str, Callable] = {"self_attention.attention": _repeated_attention}
    if way is Way.eager:
        return {"norm.rms_norm": _rms_norm, "self_attention.rope": _rope} | gated | repeated
    return gated if way is Way.flash else repeated if way is Way.compiled else {}


def _rms_norm(x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None):
    """RMSNorm in the operations of torchtitan and KempnerForge; x [..., N], weight [N]. Returns the same as `ztk.kernels.rms_norm`."""
    total = x if residual is None else x + residual
    wide = total.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(x) * weight
    return y if residual is None else (y, total)


def _rope(x: Tensor, *, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotation in complex numbers, the operations of torchtitan's `apply_rotary_emb`; x [B, T, H, D], cos and sin [T, D / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(cos, sin).unsqueeze(-2)
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def _repeated_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention after torchtitan's `repeat_kv`; query [B, T, H, D], key and value [B, T, K, D]."""
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    return attention(query, key, value)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Two operations; gate, up and the result [..., N]."""
    return F.silu(gate) * up


# The loss


@contextmanager
def _losses(kind: Logits) -> Iterator[None]:
    """Context in which losses read their logits as in `kind`."""
    held: list[Tensor] = []  # by the script, until the next micro-batch has logits

    def of_head(module: LanguageLoss, head: nn.Module, *, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return loss(head(x), targets)

    def of_columns(module: VocabularyParallelLoss, logits: Tensor, targets: Tensor | None = None) -> Tensor:
        if kind is Logits.held:
            logits = gather_last(logits, comm=module._comm, sizes=module._sizes, label="logits")
        return _OfColumns.apply(logits.flatten(0, 1)) if kind is Logits.eager else loss(logits, targets)

    def loss(logits: Tensor, targets: Tensor | None) -> Tensor:
        assert targets is not None, "a plan trains"
        held[:] = [logits] if kind is Logits.held else []
        rows = logits.flatten(0, 1)
        if kind is Logits.compiled:
            return _Compiled.apply(rows)
        if kind is Logits.softmax:
            rows = rows.float()
            del logits  # frees them
            return _KeptSoftmax.apply(rows)
        return F.cross_entropy(rows.float() if kind is Logits.eager else rows, targets.flatten(), ignore_index=IGNORED)

    with (
        mock.patch.object(LanguageLoss, "of_head", of_head),
        mock.patch.object(VocabularyParallelLoss, "forward", of_columns),
    ):
        yield


class _Compiled(torch.autograd.Function):
    """One pass over the logits [rows, V] forward and one backward, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(-1).float().mean()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return logits * d_loss.to(logits.dtype)


class _KeptSoftmax(torch.autograd.Function):
    """nanotron's `_ShardedCrossEntropy` of fp32 logits [rows, own columns]."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        softmax = wide - wide.amax(-1, keepdim=True)
        total = softmax.exp_().sum(-1, keepdim=True)
        ctx.save_for_backward(softmax.div_(total))
        return total.log().mean()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Tensor:
        (softmax,) = ctx.saved_tensors
        return softmax.mul_(d_loss)


class _OfColumns(torch.autograd.Function):
    """torch's `loss_parallel` (torch/distributed/tensor/parallel/loss.py) of an fp32 copy of logits [rows, own columns]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        wide = logits.float()
        shifted = wide - wide.amax(-1, keepdim=True)
        total = torch.exp(shifted).sum(-1, keepdim=True).log()
        logarithms = shifted - total
        ctx.save_for_backward(logarithms)
        ctx.dtype = logits.dtype
        return logarithms.mean()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Tensor:
        (logarithms,) = ctx.saved_tensors
        gradient = torch.zeros_like(logarithms)
        total = gradient + torch.exp(logarithms)
        wide = total * d_loss
        del gradient, total
        return wide.to(ctx.dtype)


# Kept results, and gradients


def half_contexts():
    """Makes the contexts of `selective.contexts`, without the results of every second product."""
    counted = {False: 0, True: 0}  # products, by whether the block is repeated

    def choose(ctx: Any, operator: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            counted[ctx.is_recompute] += 1
            if counted[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return selective.choose(ctx, operator, *args, **kwargs)

    return create_selective_checkpoint_contexts(choose)


@contextmanager
def _ddp_gradients() -> Iterator[None]:
    """Context in which gradients stay until their backward ends, and each rank has buckets for all of them."""
    held: list[Tensor | None] = []
    buckets: list[Tensor] = []
    allocate, accept, finish = (getattr(GradientReduction, name) for name in ("_allocate_resident", "accept", "finish"))

    def allocated(reduction: GradientReduction, ledger: MemoryLedger) -> dict[Bucket, Tensor]:
        resident = allocate(reduction, ledger)
        buckets.extend(torch.empty_like(buffer, dtype=bucket.traits.dtype) for bucket, buffer in resident.items())
        return resident

    def accepted(reduction: GradientReduction, bucket: Bucket, *, index: int) -> None:
        held.append(bucket.parameters[index].grad)
        accept(reduction, bucket, index=index)

    def finished(reduction: GradientReduction) -> None:
        finish(reduction)
        held.clear()

    with (
        mock.patch.object(GradientReduction, "_allocate_resident", allocated),
        mock.patch.object(GradientReduction, "accept", accepted),
        mock.patch.object(GradientReduction, "finish", finished),
    ):
        yield
