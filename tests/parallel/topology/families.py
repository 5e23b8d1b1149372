"""Small models of the families of decoders that transformers has, without dropout. Imports of transformers are in functions."""

import torch
from torch import nn

VOCABULARY, LENGTH = 64, 12
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NO_DROPOUT = (
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "attention_dropout",
    "hidden_dropout",
    "resid_dropout",
    "embed_dropout",
)
_NO_DROPOUT += ("dropout", "embedding_dropout", "residual_dropout", "classifier_dropout")

FAMILIES = {
    "GPT2": _GPT,
    "GPTBigCode": _GPT,  # one key head for all query heads
    "GPTJ": {**_GPT, "rotary_dim": 4},
    "CodeGen": {**_GPT, "rotary_dim": 4},
    "GPTNeo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "GPTNeoX": _SIZES,
    "OPT": {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    "StableLm": _GROUPED,
    "Phi": _GROUPED,
    "Phi3": _GROUPED,
    "Gemma": {**_GROUPED, "head_dim": 8},
    "Gemma2": {**_GROUPED, "head_dim": 8},
    "Llama": _GROUPED,
    "Mistral": _GROUPED,
    "Qwen2": _GROUPED,
    "Qwen3": {**_GROUPED, "head_dim": 8},
    "Olmo2": _GROUPED,
    "Cohere": _GROUPED,
    "Starcoder2": _GROUPED,
    "Qwen2Moe": {**_GROUPED, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {**_GROUPED, **_EXPERTS, "num_experts": 4, "head_dim": 8},
    "Mixtral": {**_GROUPED, "num_local_experts": 4},
}


def make(family: str, **changes) -> nn.Module:
    """The same values in every process; none of them stands for nothing, as ones in norms and zeros in biases do."""
    import transformers

    kind = getattr(transformers, f"{family}Config")
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = kind(**FAMILIES[family] | tokens | changes)
    for name in _NO_DROPOUT:
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    made = model(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return made
