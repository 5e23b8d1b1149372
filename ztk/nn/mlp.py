"""The feed-forward part of a block."""

from torch import Tensor, nn

from ztk.kernels import swiglu
from ztk.nn.config import DecoderConfig
from ztk.nn.linear import Linear


class SwiGLU(nn.Module):
    """x [..., C] -> down(silu(gate(x)) * up(x)) [..., C] (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.hidden_dim)
        self.up = Linear(config.dim, config.hidden_dim)
        self.down = Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))
