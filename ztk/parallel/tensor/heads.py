"""Where attention may be cut: between groups of heads, whose sizes come from the model's configuration."""

from dataclasses import dataclass
from typing import Any

from torch import nn

_ONE_KEY = ("k_proj", "v_proj", "key", "value", "k", "v")
_HEAD_BY_HEAD = ("GPTNeoXAttention",)  # classes whose single projection stores (query, key, value) of each head in turn
_QUERY_HEADS = ("num_heads", "num_attention_heads", "num_attn_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_WIDTHS = ("all_head_size", "inner_dim", "embed_dim", "hidden_size", "d_model")
_FUSED = ("query_key_value",)  # GPT-NeoX, BLOOM: [heads, (query, key, value)] in one weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """query, key: numbers of heads in the full model; there are as many value heads as key heads. size: elements per head."""

    query: int
    key: int
    size: int

    @staticmethod
    def of(config: Any) -> "Heads | None":
        """The heads of a Hugging Face configuration, or None if it has none."""
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        query = getattr(config, "num_attention_heads", None)
        if query is None:
            return None
        size = getattr(config, "head_dim", None) or config.hidden_size // query
        return Heads(query=query, key=getattr(config, "num_key_value_heads", None) or query, size=size)

    def grain(self, name: str) -> int:
        """Output elements of the projection `name` that must stay on one rank: a head, or the query heads of one key head."""
        leaf = name.rpartition(".")[2]
        if leaf in _FUSED:
            return 3 * self.size
        return self.size if leaf in _ONE_KEY else self.size * (self.query // self.key)


def is_attention(name: str) -> bool:
    """Whether the module name, or pattern of names, belongs to an attention layer."""
    return "attn" in name.lower() or "attention" in name.lower()


def head_by_head(module: nn.Module) -> bool:
    """Whether an attention layer's single projection stores query, key and value of each head together."""
    return type(module).__name__ in _HEAD_BY_HEAD


def count_own_heads(module: nn.Module, *, heads: Heads, widths: list[int]) -> None:
    """Updates the numbers of heads and widths stored in an attention layer to its own part after the cut.

    widths: outputs of its projections on this rank.
    """
    own = {
        **dict.fromkeys(_WIDTHS, (heads.query * heads.size, max(widths))),
        **dict.fromkeys(_QUERY_HEADS, (heads.query, max(widths) // heads.size)),
        **dict.fromkeys(_KEY_HEADS, (heads.key, min(widths) // heads.size)),
    }
    for attribute, (full, here) in own.items():
        if module.__dict__.get(attribute) == full:
            setattr(module, attribute, here)
