"""Converts the native decoder to the names and the configuration of Hugging Face's Llama.

Both models compute the same function: RMSNorm before attention and MLP, rotary positions on halves, grouped queries, SwiGLU, no biases.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ztk.checkpoint.errors import CheckpointError
from ztk.nn import DecoderConfig

_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Regular expression -> replacement, in the format of `import_checkpoint`.
TO_LLAMA = {rf"^{own}\.": f"{theirs}." for own, theirs in _TOP.items()} | {
    rf"^blocks\.(\d+)\.{re.escape(own)}\.": rf"model.layers.\1.{theirs}." for own, theirs in _BLOCK.items()
}
FROM_LLAMA = {rf"^{re.escape(theirs)}\.": f"{own}." for own, theirs in _TOP.items()} | {
    rf"^model\.layers\.(\d+)\.{re.escape(theirs)}\.": rf"blocks.\1.{own}." for own, theirs in _BLOCK.items()
}
_SIZES = {  # DecoderConfig field -> LlamaConfig field
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_DEFAULT_THETA = 10000.0  # Llama's default


def is_llama(config: Mapping[str, Any]) -> bool:
    """Returns whether a decoder of this configuration (a DecoderConfig as a dictionary) is a Llama. With experts it is not."""
    return not config.get("experts")


def llama_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config.json` for a DecoderConfig as a dictionary, without the weights' dtype."""
    theta = config["rope_theta"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: config[own] for own, theirs in _SIZES.items()},
        "head_dim": config["dim"] // config["heads"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": theta,  # for transformers before 5, and for 5 and later
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "bos_token_id": None,
        "eos_token_id": None,
    }


def decoder_config(llama: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the DecoderConfig of a `config.json`, as a dictionary.

    Raises:
        CheckpointError: the decoder does not compute this model.
    """
    rope = llama.get("rope_parameters") or llama.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    head_dim = llama["hidden_size"] // llama["num_attention_heads"]
    faults = [
        *([f"model_type={llama.get('model_type')}"] if llama.get("model_type") != "llama" else []),
        *([f"rope_type={rope_type}"] if rope_type != "default" else []),
        *([f"hidden_act={llama['hidden_act']}"] if llama.get("hidden_act", "silu") != "silu" else []),
        *[f"{key}=true" for key in ("attention_bias", "mlp_bias") if llama.get(key)],
        *([f"head_dim={llama['head_dim']}"] if llama.get("head_dim") not in (None, head_dim) else []),
    ]
    if faults:
        raise CheckpointError(
            f"the native decoder is a Llama without {', '.join(faults)}: train this model itself, with its own names"
        )
    optional = {"kv_heads": llama["num_attention_heads"], "norm_eps": 1e-6, "tie_embeddings": False}  # Llama's defaults
    sizes = {own: llama.get(theirs, optional.get(own)) for own, theirs in _SIZES.items()}
    theta = rope.get("rope_theta", llama.get("rope_theta", _DEFAULT_THETA))
    return asdict(DecoderConfig(**sizes, rope_theta=theta))
