"""Llamas of transformers with random weights, for scripts that compare engines."""

from typing import Any

SIZES = {  # name -> width, layers, heads, inner width, vocabulary
    "4m": (256, 4, 4, 704, 2000),
    "30m": (512, 8, 8, 1408, 8000),
    "100m": (768, 12, 12, 2048, 16000),
}


def random_llama(size: str) -> Any:
    """The model in fp32, equal in every call. Imports transformers here, because a peer's environment may lack it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    dim, layers, heads, inner, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config).eval()
