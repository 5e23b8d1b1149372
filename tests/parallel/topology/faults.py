"""Mistakes that a layout could make and train well with all the same: the matrix must see them."""

from contextlib import AbstractContextManager, ExitStack
from unittest.mock import patch

import torch
from torch import Tensor

from tests.parallel.topology import matrix
from ztk.core.runtime import Process
from ztk.parallel.tensor import collectives, layers
from ztk.train.engine import Engine
from ztk.zero.buckets.gradient import BucketGradient


def follow_with_fault(process: Process, *, fault: str, layout: str, **where) -> matrix.Walk:
    """`matrix.follow` with one of FAULTS."""
    with FAULTS[fault](process):
        return matrix.follow(process, layout=layout, **where)


def _one_replica_weighs_more(process: Process) -> AbstractContextManager:
    """By 5 %: micro-batches divided by the wrong count."""
    factor, scale = 1.05 if process.rank == 0 else 0.95, Engine.scale
    return patch.object(Engine, "scale", lambda engine, loss: scale(engine, loss * factor))


def _gradients_in_8_bits(process: Process) -> AbstractContextManager:
    """Before they are summed over ranks."""
    accept = BucketGradient.accept

    def rounded(own: BucketGradient, index: int, **options) -> None:
        gradient = own.parameters[index].grad
        largest = gradient.abs().amax().clamp_min(1e-30) / 127
        gradient.copy_((gradient / largest).round() * largest)
        accept(own, index, **options)

    return patch.object(BucketGradient, "accept", rounded)


def _activations_in_8_bits(process: Process) -> AbstractContextManager:
    """Partial results, where tensor parallelism sums them."""
    summed = collectives.summed

    def rounded(x: Tensor, **options) -> Tensor:
        return summed(x.to(torch.float8_e4m3fn).to(x.dtype), **options)

    stack = ExitStack()
    for module in (collectives, layers):
        stack.enter_context(patch.object(module, "summed", rounded))
        stack.enter_context(patch.object(module, "start_summing", lambda x, **options: None))  # all sums are `summed`
    return stack


FAULTS = {
    "one replica weighs more": _one_replica_weighs_more,
    "gradients in 8 bits": _gradients_in_8_bits,
    "activations in 8 bits": _activations_in_8_bits,
}
