"""One rank of `scripts/compare_deepspeed.py`: a script for DeepSpeed without any reference to ztk.

It runs under DeepSpeed and under ztk. Each line on standard input is a ZeRO stage to train. The output is a line of JSON with the loss of every
step (this rank's, summed over micro-batches) and the seconds of the steps after the warm-up.
"""

import json
import os
import sys
import time

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, MICRO_BATCH, ACCUMULATION = 256, 64, 4, 2
WARMUP_STEPS = 2  # not timed


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class Language(nn.Module):
    """tokens int64 [B, T] -> mean cross entropy of the next token."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.triu(torch.full((tokens.shape[1], tokens.shape[1]), float("-inf")), diagonal=1)
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def config(stage: int) -> dict:
    """All defaults are DeepSpeed's, for example gradient_clipping 1.0, which favours neither side."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
    }


def train(stage: int, *, steps: int, width: int, layers: int) -> dict:
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=(model := Language(width=width, layers=layers)),
                                      model_parameters=model.parameters(), config=config(stage))  # fmt: skip
    batches = torch.Generator().manual_seed(100 + engine.global_rank)
    losses, begin, cpu = [], 0.0, 0.0
    for step in range(steps):
        if step == WARMUP_STEPS:
            begin, cpu = time.perf_counter(), time.process_time()
        total = 0.0
        for _ in range(ACCUMULATION):
            tokens = torch.randint(VOCABULARY // 4, (MICRO_BATCH, LENGTH), generator=batches)
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            total += loss.item() / ACCUMULATION
        losses.append(total)
    measured = max(1, steps - WARMUP_STEPS)
    found = {
        "losses": losses,
        "wall_seconds": (time.perf_counter() - begin) / measured,
        "cpu_seconds": (time.process_time() - cpu) / measured,
    }
    engine.destroy()
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of the libraries out of the results
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    print(json.dumps({"version": deepspeed.__version__, "home": deepspeed.__file__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(train(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
