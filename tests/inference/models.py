"""Tiny random models of every family that the inference engine computes."""

from pathlib import Path

import tokenizers
import torch
import transformers
from torch import nn

from ztk.nn import Decoder, DecoderConfig

VOCABULARY = 96
PAIRS = [token for other in range(VOCABULARY) for token in (7, other)] + [7]  # drafts follow 7 and any token
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # far apart logits: no two tokens are as likely as each other but for rounding
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# name -> (configuration class, options)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", _GROUPED | {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _GROUPED | {"head_dim": 16}),
    "gemma": ("GemmaConfig", _GROUPED | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", _GROUPED | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        _GROUPED | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": _MIXED_LAYERS},
    ),
    "phi": ("PhiConfig", _COMMON),
    "phi3": ("Phi3Config", _GROUPED),
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}),
    "opt": ("OPTConfig", _COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.3}),
    "gpt_neox": ("GPTNeoXConfig", _COMMON),
    "olmo2": ("Olmo2Config", _GROUPED),
    "mixtral": ("MixtralConfig", _GROUPED | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeConfig", _GROUPED | _EXPERTS | {"head_dim": 16}),
}  # fmt: skip


def build(family: str, **options: object) -> nn.Module:
    """A tiny model of transformers with fixed random weights, norms and biases too."""
    name, own = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**own | options)).eval()
    if family == "gemma2":
        model.set_attn_implementation("eager")  # torch's fused attention leaves the soft cap out
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def build_decoder(**options: object) -> Decoder:
    torch.manual_seed(5)
    return Decoder(
        DecoderConfig(
            **{
                "vocab_size": VOCABULARY,
                "dim": 32,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "hidden_dim": 48,
                "max_seq_len": 256,
            }
            | options
        )
    ).eval()


def greedy(model: nn.Module, *, prompt: list[int], count: int) -> list[int]:
    """transformers' own loop with its own cache, one prompt at a time."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def save_llama(folder: Path) -> nn.Module:
    """A Llama of transformers in `folder`, with a tokenizer whose tokens are letters."""
    model = build("llama", tie_word_embeddings=True)
    model.save_pretrained(folder)
    save_letters(folder)
    return model


def save_letters(folder: Path) -> None:
    """A tokenizer whose tokens are letters."""
    letters = {chr(33 + number): number for number in range(VOCABULARY - 3)} | {"<s>": 93, "</s>": 94, "<unk>": 95}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
