"""Rounding errors of reductions in bf16: around NCCL's ring, and as ztk adds on a CPU."""

import math

import pytest
import torch
from torch import Tensor

from ztk.core.runtime.comm.transport import sum_in_rank_order

RANKS, ELEMENTS = 8, 1 << 16


def ring_sum(parts: list[Tensor]) -> Tensor:
    """A reduce-scatter around a ring: chunk r begins at rank r + 1, and every rank adds its part and passes on the sum in the parts' dtype."""
    chunks = [part.chunk(len(parts)) for part in parts]
    sums = []
    for chunk in range(len(parts)):
        order = [(chunk + 1 + hop) % len(parts) for hop in range(len(parts))]
        total = chunks[order[0]][chunk]
        for rank in order[1:]:
            total = total + chunks[rank][chunk]
        sums.append(total)
    return torch.cat(sums)


@pytest.mark.parametrize(("mean", "expected"), [(0.0, math.sqrt(35 / 8)), (1.0, math.sqrt(203 / 64))])
def test_a_ring_in_bf16_rounds_at_every_hop(mean, expected):
    """A sum of k parts has the variance k if the parts are independent, and k^2 if they are alike. A rounding error is relative to its sum,
    so the errors of 2 to 8 parts have 35 times the variance of a part's, or 203 times, and one rounding of the sum 8 or 64 times."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        (mean + (0.1 if mean else 1) * torch.randn(ELEMENTS, generator=generator)).bfloat16() for _ in range(RANKS)
    ]
    exact = torch.stack(parts).double().sum(0)
    once = torch.empty_like(parts[0])
    sum_in_rank_order(parts, out=once)

    def error(found: Tensor) -> float:
        return float((found.double() - exact).square().mean().sqrt())

    # How a value lies between two powers of two changes its relative error by up to a factor of two, on average over many much less.
    assert error(ring_sum(parts)) / error(once) == pytest.approx(expected, rel=0.25)
    in_fp32 = ring_sum([part.float() for part in parts])
    assert error(in_fp32) < error(once) * 2**-14  # 16 bits more
