"""Configurations and tensor names of the supported model families.

llama.cpp rotates neighbouring elements of a Llama's heads and transformers rotates halves, so the rows of query and key are permuted in
the file. Gemma's norms are stored with the 1 that transformers adds.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# GGUF's architecture -> transformers' model_type and class.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
}
ARCHITECTURES = {model_type: name for name, (model_type, _) in FAMILIES.items()} | {"mistral": "llama"}
_SIZES = {  # key below the architecture -> key of config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ATTENTION = frozenset(("attn_q", "attn_k", "attn_v", "attn_output"))
_BIASES = {"qwen2": _ATTENTION - {"attn_output"}}  # tensors of a block with biases; for other families all of attention
# Biases of a block that llama.cpp's graph adds.
_GRAPH_BIASES: dict[str, frozenset[str]] = {
    "llama": _ATTENTION,
    "qwen2": _BIASES["qwen2"],
    "qwen3": frozenset(),
    "gemma": frozenset(),
}
_TIED = {"gemma"}  # families of llama.cpp that have no head of their own
# Keys of config.json that change the computation, and that no key of these families has -> values without effect.
_NEUTRAL = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), (None,)),
    **dict.fromkeys(("partial_rotary_factor", "logit_scale", "residual_multiplier", "embedding_multiplier"), (None, 1)),
    "attention_multiplier": (None,),
}
_ACTIVATIONS = {"llama": "silu", "qwen2": "silu", "qwen3": "silu", "gemma": "gelu_pytorch_tanh"}
_THETA = 10000.0  # if neither file nor configuration has a value


def config_of(metadata: Mapping[str, Any], *, shapes: Mapping[str, tuple[int, ...]], file: str) -> dict[str, Any]:
    """Returns `config.json`, without the weights' dtype, from a file's metadata and the shapes of its tensors by name.

    Raises ValueError for an unsupported family or rotation.
    """
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ValueError(
            f"{file}: general.architecture={name} is not read: {', '.join(FAMILIES)} are; name the model's folder with safetensors files"
        )
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in shapes or scaling != "none":
        raise ValueError(
            f"{file}: its positions are scaled (rope.scaling.type={scaling} or rope_freqs.weight), which is not read; name the model's "
            "folder with safetensors files"
        )
    lacking = [key for key in _SIZES if f"{name}.{key}" not in metadata and key != "attention.head_count_kv"]
    if lacking:
        raise ValueError(f"{file}: lacks {name}.{lacking[0]} in its metadata: convert the model again")
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{file}: lacks the tensor token_embd.weight: convert the model again")
    found = {theirs: metadata.get(f"{name}.{key}") for key, theirs in _SIZES.items()}
    heads = found["num_attention_heads"]
    model_type, architecture = FAMILIES[name]
    head_dim = metadata.get(f"{name}.attention.key_length", found["hidden_size"] // heads)
    if (rotated := metadata.get(f"{name}.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(
            f"{file}: {name}.rope.dimension_count={rotated} rotates a part of {head_dim} elements, which is not read; name the model's "
            "folder with safetensors files"
        )
    _check_parts(shapes, name=name, file=file)
    theta = float(metadata.get(f"{name}.rope.freq_base", _THETA))
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **found,
        "num_key_value_heads": found["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_act": _ACTIVATIONS[name],
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _check_parts(names: Iterable[str], *, name: str, file: str) -> None:
    """Raises ValueError for tensors that a transformers model of the family `name` would ignore."""
    norms = ("attn_q_norm", "attn_k_norm")
    places = {tuple(one.split(".")[2:]) if one.startswith("blk.") else (one,): one for one in names}
    biases = {place: one for place, one in places.items() if place[-1].endswith("bias")}
    expected = {(part, "bias") for part in _BIASES.get(name, _ATTENTION)}
    odd = [one for (part, *_), one in places.items() if part in norms and name != "qwen3"]
    if odd or (biases and biases.keys() != expected):
        shown = [*odd, *(one for place, one in biases.items() if place not in expected), *biases.values()][0]
        raise ValueError(
            f"{file}: {shown} has no place in a {FAMILIES[name][1]}, or not without others; name the model's folder with safetensors files"
        )


def check_places(names: Iterable[str], *, config: Mapping[str, Any]) -> None:
    """Raises ValueError for biases and heads that llama.cpp's graph of the family does not use, and for a part of the biases that it needs.

    names: the names of the file's tensors.
    """
    name, names = ARCHITECTURES[config["model_type"]], set(names)
    if name in _TIED and "output.weight" in names:
        raise ValueError(
            f"--format gguf: llama.cpp's {name} computes its head with token_embd.weight and has no place for output.weight, so it does not "
            "load the file; leave --format out"
        )
    biases = {one for one in names if one.endswith(".bias")}
    parts = _GRAPH_BIASES[name] if any(one.startswith("blk.") for one in biases) else ()
    expected = {f"blk.{layer}.{part}.bias" for layer in range(config["num_hidden_layers"]) for part in parts}
    if odd := sorted(biases ^ expected):
        raise ValueError(
            f"--format gguf: llama.cpp's {name} has no place for {odd[0]}, or not without others; leave --format out"
            if odd[0] in biases
            else f"--format gguf: llama.cpp's {name} needs {odd[0]} with the other biases; leave --format out"
        )


def metadata_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns (architecture, metadata below it) for a `config.json`.

    Raises ValueError for a model that llama.cpp would compute differently.
    """
    name = ARCHITECTURES.get(config.get("model_type", ""))
    if name is None:
        raise ValueError(
            f"--format gguf: model_type={config.get('model_type')} has no mapping to GGUF: {', '.join(ARCHITECTURES)} have; leave --format out"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"--format gguf: rope_type={kind} is not written, only default positions are; leave --format out"
        )
    for key, usual in _NEUTRAL.items():
        if (value := config.get(key, rope.get(key))) not in usual:
            raise ValueError(f"--format gguf: {key}={value} is not written for {name}; leave --format out")
    activation = config.get("hidden_act", _ACTIVATIONS[name])
    if activation != _ACTIVATIONS[name] and (name, activation) != (
        "gemma",
        "gelu",
    ):  # old Gemma configurations have "gelu" and mean its tanh form
        raise ValueError(
            f"--format gguf: hidden_act={activation} is not written for {name}, only {_ACTIVATIONS[name]} is; leave --format out"
        )
    if config.get("sliding_window") and config.get("use_sliding_window", name == "llama"):
        raise ValueError(
            f"--format gguf: sliding_window={config['sliding_window']} is not written for {name}; leave --format out"
        )
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found = {key: config[theirs] for key, theirs in _SIZES.items() if config.get(theirs) is not None}
    found.setdefault("attention.head_count_kv", heads)
    theta = float(rope.get("rope_theta", config.get("rope_theta", _THETA)))
    more = {
        "rope.freq_base": theta,
        "rope.dimension_count": head_dim,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config["vocab_size"],
    }
    return name, found | more


