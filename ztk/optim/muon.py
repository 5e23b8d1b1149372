"""Muon: momentum, orthogonalised matrix by matrix (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    buffer    = momentum * buffer + (1 - momentum) * g
    direction = momentum * buffer + (1 - momentum) * g   if nesterov else   buffer
    master    = master * (1 - lr * weight_decay) - lr * scale * orthogonalised(direction)

The first two lines and the last one are elementwise and run on shards; the orthogonalisation needs the matrix. Equals torch.optim.Muon.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk import kernels
from ztk.kernels import Control

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic with the largest slope at zero
EPS = 1e-7  # lower bound of the norm that divides a matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Muon:
    """The update of matrices. steps: number of iterations. dtype: dtype of the computation and of directions in messages."""

    steps: int = 5
    nesterov: bool = True
    dtype: torch.dtype = torch.bfloat16

    def direction(self, buffer: Tensor, *, grad: Tensor, control: Tensor) -> Tensor:
        """Updates `buffer` and returns the direction before orthogonalisation, both float32 [n].

        grad: scaled and summed, [n]; control: one row of the control table. Every operation rounds once, so an element's bits depend only
        on that element, wherever the range begins.
        """
        momentum = control[Control.momentum]
        fresh = grad.to(torch.float32) * control[Control.grad_coefficient] * (1 - momentum)
        buffer.mul_(momentum).add_(fresh)
        return (buffer * momentum).add_(fresh) if self.nesterov else buffer

    def orthogonalised(self, matrix: Tensor) -> Tensor:
        """`orthogonalise` of a matrix [rows, columns], in this dtype."""
        return orthogonalise(matrix.to(self.dtype), steps=self.steps)

    def flops(self, shape: Sequence[int]) -> int:
        """FLOPs of the orthogonalisation of a matrix of `shape`: X X^T, its square, and the product with X, in every step."""
        short, long = sorted(shape)
        return self.steps * (4 * short * short * long + 2 * short**3)


def orthogonalise(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Approximates U V^T for the matrix U S V^T [rows, columns], in its dtype: singular values become about 0.7 to 1.2.

    Newton-Schulz iteration with a quintic, with the operations of torch.optim.Muon in their order. A matrix of zeros stays zero.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = kernels.symmetric_product(x)
        x = torch.addmm(x, kernels.symmetric_product(gram, square=c, linear=b), x, beta=a)
    return x.T if is_tall else x


def scale_of(shape: Sequence[int], *, rule: str) -> float:
    """The factor on the learning rate of a matrix [rows, columns].

    original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 sqrt(max(rows, columns)), whose updates are as large as AdamW's
    (Liu et al. 2025, https://arxiv.org/abs/2502.16982). Raises AssertionError for another rule.
    """
    rows, columns = shape
    match rule:
        case "original":
            return math.sqrt(max(1.0, rows / columns))
        case "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
    raise AssertionError(rule)  # the policy has checked it


def step_along(master: Tensor, *, direction: Tensor, scale: float, control: Tensor, out: Tensor | None) -> None:
    """Applies the last line of the module docstring. master: float32 [n]; direction, out: as `grad` and `out` of `ztk.kernels.sgd`."""
    row = control.clone()
    row[Control.grad_coefficient] = scale
    kernels.sgd(master, grad=direction, control=row, out=out)  # plain SGD's weight decay is the decoupled one
