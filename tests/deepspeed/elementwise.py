"""Scripts over a model with given gradients: its loss is the sum of parameter times gradient.

Gradients are multiples of 1/8 below 8, so their sums and averages over two ranks are exact in fp32 and bf16. The result of a torch optimizer's
step on the full parameters is therefore known to the last bit.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ztk.deepspeed as deepspeed
from ztk.core.runtime import Process

STEPS = 4
# (stage, tier of the optimizer, tier of the parameters)
PLACES = (
    (0, "none", "none"),
    (1, "none", "none"),
    (1, "cpu", "none"),
    (2, "nvme", "none"),
    (3, "none", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)


class Dot(nn.Module):
    """Two parameters of awkward sizes."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return sum((parameter * gradients[name]).sum() for name, parameter in self.named_parameters())


class Dots(nn.Module):
    """Blocks of different sizes, some of which an `only` may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dot(rows, columns) for rows, columns in ((33, 29), (5, 3), (64, 50)))

    def forward(self, gradients: Mapping[str, Tensor], only: Sequence[int] = (0, 1, 2)) -> Tensor:
        parts = {
            number: {name.split(".")[-1]: value for name, value in gradients.items() if f".{number}." in name}
            for number in only
        }
        return sum(self.blocks[number](part) for number, part in parts.items())


def build() -> Dots:
    torch.manual_seed(0)
    return Dots()


def gradients(step: int, *, rank: int) -> dict[str, Tensor]:
    """By name; rank -1: the average over two ranks."""
    if rank < 0:
        pairs = zip(gradients(step, rank=0).items(), gradients(step, rank=1).values(), strict=True)
        return {name: (first + second) / 2 for (name, first), second in pairs}
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        name: torch.randint(-63, 64, parameter.shape, generator=generator) / 8
        for name, parameter in build().named_parameters()
    }


def used(step: int, *, rank: int) -> tuple[int, ...]:
    """Blocks that a rank's forward uses where some are left out: block 2 only rank 1 and every other step, block 1 not at first."""
    return (0, *((1,) if step else ()), *((2,) if step % 2 and rank != 0 else ()))


def plain(make: Callable, *, steps: int = STEPS, after: Callable | None = None,
          drops: bool = False) -> dict[str, Tensor]:  # fmt: skip
    """The weights of torch's own loop over full parameters. drops: some blocks are not used, see `used`."""
    model = build()
    optimizer = make(model) if make in MAKERS.values() else make(model.parameters())
    schedule = after(optimizer) if after else None
    for step in range(steps):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            number, either = int(name.split(".")[1]), {*used(step, rank=0), *used(step, rank=1)}
            if not drops or number in either:
                parts = [
                    gradients(step, rank=rank)[name] * (not drops or number in used(step, rank=rank)) for rank in (0, 1)
                ]
                parameter.grad = (parts[0] + parts[1]) / 2
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def config(stage: int, *, optimizer: str = "none", parameters: str = "none", **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2000}
    path = {"nvme_path": tempfile.mkdtemp(dir=os.environ.get("ZTK_TEST_NVME"))}
    for key, tier in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if tier != "none":
            zero[key] = {"device": tier, **(path if tier == "nvme" else {})}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero, **more}


def train(engine, *, rank: int, start: int = 0, steps: int = STEPS, drops: bool = False) -> None:
    """drops: see `used`; at stage 3, where ranks must use the same modules, with the gradient zero where another rank drops one."""
    for step in range(start, start + steps):
        only, given = used(step, rank=rank) if drops else (0, 1, 2), gradients(step, rank=rank)
        if drops and engine.zero_optimization_stage() == 3:
            given = {name: value * (int(name.split(".")[1]) in only) for name, value in given.items()}
            only = used(step, rank=1)
        engine.backward(engine(given, only=only))
        engine.step()


def weights(engine) -> dict[str, Tensor]:
    """fp32 masters."""
    return {name: deepspeed.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def begin(make: Callable | None, *, ds_config: dict, scheduler: Callable | None = None, values: dict | None = None):
    """values: the first weights; by default `build`'s."""
    model = build()
    if values is not None:
        model.load_state_dict(values)
    optimizer = make(model) if make in MAKERS.values() else make
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config, lr_scheduler=scheduler)[0]


def dropping(
    process: Process, *, make: Callable | None, optimizer: dict | None = None, **more: Any
) -> dict[str, Tensor]:
    """Weights of a run at stage 2 whose steps use parts of the model."""
    engine = begin(make, ds_config=config(2, **more) | ({"optimizer": optimizer} if optimizer else {}))
    train(engine, rank=process.rank, drops=True)
    return weights(engine)


def differing(process: Process, *, cases: dict[str, Callable], expected: dict[str, dict[str, Tensor]], places: Sequence,
              drops: bool = False, scheduler: Callable | None = None, **more: Any) -> list[str]:  # fmt: skip
    """Runs every case at every place. Returns the cases that differ in a bit."""
    found = []
    for label, make in cases.items():
        for stage, optimizer, parameters in places:
            engine = begin(
                make, ds_config=config(stage, optimizer=optimizer, parameters=parameters, **more), scheduler=scheduler
            )
            train(engine, rank=process.rank, drops=drops)
            for name, value in weights(engine).items():
                if not torch.equal(value, expected[label][name]):
                    worst = float((value - expected[label][name]).abs().max())
                    found.append(f"{label} at stage {stage}, {optimizer}, {parameters}: {name} differs by {worst}")
            engine.destroy()
    return found


