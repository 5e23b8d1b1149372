"""One layer of the decoder. Results have the dtype of x."""

from torch import Tensor, nn

from ztk.nn.config import DecoderConfig
from ztk.nn.documents import Documents
from ztk.nn.mlp import SwiGLU
from ztk.nn.moe import SparseMLP
from ztk.nn.norm import RMSNorm
from ztk.nn.self_attention import Attention


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is [B, T, C]."""

    def __init__(self, config: DecoderConfig, *, number: int = 0) -> None:
        """number: position of the block in the decoder, from 0."""
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SparseMLP(config) if config.has_experts(number) else SwiGLU(config)

    def forward(self, x: Tensor, *, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x), cos=cos, sin=sin, documents=documents)
        normed, x = self.mlp_norm(attended.to(x.dtype), residual=x)  # they differ under autocast
        return x + self.mlp(normed)
