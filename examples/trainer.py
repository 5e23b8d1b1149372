"""The Hugging Face Trainer at ZeRO stage 3. The model is small and made on the spot, so nothing is downloaded.

    python -m ztk.deepspeed --num_gpus 2 examples/trainer.py

Needs `pip install "ztk[hf]"`. `"auto"` takes the value that the Trainer's arguments have.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}
VOCABULARY, LENGTH = 32, 24


def counting(rows: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from a random number; the model learns to continue them."""
    starts = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(0))
    tokens = (starts[:, None] + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="outputs/trainer", help="folder for the trained model")
    options = parser.parse_args()
    args = TrainingArguments(
        options.output,
        deepspeed=DS_CONFIG,  # before the model: transformers then builds it sharded
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=counting(512))
    trainer.train()
    trainer.save_model(options.output)  # full weights in safetensors: from_pretrained reads them without ztk
    trainer.accelerator.free_memory()


if __name__ == "__main__":
    main()
