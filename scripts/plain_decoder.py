"""ztk's decoder written with torch's modules, as in a script without ztk: same parameters, names and function."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.nn import Decoder, DecoderConfig


def plain_decoder(decoder: Decoder) -> "PlainDecoder":
    """Copies a dense decoder into torch's modules."""
    twin = PlainDecoder(decoder.config)
    twin.load_state_dict(decoder.state_dict())
    return twin


class PlainDecoder(nn.Module):
    """tokens, targets int64 [B, T] -> their mean cross entropy. B batch, T time, H heads, D head size, C width."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        frequencies = config.rope_theta ** -(torch.arange(0, self.head_dim, 2).double() / self.head_dim)
        angles = torch.outer(torch.arange(config.max_seq_len).double(), frequencies)
        self.cos, self.sin = (torch.cat([table, table], -1).float() for table in (angles.cos(), angles.sin()))  # [T, D]

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # [B, H, T, D]
        out = F.scaled_dot_product_attention(
            self.rotate(query), self.rotate(key), value, is_causal=True, enable_gqa=True
        )
        return self.out(out.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[2]].to(x.dtype), self.sin[: x.shape[2]].to(x.dtype)
        return x * cos + torch.cat([-second, first], -1) * sin


class SwiGLU(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
