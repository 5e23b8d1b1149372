"""A small policy of transformers in a folder, and configurations of tasks that start from it."""

import json
from pathlib import Path

import torch

from tests.hf import small
from tests.hf.test_dpo import PAIRS, plain
from tests.rl.rollout.runs import REWARD
from ztk.config import Config, Machine, compose

CPU = Machine(gpus=0, cores=2)
PROMPTS = ("ab", "cab", "dd", "e")
ADAPTERS = ("lora=adapter", "lora.rank=4")
COMMON = (
    *("rollout.task=null", "warm_start.steps=0", "rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=6"),
    *("data.seq_len=12", "train.steps=4", "train.global_batch_size=8", "train.micro_batch_size=4"),
    *("scheduler=constant", "scheduler.warmup_steps=0", "optimizer=adamw", "optimizer.clip_grad_norm=0"),
    *("optimizer.lr=3e-3", "optimizer.betas=[0.9,0.95]", "optimizer.eps=1e-8", "optimizer.weight_decay=0.1"),
    *("logger=disabled", "launch.device=cpu", "zero.bucket_size=5000"),
)


def save_policy(path: Path) -> Path:
    """A Llama that ends answers after three letters or so, its tokenizer, prompts, pairs, a reward."""
    small.save_model(path)
    model, draw = plain(path), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(25):
        rows = torch.randint(3, 29, (16, 12), generator=draw)
        rows = torch.where(torch.rand(rows.shape, generator=draw) < 0.3, small.EOS, rows)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path, max_shard_size="150KB")
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    pairs = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS]
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path / "mine.py").write_text(REWARD)
    return path


def config_of(task: str, *overrides: str, folder: Path, to: Path, ranks: int = 2) -> Config:
    to.mkdir(parents=True, exist_ok=True)
    data = (f"data.path={folder}/prompts.jsonl", f"data.tokenizer={folder}", f"reward.function={folder}/mine.py:score")
    model = (f"task={task}", "model=hf", f"model.path={folder}", f"launch.ranks={ranks}")
    return compose(*model, *data, *COMMON, *overrides, output_dir=str(to), machine=CPU)
