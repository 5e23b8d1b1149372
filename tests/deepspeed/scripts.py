"""Rank functions: scripts in the style of DeepSpeed's documents, and a plain PyTorch loop to compare with."""

import argparse
import logging
import os
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from ztk.core.runtime import Process
from ztk.zero.parameters.released import is_released

STEPS, BATCH = 8, 8


class SimpleModel(nn.Module):
    """The model of the documents, smaller."""

    def __init__(self, hidden_dim: int = 32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


def build() -> SimpleModel:
    torch.manual_seed(0)
    return SimpleModel()


def data(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: a task that can be learned."""
    x = torch.randn(BATCH, 28, generator=torch.Generator().manual_seed(step))
    return x, x[:, :10].argmax(1)


def plain(
    *,
    steps: int = STEPS,
    optimizer: Callable | None = None,
    clip: float = 1.0,
    scheduler: Callable | None = None,
    groups: Callable | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """A plain PyTorch loop over the global batch: losses and final weights."""
    model = build()
    parameters = groups(model) if groups else model.parameters()
    optim = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0)))(parameters)
    schedule = scheduler(optim) if scheduler else None
    losses = []
    for step in range(steps):
        x, y = data(step)
        loss = F.cross_entropy(model(x), y)
        optim.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def config(*, stage: int, accumulation: int = 1, **more) -> dict:
    zero = {"stage": stage, "reduce_bucket_size": 600, "contiguous_gradients": True, "overlap_comm": True}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    made = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    zero.update(more.pop("zero", {}))
    return {key: value for key, value in {**made, **more}.items() if value is not None}


def mean(process: Process, value: float) -> float:
    return float(process.comm.gather_scalars(torch.tensor([value]), label="mean").mean())


def weights(engine) -> dict[str, Tensor]:
    return {name: value.float().clone() for name, value in engine.engine.zero.full_parameters()}


def loop(process: Process, engine, *, steps: int = STEPS, start: int = 0, period: int = 1000) -> list[float]:
    """The documents' loop over this rank's part of each global batch, in micro-batches; returns each step's mean loss.

    period: the data repeat after so many steps.
    """
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    losses = []
    for step in range(start, start + steps):
        x, y = data(step % period)
        x = x.bfloat16() if engine.bfloat16_enabled() else x
        x, y = x.chunk(process.world_size)[process.rank], y.chunk(process.world_size)[process.rank]
        total = 0.0
        for i in range(accumulation):
            part = slice(i * micro, (i + 1) * micro)
            outputs = engine(x[part].to(engine.device))
            loss = F.cross_entropy(outputs.float(), y[part].to(engine.device))
            total += float(engine.backward(loss))
            engine.step()
        losses.append(mean(process, total))
    return losses


def train(process: Process, *, ds_config: dict, optimizer: Callable | None = None, groups: Callable | None = None,
          scheduler: Callable | None = None, steps: int = STEPS, period: int = 1000) -> dict:  # fmt: skip
    """One run: the engine's values at its end."""
    model = build()
    engine, optim, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups(model) if groups else None,
        lr_scheduler=scheduler,
        config=ds_config,
    )
    losses = loop(process, engine, steps=steps, period=period)
    found = {
        "losses": losses,
        "weights": weights(engine),
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "skipped": engine.skipped_steps,
        "lr": engine.get_lr(),
        "norm": engine.get_global_grad_norm(),
        "samples": engine.global_samples,
    }
    engine.destroy()
    return found


# Ways to write a loop


def loops(process: Process, *, stage: int, style: str) -> dict:
    """One step of two micro-batches per iteration, written in different styles that mean the same."""
    accumulation = 2
    engine, *_ = deepspeed.initialize(model=build(), config=config(stage=stage, accumulation=accumulation))
    losses = []
    for step in range(STEPS):
        x, y = data(step)
        x, y = x.chunk(process.world_size)[process.rank], y.chunk(process.world_size)[process.rank]
        total = 0.0
        for i, (xs, ys) in enumerate(zip(x.chunk(accumulation), y.chunk(accumulation), strict=True)):
            boundary = i == accumulation - 1
            if style == "boundary":
                engine.set_gradient_accumulation_boundary(boundary)
            loss = F.cross_entropy(engine(xs), ys)
            total += loss.item() / accumulation
            assert engine.is_gradient_accumulation_boundary() == boundary
            match style:
                case "torch":
                    loss.backward()
                case "scale":
                    engine.scale(loss).backward()
                case "unscaled":
                    returned = engine.backward(loss / accumulation, scale_wrt_gas=False)
                    assert returned.item() == (loss / accumulation).item()
                case "no_sync" if not boundary:
                    with engine.no_sync():
                        engine.backward(loss)
                case _:
                    assert engine.backward(loss).item() == (loss / accumulation).item()
            engine.step()
            assert engine.was_step_applied() == boundary
        losses.append(mean(process, total))
    found = {"losses": losses, "weights": weights(engine), "global_steps": engine.global_steps}
    engine.destroy()
    return found


def overflow(process: Process, *, stage: int) -> list[tuple]:
    """fp16: the third batch is far too large. After every step: counters, scale, learning rate, whether weights moved."""
    model = build()
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1000}
    section = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, config=config(stage=stage, fp16=fp16, scheduler=section)
    )
    rows = []
    for step in range(5):
        x, y = data(step)
        x, y = x.chunk(process.world_size)[process.rank], y.chunk(process.world_size)[process.rank]
        before = weights(engine)
        loss = F.cross_entropy(engine(x).float(), y)
        engine.backward(loss * (1e30 if step == 2 else 1.0))
        engine.step()
        after = weights(engine)
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        rows.append((engine.global_steps, engine.skipped_steps, engine.was_step_applied(), optimizer.overflow,
                     optimizer.cur_scale, engine.get_lr()[0], moved))  # fmt: skip
    engine.destroy()
    return rows


