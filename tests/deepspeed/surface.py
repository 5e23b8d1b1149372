"""Rank functions for the engine's methods: the scripts of `test_surface`."""

import tempfile

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.core.runtime import Process, Tier
from ztk.deepspeed.zero import leaf


def batches(process: Process, *, number: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of global batches."""
    made = []
    for step in range(number):
        x, y = scripts.data(step)
        made.append(
            (x.chunk(process.world_size)[process.rank][:size], y.chunk(process.world_size)[process.rank][:size])
        )
    return made


def without_optimizer(process: Process, *, stage: int, evaluate_first: bool) -> dict:
    """No optimizer anywhere: evaluates without states, trains when a forward runs with gradients on."""
    engine, optimizer, _, _ = deepspeed.initialize(
        model=scripts.build(), config={"train_batch_size": 8, "zero_optimization": {"stage": stage}}
    )
    found = {"optimizer": optimizer, "losses": [], "evaluated": None}
    if evaluate_first:
        with torch.no_grad():
            found["evaluated"] = engine(scripts.data(0)[0])
    found["states"] = engine.engine.memory.by_category(Tier.device).get("optimizer", 0)
    for x, y in batches(process, number=6):
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        found["losses"].append(scripts.mean(process, loss.item()))
    found |= {"weights": scripts.weights(engine), "lr": engine.get_lr(), "name": engine.optimizer_name()}
    engine.destroy()
    return found


def coalesced(process: Process, *, stage: int, coalesce: bool) -> dict:
    """Three backwards of one step, reduced once or each time."""
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage, accumulation=1))
    counters = engine.engine.comm.counters
    for start in (0, 3):
        parts = batches(process, number=start + 3)[start:]
        if coalesce:
            with engine.coalesce_grad_reduction():
                for x, y in parts:
                    engine.backward(F.cross_entropy(engine(x), y) / 3)
        else:
            for number, (x, y) in enumerate(parts):
                engine.set_gradient_accumulation_boundary(number == 2)
                engine.backward(F.cross_entropy(engine(x), y) / 3)
        engine.step()
    reduced = counters.elements["reduce_scatter"] + counters.elements["all_reduce"]
    try:
        with engine.no_sync(), engine.coalesce_grad_reduction():
            nested = ""
    except RuntimeError as error:
        nested = str(error)
    found = {"weights": scripts.weights(engine), "reduced": reduced, "steps": engine.global_steps, "nested": nested}
    engine.destroy()
    return found


def resized(process: Process, *, stage: int) -> dict:
    """Two steps of one micro-batch, then two of two, then micro-batches of half the size."""
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
    losses = []

    def run(step: int) -> None:
        micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        x, y = scripts.data(step)
        x, y = x.repeat(4, 1), y.repeat(4)
        for number in range(accumulation):
            place = (number * process.world_size + process.rank) * micro
            loss = F.cross_entropy(engine(x[place : place + micro]), y[place : place + micro])
            losses.append(float(engine.backward(loss)))
            engine.step()

    run(0)
    engine.set_train_batch_size(16)
    sizes = [engine.get_batch_info()]
    run(1)
    engine.set_train_micro_batch_size(2)
    sizes.append(engine.get_batch_info())
    run(2)
    errors = []
    for wrong in (lambda: engine.set_train_batch_size(7), lambda: engine.set_train_micro_batch_size(0)):
        try:
            wrong()
        except ValueError as error:
            errors.append(str(error))
    found = {"sizes": sizes, "steps": engine.global_steps, "weights": scripts.weights(engine), "errors": errors}
    engine.destroy()
    return found | {"samples": engine.global_samples}


def compiled(process: Process, *, stage: int, compile_it: bool) -> dict:
    """Training with every unit compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(28, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    engine, *_ = deepspeed.initialize(model=model, config=scripts.config(stage=stage))
    graphs = []
    if compile_it:

        def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
            graphs.append(graph)
            return graph.forward

        engine.compile(backend=backend)
        engine.compile(backend=backend)
    losses = scripts.loop(process, engine)
    found = {"losses": losses, "graphs": len(graphs), "compiled": engine.is_compiled}
    engine.destroy()
    return found


def edited(process: Process) -> dict:
    """A script changes learning rates between steps, freezes parameters, and reads and loads module states."""
    model = scripts.build()
    groups = [{"params": model.fc1.parameters(), "lr": 1e-2}, {"params": model.fc2.parameters(), "lr": 0.0}]
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=scripts.config(stage=3))
    before = scripts.weights(engine)
    scripts.loop(process, engine, steps=1)
    middle = scripts.weights(engine)
    optimizer.param_groups[0]["lr"] = 0.0
    engine.optimizer.param_groups[1]["lr"] = 1e-2
    rates = engine.get_lr()
    scripts.loop(process, engine, steps=1, start=1)
    after = scripts.weights(engine)
    state = engine.module_state_dict()
    modes = [engine.train(False).training, engine.module.training, engine.train().training, engine.module.fc1.training]
    loader = deepspeed.RepeatingLoader([1, 2])
    found = {
        "before": before,
        "middle": middle,
        "after": after,
        "rates": rates,
        "state": None if state is None else sorted(state),
        "modes": modes,
        "asked": (
            engine.zero_reduce_bucket_size(),
            engine.zero_param_persistence_threshold(),
            engine.zero_prefetch_bucket_size(),
            engine.zero_max_live_parameters(),
            engine.zero_max_reuse_distance(),
            engine.zero_cpu_offload(),
            engine.fp16_auto_cast(),
        ),
        "repeated": [next(loader) for _ in range(5)],
        "eval": [batch.tolist() for batch in engine.deepspeed_io(list(range(12)), route="eval")],
    }
    engine.destroy()
    return found


class Experts(nn.Module):
    """Every rank uses another expert; in the second step the last rank uses none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.idle = rank, False
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.experts[1].half_precision = False

    def forward(self, x: Tensor) -> Tensor:
        if self.idle:
            return x + 0.0 * x
        return x + torch.tanh(self.experts[self.rank](x))


class Routed(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inward, self.routed, self.outward = nn.Linear(28, 32), Experts(rank), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.routed(self.inward(x)))


class Chooses(nn.Module):
    """A model whose ranks use different children."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList([nn.Linear(28, 28, bias=False) for _ in range(2)])

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.linears[number](x).square().mean()


def chosen(process: Process, *, stage: int) -> dict[str, Tensor]:
    """The weights after steps in which each rank uses its own child, both the same one, and each the other's."""
    model = Chooses()
    leaf.set_z3_leaf_modules(model, [Chooses])
    zero = {"reduce_bucket_size": 500, "stage3_prefetch_bucket_size": 784}
    engine, *_ = deepspeed.initialize(model=model, config=scripts.config(stage=stage, zero=zero))
    for number in (process.rank, process.rank, 1, 1 - process.rank):
        engine.backward(engine(scripts.data(number)[0], number))
        engine.step()
    found = scripts.weights(engine)
    engine.destroy()
    return found


def leaves(process: Process, *, marked: str, rank_free: bool = False) -> dict:
    """Stage 3 over a module whose ranks use different parameters. marked: by "class", "name", "suffix", "config" or not at all."""
    torch.manual_seed(0)
    model = Routed(process.rank)
    section = {}
    match marked:
        case "class":
            leaf.set_z3_leaf_modules(model, [Experts])
        case "name":
            leaf.set_z3_leaf_modules_by_name(model, ["routed"])
        case "suffix":
            leaf.set_z3_leaf_modules_by_suffix(model, ["uted"])
        case "config":
            section = {"leaf_module": {"classes": ["Experts"]}}
    config = scripts.config(stage=3, zero={"reduce_bucket_size": 1100, **section})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step, (x, y) in enumerate(batches(process, number=5)):
        model.routed.idle = step == 2 and process.rank == 1
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(scripts.mean(process, loss.item()))
    units = sorted({bucket.traits.unit for bucket in engine.engine.zero.buckets})
    found = {
        "losses": losses,
        "units": units,
        "leaves": [type(module).__name__ for module in leaf.get_z3_leaf_modules(model)],
        "parameter": leaf.z3_leaf_parameter(model.routed.experts[0].weight),
        "weights": scripts.weights(engine),
    }
    engine.destroy()
    return found


def routed_plainly(*, idle_step: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """The same on one rank, both halves of the batch through their experts."""
    torch.manual_seed(0)
    model = Routed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(5):
        x, y = scripts.data(step)
        parts = []
        for rank in range(2):
            model.routed.rank, model.routed.idle = rank, step == idle_step and rank == 1
            parts.append(F.cross_entropy(model(x.chunk(2)[rank]), y.chunk(2)[rank]))
        loss = sum(parts) / 2
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def booked(engine) -> dict[str, dict[str, int]]:
    """Bytes per tier and category, without passing buffers."""
    memory = engine.engine.memory
    return {
        tier.label: {kind: memory.by_category(tier).get(kind, 0) for kind in ("optimizer", "parameters", "gradients")}
        for tier in (Tier.device, Tier.host)
    }


def states_moved(process: Process, *, stage: int, include: list | None) -> dict:
    """States are offloaded between two steps and reloaded."""
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
    losses = scripts.loop(process, engine, steps=2)
    before = booked(engine)
    engine.offload_states(include=include)
    during = booked(engine)
    try:
        engine(scripts.data(0)[0][:4])
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    engine.optimizer.offload_states(include=include)  # once more, where others call it
    engine.optimizer.reload_states()
    engine.reload_states()
    after = booked(engine)
    losses += scripts.loop(process, engine, steps=3, start=2)
    engine.empty_partition_cache()
    losses += scripts.loop(process, engine, steps=1, start=5)
    engine.destroy()
    return {"losses": losses, "before": before, "during": during, "after": after, "refused": refused}


def local_states(process: Process, *, bf16: bool, offload: str) -> dict:
    """Reads and writes of the rank's own states, and full gradients set by hand."""
    with tempfile.TemporaryDirectory() as folder:
        zero = {}
        if offload != "none":
            zero["offload_optimizer"] = {"device": offload, **({"nvme_path": folder} if offload == "nvme" else {})}
        config = scripts.config(stage=3, zero=zero, bf16={"enabled": bf16} if bf16 else None)
        engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
        scripts.loop(process, engine, steps=1)
        parameters = dict(engine.module.named_parameters())
        x, y = batches(process, number=1)[0]
        x = x.bfloat16() if bf16 else x
        engine.backward(F.cross_entropy(engine(x).float(), y))
        found = {
            "grad": {name: deepspeed.safe_get_local_grad(p) for name, p in parameters.items()},
            "full_grad": {name: deepspeed.safe_get_full_grad(p) for name, p in parameters.items()},
            "master": {name: deepspeed.safe_get_local_fp32_param(p) for name, p in parameters.items()},
            "full_master": {name: deepspeed.safe_get_full_fp32_param(p) for name, p in parameters.items()},
            "moment": {name: deepspeed.safe_get_local_optimizer_state(p, "exp_avg") for name, p in parameters.items()},
            "full_moment": {
                name: deepspeed.safe_get_full_optimizer_state(p, "exp_avg") for name, p in parameters.items()
            },
            "bf16": {name: p.ds_tensor for name, p in parameters.items()},
        }
        deepspeed.safe_update_full_grad_vectorized(list(parameters.values()), lambda grad, p: torch.ones_like(grad))
        bias = parameters["fc1.bias"]
        deepspeed.safe_set_full_grad(bias, torch.full_like(bias, 3.0))
        mine = deepspeed.safe_get_local_grad(bias)
        deepspeed.safe_set_local_grad(bias, mine / 3)
        found["set_grads"] = {name: deepspeed.safe_get_full_grad(p) for name, p in parameters.items()}
        for p in parameters.values():
            for key in ("exp_avg", "exp_avg_sq"):
                deepspeed.safe_set_local_optimizer_state(p, torch.zeros_like(deepspeed.safe_get_local_grad(p)), key)
            deepspeed.safe_set_local_fp32_param(p, deepspeed.safe_get_local_fp32_param(p) * 0 + 0.25)
        engine.step()
        found["norm"] = engine.get_global_grad_norm()
        found["stepped"] = {name: deepspeed.safe_get_full_fp32_param(p) for name, p in parameters.items()}
        errors = []
        for wrong in (
            lambda: deepspeed.safe_set_full_grad(bias, torch.zeros_like(bias)),
            lambda: deepspeed.safe_set_local_fp32_param(bias, torch.zeros(10**6)),
            lambda: deepspeed.safe_get_local_fp32_param(nn.Parameter(torch.ones(2))),
        ):
            try:
                wrong()
            except ValueError as error:
                errors.append(str(error))
        found["errors"] = errors
        engine.destroy()
        return found


def pinned(process: Process, *, stage: int) -> dict:
    """One model in two engines: refused while the first lives, the same run afterwards. And two models with a frozen layer of both."""
    model = scripts.build()
    settings = scripts.config(stage=stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    first = deepspeed.initialize(model=model, config=settings, mesh_param=(2, 1))[0]
    losses = scripts.loop(process, first, steps=2)
    with pytest.raises(ValueError, match=r"mesh_param=\(2, 2\): 2 ranks must be data-parallel ranks"):
        deepspeed.initialize(model=scripts.build(), config=settings, mesh_param=(2, 2))
    try:
        deepspeed.initialize(model=model, config=settings)
        text = ""
    except ValueError as error:
        text = str(error)
    losses += scripts.loop(process, first, steps=1, start=2)  # the refusal has changed nothing
    first.destroy()
    second = deepspeed.initialize(model=model, config=settings)[0]
    losses += scripts.loop(process, second, steps=2, start=3)
    second.destroy()
    return {"text": text, "losses": losses}


def shared(process: Process) -> list[list[float]]:
    """Two engines over one frozen layer and a head each."""
    torch.manual_seed(0)
    body = nn.Linear(28, 32).requires_grad_(False)
    engines = [
        deepspeed.initialize(model=nn.Sequential(body, nn.ReLU(), nn.Linear(32, 10)), config=scripts.config(stage=1))[0]
        for _ in range(2)
    ]
    losses = [scripts.loop(process, engine, steps=8, period=1) for engine in engines]
    for engine in engines:
        engine.destroy()
    return losses
