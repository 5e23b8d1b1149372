"""The shape of a decoder, with sizes that follow from it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    Raises ValueError for sizes that do not fit together.
    """

    vocab_size: int
    dim: int  # width of the residual stream
    layers: int
    heads: int  # query heads, each of size dim / heads
    kv_heads: (
        int  # key and value heads; each serves heads / kv_heads query heads (Ainslie et al. 2023, arXiv 2305.13245)
    )
    hidden_dim: int  # width inside the SwiGLU
    max_seq_len: int
    rope_theta: float = 10000.0  # base of the rotary wavelengths (Su et al. 2021, arXiv 2104.09864)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # the head's weight is the embedding's (Press and Wolf 2016, arXiv 1608.05859)
    experts: int = 0  # of a block that has them; 0: the model is dense
    experts_per_token: int = 2
    experts_every: int = 1  # every n-th block has experts, the last of each n
    expert_hidden_dim: int = 0  # width inside an expert; 0: hidden_dim
    shared_hidden_dim: int = 0  # width inside the expert that every token uses; 0: there is none
    balance_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be at least 1")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"model.dim={self.dim} with model.heads={self.heads}: every head needs an even size (rotary positions "
                f"turn pairs); make dim a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads}: must divide model.heads={self.heads}, so that each key and value "
                "head serves equally many query heads"
            )
        self._check_experts()
        if self.experts and not self.expert_hidden_dim:
            object.__setattr__(self, "expert_hidden_dim", self.hidden_dim)

    def _check_experts(self) -> None:
        for name in (
            "experts",
            "expert_hidden_dim",
            "shared_hidden_dim",
            "balance_loss_weight",
            "router_z_loss_weight",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be at least 0")
        if not self.experts:
            return
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token}: must be from 1 to model.experts={self.experts}"
            )
        if not 1 <= self.experts_every <= self.layers:
            raise ValueError(
                f"model.experts_every={self.experts_every}: must be from 1 to model.layers={self.layers}, else no block has experts"
            )

    def has_experts(self, block: int) -> bool:
        """Whether block number `block`, from 0, has experts."""
        return self.experts > 0 and (block + 1) % self.experts_every == 0

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.dim // self.heads

    def parameter_count(self) -> int:
        """Number of parameters, tied weights counted once."""
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self._blocks_count(experts=self.experts) + self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Floating point operations of forward and backward per token, at sequences of `seq_len`.

        Six per weight that is multiplied (the embedding is looked up, not multiplied; of the experts only those that a token
        uses), and 12 * dim * seq_len per layer for attention scores and values, without subtracting the causal half: the PaLM
        convention (arXiv 2204.02311, appendix B).
        """
        norms = 2 * self.dim * self.layers
        multiplied = self._blocks_count(experts=self.experts_per_token) - norms + self.vocab_size * self.dim
        return 6 * multiplied + 12 * self.layers * self.dim * seq_len

    def _blocks_count(self, *, experts: int) -> int:
        """Parameters of all blocks, counting `experts` experts in each block that has them."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        dense = 3 * self.dim * self.hidden_dim
        sparse = self.dim * (self.experts + 3 * self.shared_hidden_dim + 3 * experts * self.expert_hidden_dim)
        feed_forward = [sparse if self.has_experts(block) else dense for block in range(self.layers)]
        return self.layers * (attention + 2 * self.dim) + sum(feed_forward)
