"""Train a plain PyTorch model with sharded parameters (ZeRO stage 3) and optimizer states in main memory.

    torchrun --standalone --nproc-per-node=2 examples/library.py

Without GPUs the two ranks run on the CPU.
"""

import torch
from torch import Tensor, nn

import ztk
from ztk.core.runtime.memory import Tier

STEPS, BATCH, FEATURES, WIDTH = 40, 32, 16, 64


class Block(nn.Module):
    """A residual layer: an element of a Sequential, so ZeRO gathers its parameters together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    process = ztk.Process.start()  # this rank: its number, its device, its connections
    torch.manual_seed(0)
    target = nn.Linear(FEATURES, 1)  # the function to learn, the same on every rank
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 1))
    engine = ztk.parallelize(
        model,
        process=process,
        optimizer=ztk.OptimizerPolicy(name="adamw", lr=3e-3, clip_grad_norm=1.0),
        lr_table=ztk.lr_table(ztk.SchedulePolicy(name="cosine", warmup_steps=4), steps=STEPS),
        precision=ztk.PrecisionPolicy(dtype=torch.bfloat16),  # with fp32 master weights
        zero=ztk.ZeroPolicy(stage=3),
        offload=ztk.OffloadPolicy(optimizer="cpu"),
    )
    batches = torch.Generator().manual_seed(1 + process.rank)  # every rank has batches of its own
    for step in range(1, STEPS + 1):
        x = torch.randn(BATCH, FEATURES, generator=batches)
        with torch.no_grad():
            y = torch.tanh(target(x))
        output = engine(x.to(process.device, torch.bfloat16))
        loss = nn.functional.mse_loss(output.float(), y.to(process.device))
        engine.backward(loss)
        engine.step()
        if process.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if process.rank == 0:
        print(f"optimizer states in main memory: {engine.memory.current(Tier.host)} bytes on this rank")
    engine.close()
    process.stop()


if __name__ == "__main__":
    main()