def unscaled(process: Process, *, stage: int) -> tuple[str, float]:
    """fp16: the error of `loss.backward()`, and the gradient norm of `engine.scale(loss).backward()` after it."""
    fp16 = {"enabled": True, "loss_scale": 256}
    engine, *_ = deepspeed.initialize(
        model=nn.Linear(4, 4, bias=False), config=config(stage=stage, fp16=fp16, gradient_clipping=0.0)
    )
    x = torch.ones(1, 4)
    message = ""
    try:
        engine(x).sum().backward()
    except RuntimeError as error:
        message = str(error)
    loss = engine.scale(engine(x).sum())
    engine(x)  # another forward before the backward: the loss is scaled all the same
    loss.backward()
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return message, norm


def huge(process: Process, *, stage: int, factor: float) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and final weights of steps whose losses are `factor` times too large, and whose gradients are clipped to 1."""
    engine, *_ = deepspeed.initialize(model=build(), config=config(stage=stage, gradient_clipping=1.0))
    norms = []
    for step in range(3):
        x, y = (part.chunk(process.world_size)[process.rank] for part in data(step))
        engine.backward(F.cross_entropy(engine(x), y) * factor)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    found = norms, weights(engine)
    engine.destroy()
    return found


# Checkpoints


def save(process: Process, *, folder: str, stage: int, scheduler: dict) -> dict:
    """Trains, saves and trains on, as a reference for a resumed run."""
    ds_config = config(stage=stage, scheduler=scheduler, zero={"stage3_gather_16bit_weights_on_model_save": True})
    engine, *_ = deepspeed.initialize(model=build(), config=ds_config)
    loop(process, engine)
    assert engine.save_checkpoint(folder, client_state={"epoch": 3, "order": torch.arange(3)})
    assert engine.save_16bit_model(folder, "model.bin")
    saved = weights(engine)
    losses = loop(process, engine, start=STEPS)
    found = {"losses": losses, "weights": weights(engine), "saved": saved, "lr": engine.get_lr()}
    engine.destroy()
    return found


def resume(process: Process, *, folder: str, stage: int, scheduler: dict, tag: str | None = None, **options) -> dict:
    """Another model, loaded and trained on."""
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(model=SimpleModel(), config=config(stage=stage, scheduler=scheduler))
    path, client = engine.load_checkpoint(folder, tag=tag, **options)
    if path is None:
        engine.destroy()
        return {"path": None, "client": client}
    found = {
        "path": path,
        "client": client,
        "loaded": weights(engine),
        "global_steps": engine.global_steps,
        "samples": engine.global_samples,
        "losses": loop(process, engine, start=STEPS),
        "weights": weights(engine),
        "lr": engine.get_lr(),
    }
    engine.destroy()
    return found


def refuse_saving(process: Process, *, folder: str) -> dict:
    """The errors of save and load."""
    engine, *_ = deepspeed.initialize(
        model=build(), config=config(stage=1, checkpoint={"tag_validation": "Fail"}, accumulation=2)
    )
    errors = {}
    for name, call in {
        "client_state": lambda: engine.save_checkpoint(folder, client_state={"args": argparse.Namespace(a=1)}),
        "tag": lambda: engine.save_checkpoint(folder, tag="a/b"),
        "differing tags": lambda: engine.save_checkpoint(folder, tag=f"rank{process.rank}"),
        "missing": lambda: engine.load_checkpoint(folder, tag="global_step9"),
    }.items():
        try:
            call()
        except ValueError as error:
            errors[name] = str(error)
    engine.destroy()
    return errors


# deepspeed.zero


def gathered(process: Process, *, stage: int, bf16: bool, offload: str) -> dict:
    """Reads and changes full parameters; rank 1 is the one that changes."""
    path = {"nvme_path": tempfile.mkdtemp(dir=os.environ.get("ZTK_TEST_NVME"))} if offload == "nvme" else {}
    zero = {"offload_optimizer": {"device": offload, **path}} if offload != "none" else {}
    engine, *_ = deepspeed.initialize(model=build(), config=config(stage=stage, bf16={"enabled": bf16}, zero=zero))
    loop(process, engine, steps=2)
    module = engine.module
    master = {name: deepspeed.safe_get_full_fp32_param(p) for name, p in module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        seen = {name: p.data.float().clone() for name, p in module.named_parameters()}
    with deepspeed.zero.GatheredParameters(module.fc1.weight, modifier_rank=1), torch.no_grad():
        if process.rank == 1:
            module.fc1.weight[0].fill_(0.5)
    changed = {name: deepspeed.safe_get_full_fp32_param(p) for name, p in module.named_parameters()}
    moment = deepspeed.safe_get_full_optimizer_state(module.fc2.weight, "exp_avg")
    deepspeed.safe_set_full_optimizer_state(module.fc2.weight, 2 * moment, "exp_avg")
    doubled = deepspeed.safe_get_full_optimizer_state(module.fc2.weight, "exp_avg")
    deepspeed.safe_set_full_fp32_param(module.fc2.bias, torch.arange(10.0))
    found = {
        "master": master,
        "seen": seen,
        "changed": changed,
        "after": weights(engine),
        "moment": moment,
        "doubled": doubled,
        "sharded": is_released(module.fc1.weight),
    }
    loop(process, engine, start=2, steps=1)  # it still trains
    engine.destroy()
    return found


def gradients(process: Process, *, stage: int, accumulation: int) -> dict:
    """Full gradients between the last backward and the step, and their absence before."""
    engine, *_ = deepspeed.initialize(model=build(), config=config(stage=stage, accumulation=accumulation))
    x, y = (part.chunk(process.world_size)[process.rank] for part in data(0))
    for xs, ys in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
        early = deepspeed.safe_get_full_grad(engine.module.fc1.weight)
        engine.backward(F.cross_entropy(engine(xs), ys))
        found = {name: deepspeed.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        engine.step()
    late = deepspeed.safe_get_full_grad(engine.module.fc1.weight)
    engine.destroy()
    return {"grads": found, "early": early, "late": late}


# Other arguments


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((28,), float(index)), index % 10


def training_data(process: Process) -> dict:
    """The dataloader of `training_data`."""
    engine, _, loader, _ = deepspeed.initialize(
        model=build(), training_data=Numbers(), config=config(stage=1, dataloader_drop_last=True)
    )
    seen = []
    for x, y in loader:
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
        seen.append(x[:, 0].tolist())
    engine.destroy()
    return {"seen": seen, "steps": engine.global_steps}


def surface(process: Process) -> dict:
    """Values that scripts read from an engine."""
    ds_config = config(stage=3, fp16={"enabled": True, "loss_scale": 128}, steps_per_print=5)
    engine, optimizer, _, _ = deepspeed.initialize(model=build(), config=ds_config)
    found = {
        "sizes": (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
        "stage": (engine.zero_optimization(), engine.zero_optimization_stage(), engine.zero_optimization_partition_weights()),
        "scale": (engine.loss_scale(), engine.dynamic_loss_scale(), optimizer.cur_scale, optimizer.loss_scale),
        "names": (engine.optimizer_name(), engine.get_mom(), engine.steps_per_print()),
        "ranks": (engine.global_rank == process.rank, engine.world_size, engine.dp_world_size, engine.mp_world_size),
        "module": (engine.fc1 is engine.module.fc1, isinstance(engine, nn.Module), next(iter(engine.state_dict()))),
        "modes": (engine.eval().module.training, engine.train().module.training),
        "norm": engine.get_global_grad_norm(),
        "dtypes": (*engine.get_data_types(), engine.communication_data_type),
        "same": engine.basic_optimizer is optimizer and isinstance(optimizer, torch.optim.Optimizer),
        "config": engine.config["train_batch_size"],
        "solved": (engine._config.train_batch_size, engine._config.gradient_accumulation_steps, engine._config.optimizer_name),
        "group": torch.distributed.get_process_group_ranks(engine.data_parallel_group),
        "window": (optimizer.dynamic_loss_scale, optimizer.loss_scale_config.scale_window, optimizer.loss_scaler.cur_iter),
        "scaler": (optimizer.loss_scaler.loss_scale, optimizer.loss_scaler.cur_scale, optimizer.loss_scaler.dynamic),
    }  # fmt: skip
    errors = {}
    loss = F.cross_entropy(engine(torch.randn(4, 28)).float(), torch.zeros(4, dtype=torch.long))
    for name, call in {
        "attribute": lambda: engine.no_such_thing,
        "vector": lambda: engine.backward(loss.expand(2)),
        "optimizer.step": optimizer.step,
        "loss_scaler": lambda: optimizer.loss_scaler.update_scale(False),
    }.items():
        try:
            call()
        except (AttributeError, RuntimeError, ValueError) as error:
            errors[name] = str(error)
    engine.backward(loss)
    with engine.no_sync():
        try:
            engine.step()
        except RuntimeError as error:
            errors["step"] = str(error)
    engine.destroy()
    engine.destroy()
    return {**found, "errors": errors}


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def last_layer(model: SimpleModel) -> list[Tensor]:
    return [model.fc2.weight, model.fc2.bias]


def passed(process: Process) -> dict:
    """Optimizer and schedule passed and configured, and more model_parameters than the optimizer has; then Lightning's evaluation."""
    model = build()
    given = config(stage=1, gradient_clipping=0.0, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 5.0}})
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(last_layer(model), lr=0.1),
        model_parameters=model.parameters(),
        lr_scheduler=halving,
        config=given,
    )
    found = {"losses": loop(process, engine), "weights": weights(engine), "notes": engine.settings.notes}
    found["names"] = engine.optimizer_name(), engine.scheduler_name()
    engine.destroy()
    only_reads = {"train_micro_batch_size_per_gpu": 1}
    engine, optimizer, *_ = deepspeed.initialize(model=build(), model_parameters=[], config=only_reads)
    with torch.no_grad():
        found["evaluated"] = optimizer is None and torch.equal(engine(data(0)[0]), build()(data(0)[0]))
    engine.destroy()
    return found


