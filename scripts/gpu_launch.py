"""Training steps whose host may be slower than the GPU, to compare the launches of `ZTK_LAUNCH`. An item of `scripts/gpu_item.py`."""

import os
import time
from itertools import cycle

import torch

from scripts.gpu_training import LARGE, TINY, batches, build, synchronize, train_step
from ztk.core.runtime import Process
from ztk.nn import DecoderConfig

STEPS = 20  # that are timed together
LENGTHS = {"rope_theta": 10_000.0, "max_seq_len": 2048}
# conf/model/30m.yaml, 100m.yaml, 1b.yaml, and 100m with experts: small batches, so that launches are not hidden.
MODELS = {
    "30m": DecoderConfig(
        vocab_size=256, dim=512, layers=10, heads=8, kv_heads=4, hidden_dim=1408, tie_embeddings=True, **LENGTHS
    ),
    "100m": DecoderConfig(
        vocab_size=32_000, dim=768, layers=12, heads=12, kv_heads=4, hidden_dim=2048, tie_embeddings=True, **LENGTHS
    ),
    "experts": DecoderConfig(
        vocab_size=32_000,
        dim=768,
        layers=12,
        heads=12,
        kv_heads=4,
        hidden_dim=2048,
        experts=8,
        experts_per_token=2,
        experts_every=2,
        expert_hidden_dim=1024,
        **LENGTHS,
    ),
    "1b": LARGE,
}


def launches(process: Process) -> dict:
    """Seconds of a step with one sequence per model, its last loss, and the launches that were chosen. The losses of both choices are
    equal."""
    on_gpu = process.device.type == "cuda"
    found: dict = {"launch": os.environ.get("ZTK_LAUNCH", "private")}
    for name, config in MODELS.items() if on_gpu else {"tiny": TINY}.items():
        engine = build(config, process=process, precision="bf16")
        length = 1024 if on_gpu else 64
        stream = batches(config, micro_batch=1, seq_len=length, device=process.device)
        ready = cycle([next(stream) for _ in range(4)])
        for _ in range(4):
            train_step(engine, *next(ready))
        synchronize(process.device)
        start, steps, loss = time.perf_counter(), STEPS if on_gpu else 2, torch.zeros(())
        for _ in range(steps):
            loss = train_step(engine, *next(ready))
        synchronize(process.device)
        found |= {name: (time.perf_counter() - start) / steps, f"loss_{name}": float(loss)}
        engine.close()
    return found
