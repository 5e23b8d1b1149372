"""Names of the parameters of each family."""

from dataclasses import dataclass


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
