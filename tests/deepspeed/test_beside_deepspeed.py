"""The same script under DeepSpeed 0.19.8: its losses, learning rates and gradient norms, recorded on two gloo ranks in fp32.

The script: `scripts.SimpleModel`, torch.optim.AdamW(lr=1e-2, weight_decay=0.01), two micro-batches per step, WarmupLR to 1e-2 in 3
steps, gradient_clipping at its default. DeepSpeed's losses were the same at stages 0 to 3.
"""

import pytest
import torch
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.core.precision.recorded import MARKS, SCALES
from tests.deepspeed import scripts
from tests.deepspeed.test_train import STAGES
from ztk.core.runtime import Process

# After each step: loss, get_lr()[0], get_global_grad_norm(), global_steps, micro_steps
RECORDED = [
    (2.29139185, 0.0000000000, 1.149235, 1, 2),
    (2.37791944, 0.0063092975, 1.137765, 2, 4),
    (2.42431498, 0.0100000000, 1.220529, 3, 6),
    (2.31093025, 0.0100000000, 0.971727, 4, 8),
    (2.24180126, 0.0100000000, 1.232123, 5, 10),
    (2.16595984, 0.0100000000, 1.160950, 6, 12),
    (2.11346483, 0.0100000000, 1.055936, 7, 14),
    (2.35117769, 0.0100000000, 1.212555, 8, 16),
]


def script(process: Process, *, stage: int) -> list[tuple]:
    """The script that ran under DeepSpeed, with two other imports."""
    model = scripts.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    zero = {"stage": stage, "reduce_bucket_size": 600}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
    ds_config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": zero,
        "scheduler": schedule,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    rows = []
    for step in range(len(RECORDED)):
        x, y = (part.chunk(process.world_size)[process.rank] for part in scripts.data(step))
        total = 0.0
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            total += engine.backward(F.cross_entropy(engine(xs), ys)).item()
            engine.step()
        row = (engine.get_lr()[0], engine.get_global_grad_norm(), engine.global_steps, engine.micro_steps)
        rows.append((scripts.mean(process, total), *row))
    engine.destroy()
    return rows


@pytest.mark.parametrize("stage", STAGES)
def test_every_step_is_as_under_deepspeed(ranks, stage):
    for found, recorded in zip(ranks(2).run(script, stage=stage)[0], RECORDED, strict=True):
        assert found == pytest.approx(recorded, abs=1e-5)


def scales(process: Process, *, stage: int) -> list[float]:
    """The loss scale after every step of `tests/core/precision/recorded.py`."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 1}
    engine, optimizer, *_ = deepspeed.initialize(
        model=torch.nn.Linear(4, 4), config=scripts.config(stage=stage, fp16=fp16)
    )
    found = []
    for mark in MARKS:
        loss = engine(torch.ones(1, 4)).float().sum() * 1e-6
        engine.backward(loss * (float("inf") if mark == "x" else 1.0))
        engine.step()
        found.append(optimizer.cur_scale)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_scale_moves_as_under_deepspeed(ranks, stage):
    """At stage 0 DeepSpeed has no hysteresis."""
    assert ranks(2).run(scales, stage=stage)[0] == SCALES[2, 2 if stage else 1, False]
