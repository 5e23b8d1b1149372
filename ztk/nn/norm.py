"""Normalisation by the root mean square. Results have the dtype of x."""

import torch
from torch import Tensor, nn

from ztk.kernels import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    x, residual and results: [..., dim]. `norm(x)` is the normalised x; `norm(x, residual)` is (the normalised sum, the sum x + residual), in
    one pass.
    """

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, eps=self.eps, residual=residual)
