"""Makes tests/checkpoint/data/deepspeed: checkpoints of a real DeepSpeed, and the losses of its further training.

Needs an environment of its own with DeepSpeed 0.19.8; from the repository's root, per stage:

    for r in 0 1; do RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=29519 DS_ACCELERATOR=cpu \
        python -m tests.checkpoint.make_deepspeed STAGE tests/checkpoint/data/deepspeed & done; wait
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch

from tests.checkpoint.deepspeed_model import ALL_STEPS, BATCH, SAVED_STEPS, TinyModel, tokens_of

RANKS = 2


def main() -> None:
    stage, folder = int(sys.argv[1]), Path(sys.argv[2]) / f"stage{sys.argv[1]}"
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = TinyModel()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // RANKS,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    rank, losses = torch.distributed.get_rank(), []
    for step in range(ALL_STEPS):
        if step == SAVED_STEPS:
            engine.save_checkpoint(str(folder))
        loss = engine(tokens_of(step).chunk(RANKS)[rank])
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(loss := loss.detach().clone())
        losses.append(float(loss) / RANKS)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
