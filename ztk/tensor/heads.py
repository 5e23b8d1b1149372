"""How attention may be cut: between groups of heads, which a model's configuration tells the sizes of."""

from dataclasses import dataclass

_ONE_KEY = ("k_proj", "v_proj", "key", "value", "k", "v")
_FUSED = ("query_key_value",)  # GPT-NeoX, BLOOM: [heads, (query, key, value)] in one weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """query, key: heads of the whole model; key heads are value heads too. size: elements of a head."""

    query: int
    key: int
    size: int

    @staticmethod
    def of(config: object) -> "Heads | None":
        """Of a Hugging Face configuration; None if it names no heads."""
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        query = getattr(config, "num_attention_heads", None)
        if query is None:
            return None
        size = getattr(config, "head_dim", None) or config.hidden_size // query
        return Heads(query=query, key=getattr(config, "num_key_value_heads", None) or query, size=size)

    def grain(self, name: str) -> int:
        """Elements of a projection, called `name`, that stay together: queries with their keys."""
        leaf = name.rpartition(".")[2]
        if leaf in _FUSED:
            return 3 * self.size
        return self.size if leaf in _ONE_KEY else self.size * (self.query // self.key)


def is_attention(name: str) -> bool:
    """By the name of a module or a pattern of names."""
    return "attn" in name.lower() or "attention" in name.lower()
