"""The decoder once more, in the plainest torch: every step spelled out, heads looped over, no code of `ztk.nn`."""

import math

import torch
from torch import Tensor

from ztk.nn import DecoderConfig


def plain_logits(config: DecoderConfig, *, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [B, T, V] for tokens [B, T], from the decoder's named weights, in their dtype."""
    x = weights["embedding.weight"][tokens]
    for i in range(config.layers):
        layer = {name.removeprefix(f"blocks.{i}."): w for name, w in weights.items() if name.startswith(f"blocks.{i}.")}
        x = x + _attention(config, layer=layer, x=_norm(config, x, layer["attention_norm.weight"]))
        x = x + _mlp(layer=layer, x=_norm(config, x, layer["mlp_norm.weight"]))
    head = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
    return _norm(config, x, weights["norm.weight"]) @ head.T


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) over the targets that are not -100."""
    counted = targets != -100
    log_p = logits.log_softmax(-1)[counted]
    return -log_p[torch.arange(len(log_p)), targets[counted]].mean()


def _norm(config: DecoderConfig, x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def _mlp(*, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    gate, up = x @ layer["mlp.gate.weight"].T, x @ layer["mlp.up.weight"].T
    return (gate / (1 + (-gate).exp()) * up) @ layer["mlp.down.weight"].T


def _attention(config: DecoderConfig, *, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    T, D = x.shape[1], config.dim // config.heads
    q, k, v = (x @ layer[f"attention.{name}.weight"].T for name in ("query", "key", "value"))
    heads = []
    for h in range(config.heads):
        shared = h // (config.heads // config.kv_heads)
        query = _turn(config, q[..., h * D : (h + 1) * D])
        key = _turn(config, k[..., shared * D : (shared + 1) * D])
        scores = query @ key.transpose(-1, -2) / math.sqrt(D)
        past = torch.arange(T)[:, None] >= torch.arange(T)[None, :]
        weights = scores.masked_fill(~past, -math.inf).softmax(-1)
        heads.append(weights @ v[..., shared * D : (shared + 1) * D])
    return torch.cat(heads, dim=-1) @ layer["attention.out.weight"].T


def _turn(config: DecoderConfig, x: Tensor) -> Tensor:
    """Rotary positions as complex numbers: element i is the real part and i + D / 2 the imaginary part of a number that
    is turned by position / theta^(2 i / D)."""
    T, D = x.shape[-2:]
    angle = torch.arange(T)[:, None] / config.rope_theta ** (torch.arange(0, D, 2)[None, :] / D)
    real, imaginary = x[..., : D // 2], x[..., D // 2 :]
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)
