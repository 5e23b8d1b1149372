"""Small models and data of Hugging Face's classes, without a hub. Imports of theirs are in functions: on the ranks `install` comes first."""

import os
from pathlib import Path

import torch

VOCABULARY, WIDTH, EOS = 40, 64, 1
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}


def as_script(process, *, script, arguments):
    """On a rank: `script` in a process as a launcher starts it; accelerate's state of an earlier script is reset."""
    os.environ.update(LOCAL_RANK=str(process.rank), LOCAL_WORLD_SIZE=str(process.world_size), HF_HUB_OFFLINE="1")
    import ztk.deepspeed

    ztk.deepspeed.install()
    try:
        return script(**arguments)
    finally:
        forget()


def forget() -> None:
    """Resets accelerate and transformers to their state after import for the next script."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def ds_config(stage: int, *, optimizer: dict | None = ADAMW, **zero) -> dict:
    """A usual configuration for the Trainer: every value that it can derive is "auto"."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    sizes = (
        "reduce_bucket_size",
        *(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold") * (stage == 3)),
    )
    section = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, **dict.fromkeys(sizes, "auto")}
    if stage == 3:
        section |= {"stage3_gather_16bit_weights_on_model_save": True, "sub_group_size": 1e9}
    config = {**dict.fromkeys(names, "auto"), "zero_optimization": section | zero}
    config |= {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    return config | ({"optimizer": optimizer} if optimizer else {})


def llama_config(**changes):
    from transformers import LlamaConfig

    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": EOS, "bos_token_id": 2}
    return LlamaConfig(**sizes, **heads, **tokens, **changes)


def tokenizer():
    """One token per letter or digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<bos>", *map(chr, range(ord("a"), ord("z") + 1)), *map(str, range(10)), "?"]
    letters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=letters, padding_side="left", **special)


def save_model(folder: Path, **changes) -> Path:
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(llama_config(**changes)).save_pretrained(folder, max_shard_size="150KB")
    tokenizer().save_pretrained(folder)
    return folder


def rows(count: int, *, seed: int = 0) -> list[dict]:
    """Sequences that step by 3: something to learn."""
    made = []
    for start in torch.randint(0, 30, (count,), generator=torch.Generator().manual_seed(seed)).tolist():
        tokens = [(start + 3 * i) % 37 + 2 for i in range(12)]
        made.append({"input_ids": tokens, "labels": tokens, "attention_mask": [1] * len(tokens)})
    return made
