"""A script with the arguments of document 002, section 11.2, and DeepSpeed's calls: supervised fine-tuning on a JSON file of texts."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--data_path", type=Path)
parser.add_argument("--data_split", default="2,4,4")
parser.add_argument("--model_name_or_path")
parser.add_argument("--per_device_train_batch_size", type=int)
parser.add_argument("--max_seq_len", type=int)
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--weight_decay", type=float)
parser.add_argument("--num_train_epochs", type=int)
parser.add_argument("--gradient_accumulation_steps", type=int)
parser.add_argument("--lr_scheduler_type")
parser.add_argument("--num_warmup_steps", type=int)
parser.add_argument("--seed", type=int)
parser.add_argument("--zero_stage", type=int)
parser.add_argument("--output_dir", type=Path)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(args.seed)

rows = [json.loads(line) for line in args.data_path.read_text().splitlines()]
shares = [int(part) for part in args.data_split.split(",")]
rows = rows[: len(rows) * shares[0] // sum(shares)]  # the first share is this step's
tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
tokenizer.pad_token = tokenizer.eos_token
texts = [f"Instruction: {row['instruction']} Response: {row['output']}" for row in rows]
batch = tokenizer(texts, padding=True, truncation=True, max_length=args.max_seq_len, return_tensors="pt")
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
samples = [
    {"input_ids": ids, "attention_mask": mask, "labels": label}
    for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], labels, strict=True)
]
loader = DataLoader(samples, batch_size=args.per_device_train_batch_size, sampler=DistributedSampler(samples))

steps = args.num_train_epochs * len(loader) // args.gradient_accumulation_steps
engine, _, _, _ = deepspeed.initialize(
    model=AutoModelForCausalLM.from_pretrained(args.model_name_or_path),
    lr_scheduler=lambda optimizer: get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=steps,
    ),
    config={
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "zero_optimization": {"stage": args.zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": args.learning_rate, "weight_decay": args.weight_decay}},
    },
)


def mean_loss() -> float:
    """Over all samples."""
    with torch.no_grad():
        return float(engine(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}).loss)


before = mean_loss()
for _ in range(args.num_train_epochs):
    for micro_batch in loader:
        engine.backward(engine(**micro_batch).loss)
        engine.step()
after = mean_loss()