def refusals(process: Process) -> dict[str, str]:
    """The errors of `initialize`."""
    model, foreign = build(), build()
    good = config(stage=1)
    bare = config(stage=1, optimizer=None)
    twice = [{"params": [model.fc1.weight]}, {"params": [model.fc1.weight, model.fc2.weight]}]
    stepped = torch.optim.AdamW(model.parameters())
    foreign_loss = model(torch.zeros(1, 28)).sum()
    foreign_loss.backward()
    stepped.step()
    model.zero_grad()
    calls = {
        "no model": {"config": good},
        "no config": {"model": model},
        "two configs": {"model": model, "config": good, "args": argparse.Namespace(deepspeed_config="x.json")},
        "mpu": {"model": model, "config": good, "mpu": object()},
        "foreign": {"model": model, "config": bare, "optimizer": torch.optim.AdamW(foreign.parameters())},
        "closure": {"model": model, "config": bare, "optimizer": torch.optim.LBFGS(model.parameters())},
        "no optimizer": {"model": model, "config": bare, "optimizer": lambda parameters: list(parameters)},
        "stepped": {"model": model, "config": bare, "optimizer": stepped},
        "twice": {"model": model, "config": good, "model_parameters": twice},
        "empty": {"model": model, "config": good, "model_parameters": iter(())},
        "schedule": {"model": build().requires_grad_(False), "config": {**bare, "scheduler": {"type": "WarmupLR"}}},
        "schedule rates": {
            "model": model,
            "config": {**good, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1}}},
        },
    }
    errors = {}
    for name, arguments in calls.items():
        try:
            deepspeed.initialize(**arguments)
        except ValueError as error:
            errors[name] = str(error)
        model = build() if name == "schedule rates" else model
    return errors


def printed(process: Process) -> list[str]:
    """The log of four steps with both breakdowns."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ztk.deepspeed")
    logger.addHandler(handler)
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "memory_breakdown": True, "log_level": "info"}
    engine, *_ = deepspeed.initialize(model=build(), config=config(stage=2, zero={"sub_group_size": 1e9}, **more))
    loop(process, engine, steps=4)
    engine.destroy()
    logger.removeHandler(handler)
    return lines


def with_arguments(process: Process, *, path: str) -> list[float]:
    """A script that adds DeepSpeed's arguments and joins the ranks first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--local_rank", str(process.rank), "--deepspeed", "--deepspeed_config", path])
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(args=args, model=build())
    losses = loop(process, engine)
    engine.destroy()
    return losses
