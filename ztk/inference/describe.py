"""Description of a model's computation as data, one for all families, read from a module and its configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.nn import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A decoder. Shapes of weights: see `ztk.inference.weights`.

    norm: rms or layer; norm_offset is added to its weight (Gemma: 1). norms: before (attention(norm(x))), after (norm(attention(x)),
    OLMo 2), both (Gemma 2 and 3). parallel: attention and MLP read the same x (GPT-NeoX, Phi). qk_norm: heads (over each head), all (over
    all of them), or none. rotary_dims: size of the rotated part of a head; 0 if positions are learned or ALiBi. windows: per layer, None
    for all keys. tables: per layer, which of the rotary tables. is_tied: the head is the embedding. experts: of a layer's MLP; 0 if dense.
    dense_layers: layers without experts in a model with experts.
    """

    family: str
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_len: int
    activation: str
    is_tied: bool
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    norms: str = "before"
    parallel: bool = False
    gated: bool = True
    qk_norm: str = "none"
    rotary_dims: int = 0
    position_offset: int = 0
    is_alibi: bool = False
    windows: tuple[int | None, ...] = ()
    tables: tuple[int, ...] = ()
    scale: float = 0.0
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", self.scale or self.head_dim**-0.5)
        object.__setattr__(self, "windows", self.windows or (None,) * self.layers)
        object.__setattr__(self, "tables", self.tables or (0,) * self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model's description and its rotary tables, fp32 [positions, rotary_dims / 2] each (cosine, sine)."""

    description: Description
    tables: list[tuple[Tensor, Tensor]]


def describe(model: nn.Module) -> Subject:
    """Reads the native decoder, or a causal language model of transformers.

    Raises:
        ValueError: a model that the engine does not support, with its type and the unsupported feature.
    """
    if isinstance(model, Decoder):
        return _native(model)
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    read = FAMILIES.get(kind)
    if config is None or read is None:
        raise ValueError(
            f"model_type={kind}: the inference engine computes the native decoder and {', '.join(sorted(FAMILIES))}; generate with the "
            "model's own generate()"
        )
    return read(model, config)


def _native(model: Decoder) -> Subject:
    config = model.config
    description = Description(
        family="native",
        vocab_size=config.vocab_size,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_len=config.max_seq_len,
        activation="silu",
        is_tied=config.tie_embeddings,
        norm_eps=config.norm_eps,
        rotary_dims=config.head_dim,
        experts=config.experts,
        experts_per_token=config.experts_per_token if config.experts else 0,
        dense_layers=tuple(layer for layer in range(config.layers) if config.experts and not config.has_experts(layer)),
    )
    return Subject(description=description, tables=[(model.rope_cos.float().cpu(), model.rope_sin.float().cpu())])


def _llama_like(model: nn.Module, config: Any) -> Subject:
    """Llama, Mistral, Qwen 2 and 3, their models with experts, OLMo 2, Phi-3, Gemma."""
    kind = config.model_type
    is_gemma = kind.startswith("gemma")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    tables, which = _rotary(model, config)
    windows, scalar = _windows(config), getattr(config, "query_pre_attn_scalar", None)
    description = Description(
        family=kind,
        **_sizes(config),
        head_dim=head_dim,
        activation=getattr(config, "hidden_activation", None) or config.hidden_act,
        norm_eps=config.rms_norm_eps,
        norm_offset=1.0 if is_gemma else 0.0,
        norms={"olmo2": "after", "gemma2": "both", "gemma3_text": "both"}.get(kind, "before"),
        qk_norm={"olmo2": "all", "qwen3": "heads", "qwen3_moe": "heads", "gemma3_text": "heads"}.get(kind, "none"),
        rotary_dims=2 * tables[0][0].shape[-1],
        windows=windows,
        tables=which,
        scale=scalar**-0.5 if scalar else 0.0,
        softcap=getattr(config, "attn_logit_softcapping", None),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        embedding_scale=config.hidden_size**0.5 if is_gemma else 1.0,
        experts=experts,
        experts_per_token=getattr(config, "num_experts_per_tok", 0) if experts else 0,
        normalise_experts=getattr(config, "norm_topk_prob", True),
        dense_layers=_dense_layers(config) if experts else (),
    )
    return Subject(description=description, tables=tables)


def _dense_layers(config: Any) -> tuple[int, ...]:
    """Layers without experts in a model that has some (Qwen)."""
    dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return tuple(layer for layer in range(config.num_hidden_layers) if layer in dense or (layer + 1) % step)


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "max_len": getattr(config, "max_position_embeddings", None) or 2048,
        "is_tied": config.tie_word_embeddings,
    }