class Own(torch.optim.Optimizer):
    """A user's class: sign of a slow average, a count of steps in the group and one in the state, a state that is replaced, bf16."""

    def __init__(self, params, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "slow": 0.9, "steps": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["age"], state["average"] = 0, p.data.clone()
                    state["narrow"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["age"] += 1
                state["narrow"].add_(p.grad.bfloat16())
                state["average"] = state["average"] * group["slow"] + p.grad * (1 - group["slow"])
                rate = group["lr"] / (state["age"] + group["steps"])
                p.data.sub_(rate * (state["average"].sign() + state["narrow"].float()))


class Derived(torch.optim.AdamW):
    """A class derived from torch's that changes its step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-1, 1)
        return super().step(closure)


def differing_nesterov(model: Dots) -> torch.optim.Optimizer:
    """An optimizer that fused SGD cannot replace."""
    return torch.optim.SGD(
        [
            {"params": [p for name, p in model.named_parameters() if "bias" in name], "nesterov": True, "momentum": 0.9},
            {"params": [p for name, p in model.named_parameters() if "weight" in name], "momentum": 0.5, "dampening": 0.1},
        ],
        lr=0.1,
    )  # fmt: skip


class Scaled(torch.optim.SGD):
    """Decay in the gradient, in place, and a factor that parameters have as an attribute."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.5).mul_(getattr(p, "lr_scale", 1.0))
        return super().step(closure)


def scaled(model: Dots) -> Scaled:
    for block in model.blocks[1:]:
        block.weight.lr_scale = 0.25
    return Scaled(model.parameters(), lr=0.1, momentum=0.5)


MAKERS = {"differing nesterov": differing_nesterov, "scaled": scaled}


def halving(optimizer: torch.optim.Optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def save(process: Process, *, makers: dict[str, Callable], folder: str) -> None:
    """Two steps at stage 3, states on cpu; then a checkpoint."""
    for label, make in makers.items():
        engine = begin(make, ds_config=config(3, optimizer="cpu"), scheduler=halving)
        train(engine, rank=process.rank, steps=2)
        engine.save_checkpoint(f"{folder}/{label}")
        engine.destroy()


def resume(process: Process, *, makers: dict[str, Callable], folder: str, stage: int, tier: str = "none") -> dict:
    """The other steps, on one rank with the average gradient."""
    rank, found = (process.rank if process.world_size > 1 else -1), {}
    for label, make in makers.items():
        engine = begin(make, ds_config=config(stage, optimizer=tier), scheduler=halving)
        engine.load_checkpoint(f"{folder}/{label}")
        train(engine, rank=rank, start=2, steps=STEPS - 2)
        found[label] = weights(engine)
        engine.destroy()
    return found


def through_state_dicts(process: Process, *, makers: dict[str, Callable], stage: int) -> dict:
    """Two steps at stage 3, states on cpu; the others at `stage` with the optimizer's state_dict and the weights."""
    found = {}
    for label, make in makers.items():
        first = begin(make, ds_config=config(3, optimizer="cpu"))
        train(first, rank=process.rank, steps=2)
        state, values = first.optimizer.state_dict(), weights(first)
        first.destroy()
        second = begin(make, ds_config=config(stage), values=values)
        second.optimizer.load_state_dict(state)
        train(second, rank=process.rank, start=2, steps=STEPS - 2)
        found[label] = weights(second)
        second.destroy()
    return found


def load_other(process: Process, *, folder: str, label: str) -> str:
    """The error of a load into another optimizer whose states have the same names."""
    engine = begin(torch.optim.Adam, ds_config=config(1))
    try:
        engine.load_checkpoint(f"{folder}/{label}")
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return "loaded"


def overflowing(process: Process, *, make: Callable, stage: int, tier: str) -> dict[str, Any]:
    """In fp16 the second step has a gradient that is infinite, and training goes on."""
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = begin(make, ds_config=config(stage, optimizer=tier, fp16=fp16))
    train(engine, rank=process.rank, steps=1)
    bad = gradients(9, rank=process.rank)
    bad["blocks.1.weight"][0, 0] = float("inf")
    engine.backward(engine(bad))
    engine.step()
    train(engine, rank=process.rank, start=1, steps=STEPS - 1)
    found = {"weights": weights(engine), "skipped": engine.skipped_steps}
    engine.destroy()
    return found


def in_hand(process: Process, *, make: Callable) -> dict[str, Any]:
    """States read and set by name, a parameter that is frozen for a while, and a clipped step."""
    engine = begin(make, ds_config={**config(3), "gradient_clipping": 1.0})
    parameters = dict(engine.module.named_parameters())
    first = parameters["blocks.0.weight"]
    found: dict[str, Any] = {}
    try:
        deepspeed.safe_set_full_optimizer_state(first, torch.zeros(first.shape), "square_avg")
    except ValueError as error:
        found["early"] = str(error)
    before = weights(engine)
    train(engine, rank=process.rank, steps=1)
    found["before"], found["after"], found["norm"] = before, weights(engine), engine.get_global_grad_norm()
    deepspeed.safe_set_full_optimizer_state(first, torch.full(first.shape, 3.0), "square_avg")
    found["state"] = deepspeed.safe_get_full_optimizer_state(first, "square_avg")
    engine.destroy()
    return found
