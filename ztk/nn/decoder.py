"""The language model: embedding, blocks, norm, head. Logits have the dtype of the parameters; the loss is fp32."""

import torch
from torch import Tensor, nn

from ztk.nn.config import DecoderConfig
from ztk.nn.documents import Documents
from ztk.nn.linear import Linear
from ztk.nn.loss import LanguageLoss
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


class Decoder(nn.Module):
    """A decoder-only transformer of the shape `config`.

    Build large ones under `torch.device("meta")`, give each parameter memory and `ztk.nn.initial_values`, then call
    `materialise_buffers`. `ztk.nn.initialise` does all of that for a model that fits on one device.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        weight = torch.empty(config.vocab_size, config.dim)
        # On the meta device neither numbers are drawn nor tables computed: torch would import its compiler for it, seconds on every rank.
        self.embedding = nn.Embedding(config.vocab_size, config.dim, _weight=weight if weight.is_meta else None)
        self.blocks = nn.ModuleList(Block(config, number=number) for number in range(config.layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.loss: nn.Module = LanguageLoss()
        if not weight.is_meta:
            # torch's default of 1.0 is too large for a tied head
            nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        cos, sin = _rotary_tables(config)
        self.register_buffer("rope_cos", cos, persistent=False)  # [max_seq_len, D / 2]
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Documents | None = None) -> Tensor:
        """tokens int64 [B, T] -> logits [B, T, V], or, given targets [B, T], their mean cross entropy (float32 scalar).

        Targets of -100 do not count. documents: tokens attend to their own document only, and positions restart with it. Raises ValueError
        if T, or the longest document, exceeds `config.max_seq_len`.
        """
        x = self.embed(tokens, documents=documents)
        for block in self.blocks:
            x = self.through(block, x=x, documents=documents)
        return self.finish(x, targets=targets)

    # The three parts of the forward, which a pipeline runs on different ranks.

    def embed(self, tokens: Tensor, *, documents: Documents | None = None) -> Tensor:
        """tokens int64 [B, T] -> the residual stream [B, T, C]. Raises ValueError as `forward` does."""
        if documents is None or documents.longest > self.config.max_seq_len:
            self.check_length(tokens)
        return self.embedding(tokens)

    def check_length(self, tokens: Tensor) -> None:
        """tokens: full sequences [B, T]. Raises ValueError for T above `config.max_seq_len`."""
        T = tokens.shape[1]
        if self.config.max_seq_len < T:
            raise ValueError(
                f"{T} tokens in a sequence, model.max_seq_len={self.config.max_seq_len}: shorten data.seq_len or raise "
                "model.max_seq_len"
            )

    def through(self, block: Block, *, x: Tensor, documents: Documents | None = None) -> Tensor:
        """One block: x [B, T, C] -> [B, T, C]."""
        given = {} if documents is None else {"documents": documents}  # a wrapped block may not accept documents
        return block(x, cos=self.rope_cos, sin=self.rope_sin, **given)

    def finish(self, x: Tensor, *, targets: Tensor | None = None) -> Tensor:
        """x [B, T, C] -> logits [B, T, V], or with targets the loss, as `forward`."""
        x = self.norm(x)
        if isinstance(self.loss, LanguageLoss):
            return self.loss.of_head(self.head, x=x, targets=targets)
        return self.loss(self.head(x), targets)

    def flops_per_token(self, seq_len: int) -> int:
        """Floating point operations of forward and backward per token, at sequences of `seq_len`."""
        return self.config.flops_per_token(seq_len)

    def materialise_buffers(self, device: torch.device | str) -> None:
        """Computes the rotary tables on `device`, for a model built on the meta device."""
        with torch.device("cpu"):  # so that they have the same bits on every device
            cos, sin = _rotary_tables(self.config)
        self.rope_cos, self.rope_sin = cos.to(device), sin.to(device)


def _rotary_tables(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, float32 [max_seq_len, D / 2] each; no values on the meta device."""
    if torch.get_default_device().type == "meta":
        shape = (config.max_seq_len, config.head_dim // 2)
        return torch.empty(shape), torch.empty(shape)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float64), config.rope_theta**-exponents)
    return angles.cos().float(), angles.sin().float()
