"""The feed-forward part of a block. Results have the dtype of x."""

from torch import Tensor, nn

from ztk.kernels import swiglu
from ztk.nn.config import DecoderConfig
from ztk.nn.linear import Linear


class SwiGLU(nn.Module):
    """x [..., C] -> down(silu(gate(x)) * up(x)) [..., C] (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig, *, hidden_dim: int | None = None) -> None:
        """hidden_dim: the inner width. Defaults to the one in `config`."""
        super().__init__()
        inner = config.hidden_dim if hidden_dim is None else hidden_dim
        self.gate = Linear(config.dim, inner)
        self.up = Linear(config.dim, inner)
        self.down = Linear(inner, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))