def _windows(config: Any) -> tuple[int | None, ...]:
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if kinds is None:
        return (window if getattr(config, "use_sliding_window", True) else None,) * config.num_hidden_layers
    odd = set(kinds) - {"full_attention", "sliding_attention"}
    if odd:
        raise ValueError(
            f"layer_types has {', '.join(sorted(odd))}: the inference engine computes full and sliding attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rotary(model: Any, config: Any) -> tuple[list[tuple[Tensor, Tensor]], tuple[int, ...]]:
    """The model's own tables, computed by its rotary module, so that every scaling of positions matches the model."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    rotary = body.rotary_emb
    positions = torch.arange(config.max_position_embeddings).unsqueeze(0)
    probe = torch.zeros(1, 1, dtype=torch.float32)
    types = getattr(rotary, "rope_type", "default")
    odd = set(types.values() if isinstance(types, dict) else [types]) & {"dynamic", "longrope"}
    if odd:
        raise ValueError(
            f"rope_type={odd.pop()}: angles that depend on the text's length are not supported by the inference engine"
        )
    if hasattr(rotary, "layer_types"):  # a table per kind of layer (Gemma 3)
        kinds = config.layer_types
        names = list(dict.fromkeys(kinds))
        tables = [_halves(rotary(probe, positions, layer_type=name)) for name in names]
        return tables, tuple(names.index(kind) for kind in kinds)
    return [_halves(rotary(probe, positions))], (0,) * config.num_hidden_layers


def _halves(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """transformers gives both halves of a head the same angles."""
    cos, sin = (table[0].float() for table in found)
    half = cos.shape[-1] // 2
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()


def _phi(model: nn.Module, config: Any) -> Subject:
    if getattr(config, "qk_layernorm", False):
        raise ValueError("model_type=phi with qk_layernorm=true is not supported by the inference engine")
    tables, which = _rotary(model, config)
    description = Description(
        family="phi",
        **_sizes(config),
        head_dim=config.hidden_size // config.num_attention_heads,
        activation=config.hidden_act,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        parallel=True,
        gated=False,
        rotary_dims=2 * tables[0][0].shape[-1],
        tables=which,
    )
    return Subject(description=description, tables=tables)


def _gpt_neox(model: nn.Module, config: Any) -> Subject:
    tables, which = _rotary(model, config)
    description = Description(
        family="gpt_neox",
        **_sizes(config),
        head_dim=config.hidden_size // config.num_attention_heads,
        activation=config.hidden_act,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        parallel=config.use_parallel_residual,
        gated=False,
        rotary_dims=2 * tables[0][0].shape[-1],
        tables=which,
    )
    return Subject(description=description, tables=tables)


def _gpt2(model: nn.Module, config: Any) -> Subject:
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        raise ValueError("model_type=gpt2 with scaled attention per layer is not supported by the inference engine")
    description = Description(
        family="gpt2",
        vocab_size=config.vocab_size,
        dim=config.n_embd,
        layers=config.n_layer,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        max_len=config.n_positions,
        is_tied=config.tie_word_embeddings,
        activation=config.activation_function,
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        gated=False,
    )
    return Subject(description=description, tables=[])


def _opt(model: nn.Module, config: Any) -> Subject:
    if not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size:
        raise ValueError(
            "model_type=opt with norms after or a projected embedding (opt-350m) is not supported by the inference engine"
        )
    description = Description(
        family="opt",
        **_sizes(config),
        head_dim=config.hidden_size // config.num_attention_heads,
        activation=config.activation_function,
        norm="layer",
        gated=False,
        position_offset=2,
    )
    return Subject(description=description, tables=[])


def _bloom(model: nn.Module, config: Any) -> Subject:
    if config.apply_residual_connection_post_layernorm:
        raise ValueError(
            "model_type=bloom with apply_residual_connection_post_layernorm is not supported by the inference engine"
        )
    description = Description(
        family="bloom",
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        layers=config.n_layer,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.hidden_size // config.n_head,
        is_tied=config.tie_word_embeddings,
        max_len=2048,  # ALiBi has no limit of its own; BLOOM was trained at this length
        activation="gelu_pytorch_tanh",
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        gated=False,
        is_alibi=True,
    )
    return Subject(description=description, tables=[])


_LLAMA_LIKE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "mixtral", "qwen2_moe", "qwen3_moe"),
)
FAMILIES: Mapping[str, Callable[[nn.Module, Any], Subject]] = dict.fromkeys(_LLAMA_LIKE, _llama_like) | {
    "phi": _phi,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
}
