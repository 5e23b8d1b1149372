"""Tensors that a selectively recomputed block keeps: the results of matrix products and attention, which take most time and little
memory."""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ztk.kernels import operator

_KEPT = {
    "aten": (
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_flash_attention_forward", "_efficient_attention_forward"),
    ),
    "mkldnn": ("_linear_pointwise",),
    "ztk": ("linear",),
}
_KEPT_OF_ZTK = ("attention", "grouped_matmul")


@functools.cache
def kept_operators() -> set:
    """The operators whose results are kept, including torch's if this version has them."""
    packets = [
        getattr(getattr(torch.ops, namespace), name, None) for namespace, names in _KEPT.items() for name in names
    ]
    return {operator(name) for name in _KEPT_OF_ZTK} | {
        packet.default for packet in packets if packet is not None and "default" in packet.overloads()
    }


def contexts():
    """A pair of contexts for `torch.utils.checkpoint`: around the forward, and around its repetition."""
    return create_selective_checkpoint_contexts(choose)


def choose(ctx: object, operator: object, *args, **kwargs) -> CheckpointPolicy:
    """Whether the results of `operator`, of any shapes, are kept; called for every operation of a block and of its repetition."""
    return CheckpointPolicy.MUST_SAVE if operator in kept_operators() else CheckpointPolicy.PREFER_RECOMPUTE
