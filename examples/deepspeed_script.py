"""A DeepSpeed script as it is, run by ztk: gradient accumulation, a schedule, a checkpoint, all from the configuration.

    python -m ztk.deepspeed --num_gpus 2 examples/deepspeed_script.py

Without GPUs `--num_gpus 2` is two ranks on the CPU. Nothing in this file names ztk: under DeepSpeed it runs by `deepspeed` instead.
"""

import argparse

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}
STEPS, CLASSES, FEATURES = 20, 4, 16


class Blobs(torch.utils.data.Dataset):
    """Points around one centre per class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(CLASSES, (2048,), generator=generator)
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        self.points = centres[self.labels] + 0.5 * torch.randn(2048, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", help="folder to save to")
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG, training_data=Blobs()
    )
    rank = torch.distributed.get_rank()
    batches = iter(loader)
    for step in range(1, STEPS + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            points, labels = (tensor.to(engine.device) for tensor in next(batches))
            loss = nn.functional.cross_entropy(engine(points), labels)
            engine.backward(loss)
            engine.step()  # updates after the last micro-batch of the step
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}, learning rate {engine.get_lr()[0]:.4f}")
    if options.checkpoints:
        engine.save_checkpoint(options.checkpoints, client_state={"epoch": 1})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
