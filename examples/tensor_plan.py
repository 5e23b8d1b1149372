"""A model of your own, its layers split over two ranks (tensor parallelism) by a plan of patterns, its states sharded by ZeRO.

    torchrun --standalone --nproc-per-node=2 examples/tensor_plan.py  # 2 ranks hold one copy of the model
    python examples/tensor_plan.py                                       # the same training on one rank

Both print the same first loss: the layout does not change the result.
"""

import argparse

import torch
from torch import Tensor, nn

import ztk
from ztk.parallel.tensor import TensorPolicy

# Module names as model.named_modules() has them; * stands for a part of a name. "column": each rank computes some of the outputs. "row":
# each rank uses some of the inputs, and results are summed. Between the two nothing is sent. Modules without a pattern are replicated.
PLAN = {"embedding": "vocabulary", "layers.*.up": "column", "layers.*.down": "row", "head": "column_gathered"}
VOCABULARY, WIDTH, HIDDEN, LENGTH, STEPS = 64, 32, 96, 16, 30


class Layer(nn.Module):
    """Mixes a token with the one before it, then transforms it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.down(torch.relu(self.up(self.norm(x + before))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    process = ztk.Process.start()
    process = process.arrange(ztk.Topology(tensor=process.world_size))  # all ranks work on the same batch
    torch.manual_seed(0)
    engine = ztk.parallelize(
        Model(),
        process=process,
        optimizer=ztk.OptimizerPolicy(name="adamw", lr=1e-2),
        precision=ztk.PrecisionPolicy(dtype=torch.float32),
        zero=ztk.ZeroPolicy(stage=1),
        tensor=TensorPolicy(plan=PLAN),
    )
    if process.rank == 0:
        parts = {name: list(parameter.shape) for name, parameter in engine.module.named_parameters()}
        print(f"this rank's part of layers.0.up.weight [{HIDDEN}, {WIDTH}]: {parts['layers.0.up.weight']}")
    batches = torch.Generator().manual_seed(1)  # the same on every rank: they share a batch
    for step in range(1, STEPS + 1):
        start = torch.randint(VOCABULARY, (8, 1), generator=batches)
        text = ((start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY).to(process.device)
        loss = engine(text[:, :-1], text[:, 1:])
        engine.backward(loss)
        engine.step()
        if process.rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.4f}")
    engine.close()
    process.stop()


if __name__ == "__main__":
    main()