def to_transformers(name: str) -> str | None:
    """Returns a tensor's name in a transformers folder, or None if it is not saved there."""
    return _renamed(name, top=_TOP, block=_BLOCK, prefixes=("blk", "model.layers"))


def to_gguf(name: str) -> str | None:
    """Returns a tensor's name in a GGUF file, or None if it is not saved there."""
    top, block = ({theirs: own for own, theirs in names.items()} for names in (_TOP, _BLOCK))
    return _renamed(name, top=top, block=block, prefixes=("model.layers", "blk"))


def _renamed(name: str, *, top: dict[str, str], block: dict[str, str], prefixes: tuple[str, str]) -> str | None:
    stem, _, part = name.rpartition(".")
    if part not in ("weight", "bias"):
        return None
    if stem in top:
        return f"{top[stem]}.{part}"
    match = re.fullmatch(rf"{re.escape(prefixes[0])}\.(\d+)\.(.+)", stem)
    if match is None or match[2] not in block:
        return None
    return f"{prefixes[1]}.{match[1]}.{block[match[2]]}.{part}"


def as_transformers(value: Tensor, *, name: str, config: Mapping[str, Any]) -> Tensor:
    """Converts a tensor of the file, of any shape, to the values of transformers. name: the tensor's in the file."""
    if (heads := _turned_heads(name, config=config)) is not None:
        return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    if config["model_type"] == "gemma" and "norm" in name:
        return value - 1
    return value


def as_gguf(value: Tensor, *, name: str, config: Mapping[str, Any]) -> Tensor:
    """Converts a tensor of any shape to the values of llama.cpp. name: the tensor's in the file."""
    if (heads := _turned_heads(name, config=config)) is not None:
        return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
    if config["model_type"] == "gemma" and "norm" in name:
        return value.to(torch.float32) + 1
    return value


def _turned_heads(name: str, *, config: Mapping[str, Any]) -> int | None:
    """Returns the number of heads of a tensor whose rows are permuted in GGUF, or None."""
    if ARCHITECTURES[config["model_type"]] != "llama":
        return None
    if re.fullmatch(r"blk\.\d+\.attn_q\.(weight|bias)", name):
        return config["num_attention_heads"]
    if re.fullmatch(r"blk\.\d+\.attn_k\.(weight|bias)", name):
        return config.get("num_key_value_heads") or config["num_attention_heads"]
    return None
