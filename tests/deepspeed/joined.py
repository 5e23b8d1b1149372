"""Rank functions of `test_joining`: ranks that a script started, and models that it divided itself."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.core.runtime import Process


def spawned(rank: int, folder: str) -> None:
    """The target of torch.multiprocessing.spawn: the environment does not contain the rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ZTK_STORE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    deepspeed.init_distributed(rank=rank, world_size=2, init_method=f"file://{folder}/store")
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=3), dist_init_required=False)
    process = engine.engine.process
    losses = scripts.loop(process, engine, steps=3)
    place = (process.rank, process.world_size, process.local_rank, process.local_world_size)
    torch.save({"losses": losses, "place": place}, f"{folder}/{rank}.pt")
    engine.destroy()
    dist.barrier()


class _Copied(torch.autograd.Function):
    """The same input on all ranks of a model; gradients add up."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Summed(torch.autograd.Function):
    """Partial outputs add up."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Cut(nn.Module):
    """The documents' model with its layers over two ranks, in Megatron's way."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        full = scripts.build()
        half = slice(16 * rank, 16 * (rank + 1))
        self.fc1, self.fc2 = nn.Linear(28, 16), nn.Linear(16, 10)
        self.fc1.weight.data, self.fc1.bias.data = full.fc1.weight.data[half], full.fc1.bias.data[half]
        self.fc2.weight.data, self.fc2.bias.data = full.fc2.weight.data[:, half], full.fc2.bias.data
        for parameter, dim in ((self.fc1.weight, 0), (self.fc1.bias, 0), (self.fc2.weight, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(_Copied.apply(x)))
        return _Summed.apply(F.linear(hidden, self.fc2.weight)) + self.fc2.bias


class Mpu:
    """Two ranks share one model, or each has its own."""

    def __init__(self, *, model_ranks: int, data_group: object = None) -> None:
        self._model_ranks, self._data_group = model_ranks, data_group

    def get_model_parallel_world_size(self) -> int:
        return self._model_ranks

    def get_data_parallel_group(self) -> object:
        return self._data_group


def with_mpu(process: Process, *, model_ranks: int, stage: int, folder: str) -> dict:
    """Trains a model that the script has cut, or one per rank, and saves it."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    mpu = Mpu(model_ranks=model_ranks, data_group=groups[process.rank] if model_ranks == 2 else None)
    model = Cut(process.rank) if model_ranks == 2 else scripts.build()
    engine, *_ = deepspeed.initialize(model=model, mpu=mpu, config=scripts.config(stage=stage))
    losses = []
    for step in range(5):
        x, y = scripts.data(step)
        if model_ranks == 1:
            x, y = x.chunk(2)[process.rank], y.chunk(2)[process.rank]
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(scripts.mean(process, loss.item()))
    engine.save_checkpoint(folder)
    found = {
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "ranks": (engine.dp_world_size, engine.mp_world_size),
    }
    engine.destroy()
    errors = []
    for wrong in (object(), Mpu(model_ranks=2, data_group=dist.group.WORLD)):
        try:
            deepspeed.initialize(model=scripts.build(), mpu=wrong, config=scripts.config(stage=1))
        except ValueError as error:
            errors.append(str(error))
    return found | {"errors": errors}
