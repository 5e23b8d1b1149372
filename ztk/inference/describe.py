"""Description of a model's computation as data, one for all families, read from a module and its configuration; names of their parameters."""

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
    for all keys. tables: per layer, which of the rotary tables. is_tied: the head is the embedding. experts: number in a layer's MLP; 0 if
    dense. dense_layers: layers without experts in a model with experts.
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


def _layer_normed(model: nn.Module, config: Any) -> Subject:
    """Phi, GPT-NeoX, GPT-2, OPT and BLOOM. transformers maps the sizes' names of GPT-2 and BLOOM to the usual ones."""
    kind, has_tables = config.model_type, config.model_type in ("phi", "gpt_neox")
    is_refused, feature = _REFUSED.get(kind, (lambda _: False, ""))
    if is_refused(config):
        raise ValueError(f"model_type={kind} with {feature} is not supported by the inference engine")
    tables, which = _rotary(model, config) if has_tables else ([], ())
    # BLOOM names no activation and no length: ALiBi has no limit of its own, and BLOOM was trained at 2048.
    description = Description(
        family=kind,
        **_sizes(config),
        head_dim=config.hidden_size // config.num_attention_heads,
        activation=_first(config, names=("hidden_act", "activation_function"), usual="gelu_pytorch_tanh"),
        norm="layer",
        norm_eps=_first(config, names=("layer_norm_eps", "layer_norm_epsilon"), usual=1e-5),
        parallel=kind == "phi" or getattr(config, "use_parallel_residual", False),
        gated=False,
        rotary_dims=2 * tables[0][0].shape[-1] if tables else 0,
        tables=which,
        position_offset=2 if kind == "opt" else 0,
        is_alibi=kind == "bloom",
    )
    return Subject(description=description, tables=tables)


def _first(config: Any, *, names: tuple[str, ...], usual: Any) -> Any:
    """The first of these attributes that the configuration has."""
    return next((getattr(config, name) for name in names if hasattr(config, name)), usual)


# Of a family, whether it is refused, and the reason.
_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "phi": (lambda config: getattr(config, "qk_layernorm", False), "qk_layernorm=true"),
    "gpt2": (
        lambda config: config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights,
        "scaled attention per layer",
    ),
    "opt": (
        lambda config: not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size,
        "norms after or a projected embedding (opt-350m)",
    ),
    "bloom": (
        lambda config: config.apply_residual_connection_post_layernorm,
        "apply_residual_connection_post_layernorm",
    ),
}
_LLAMA_LIKE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "mixtral", "qwen2_moe", "qwen3_moe"),
)
_LAYER_NORMED = ("phi", "gpt_neox", "gpt2", "opt", "bloom")
FAMILIES: Mapping[str, Callable[[nn.Module, Any], Subject]] = dict.fromkeys(_LLAMA_LIKE, _llama_like) | dict.fromkeys(
    _LAYER_NORMED, _layer_normed
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Where a family has its parts. top: embedding, norm, head. block: `{}` is the layer's number. An empty name: the family has none."""

    embedding: str
    norm: str
    head: str
    block: str
    query: str
    key: str
    value: str
    out: str
    gate: str
    up: str
    down: str
    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""
    positions: str = ""
    embedding_norm: str = ""
    fused: str = ""  # query, key and value in one: "rows" one after the other, "heads" per head, "columns" as Conv1D
    shared: str = "shared_expert"  # of a sparse MLP, and its linear layers
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_NATIVE = Names(
    embedding="embedding",
    norm="norm",
    head="head",
    block="blocks.{}.",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    out="attention.out",
    gate="mlp.gate",
    up="mlp.up",
    down="mlp.down",
    before_attention="attention_norm",
    before_mlp="mlp_norm",
    shared="shared",
    parts=("gate", "up", "down"),
)
_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "block": "model.layers.{}.",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_BEFORE = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
_AFTER = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_BOTH = {**_AFTER, "before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}
_PLAIN_MLP = {"gate": "", "up": "mlp.fc1", "down": "mlp.fc2"}
_FUSED_HEADS = {
    "key": "",
    "value": "",
    "gate": "",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    "before_attention": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    "fused": "heads",
}
NAMES = {
    "native": _NATIVE,
    **{
        kind: Names(**_LLAMA, **_BEFORE)
        for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen2_moe", "qwen3_moe")
    },
    "gemma2": Names(**_LLAMA, **_BOTH),
    "gemma3_text": Names(**_LLAMA, **_BOTH),
    "olmo2": Names(**_LLAMA, **_AFTER),
    "phi3": Names(
        **_LLAMA | {"query": "self_attn.qkv_proj", "key": "", "value": "", "gate": "mlp.gate_up_proj", "up": ""},
        **_BEFORE,
        fused="rows",
    ),
    "phi": Names(
        **_LLAMA | _PLAIN_MLP | {"out": "self_attn.dense", "norm": "model.final_layernorm"},
        before_attention="input_layernorm",
    ),
    "gpt2": Names(
        embedding="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        head="lm_head",
        block="transformer.h.{}.",
        query="attn.c_attn",
        key="",
        value="",
        out="attn.c_proj",
        gate="",
        up="mlp.c_fc",
        down="mlp.c_proj",
        before_attention="ln_1",
        before_mlp="ln_2",
        fused="columns",
    ),
    "opt": Names(
        **_LLAMA
        | {
            "embedding": "model.decoder.embed_tokens",
            "norm": "model.decoder.final_layer_norm",
            "block": "model.decoder.layers.{}.",
            "out": "self_attn.out_proj",
            "gate": "",
            "up": "fc1",
            "down": "fc2",
        },
        positions="model.decoder.embed_positions",
        before_attention="self_attn_layer_norm",
        before_mlp="final_layer_norm",
    ),
    "bloom": Names(
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        norm="transformer.ln_f",
        head="lm_head",
        block="transformer.h.{}.",
        query="self_attention.query_key_value",
        out="self_attention.dense",
        **_FUSED_HEADS,
    ),
    "gpt_neox": Names(
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="lm_head",
        block="gpt_neox.layers.{}.",
        query="attention.query_key_value",
        out="attention.dense",
        **_FUSED_HEADS,
    ),
}
