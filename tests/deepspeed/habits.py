"""Habits of public training scripts, one function each. An engine runs them on two ranks, plain PyTorch on all of each batch.

A script takes `Calls`, builds its models and loops, and stores its results in `calls.seen`.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.core.runtime import Process

WIDTH, STEPS, BATCH = 8, 4, 8


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Plain(nn.Module):
    """Replaces an engine. Its backward and step are torch's."""

    def __init__(self, module: nn.Module, *, optimizer: torch.optim.Optimizer, schedule: object) -> None:
        super().__init__()
        self.module, self.optimizer, self.schedule = module, optimizer, schedule

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.optimizer.step()
        self.zero_grad()
        if self.schedule is not None:
            self.schedule.step()


@dataclass(kw_only=True)
class Calls:
    """stage: None in plain PyTorch."""

    process: Process | None
    stage: int | None
    engines: list = field(default_factory=list)
    seen: dict[str, Tensor] = field(default_factory=dict)

    def data(self, number: int) -> tuple[Tensor, Tensor]:
        """This rank's part of a batch."""
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        x = x if self.process is None else x.chunk(self.process.world_size)[self.process.rank]
        return x, x.sum(1, keepdim=True)

    def init(self, model: nn.Module, *, optimizer: Callable | None = None, schedule: Callable | None = None):
        """An engine of `model`. optimizer: builds it from parameters, by default SGD with momentum. schedule: builds it from an optimizer."""
        optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        optim = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        scheduler = schedule and schedule(optim)
        if self.process is None:
            engine = Plain(model, optimizer=optim, schedule=scheduler)
        else:
            config = scripts.config(stage=self.stage, optimizer=None, gradient_clipping=0.0)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optim, lr_scheduler=scheduler, config=config)
        self.engines.append(engine)
        return engine

    def gathered(self, module: nn.Module) -> contextlib.AbstractContextManager:
        if self.process is None:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters(list(module.parameters()))

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for number, engine in enumerate(self.engines):
            own = engine.module.named_parameters() if self.process is None else engine.engine.zero.full_parameters()
            found.update({f"{number}.{name}": value.detach().clone() for name, value in own})
        return found


def _step(calls: Calls, engine, number: int) -> None:
    x, y = calls.data(number)
    engine.backward(F.mse_loss(engine(x), y))
    engine.step()


def _adam(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


# Habits


def gan(calls: Calls) -> None:
    """The discriminator learns by one backward for real and one for generated samples; then the generator through it."""
    generator, critic = calls.init(Net(), optimizer=_adam), calls.init(Net(2), optimizer=_adam)
    for number in range(STEPS):
        x, _ = calls.data(number)
        fake = generator(x).expand(-1, WIDTH)
        critic.zero_grad()
        F.softplus(-critic(x)).mean().backward()
        F.softplus(critic(fake.detach())).mean().backward()
        critic.step()
        generator.backward(F.softplus(-critic(fake)).mean())
        generator.step()
        critic.zero_grad()


def gradient_penalty(calls: Calls) -> None:
    critic = calls.init(Net(2), optimizer=_adam)
    for number in range(STEPS):
        x, _ = calls.data(number)
        x.requires_grad_()
        out = critic(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        critic.backward(out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean())
        critic.step()


def adversarial_inputs(calls: Calls) -> None:
    engine = calls.init(Net())
    for number in range(STEPS):
        x, y = calls.data(number)
        x.requires_grad_()
        F.mse_loss(engine(x), y).backward()
        engine.zero_grad()
        engine.backward(F.mse_loss(engine((x + 0.1 * x.grad.sign()).detach()), y))
        engine.step()


def gradual_unfreezing(calls: Calls) -> None:
    model = Net()
    engine = calls.init(model, optimizer=_adam)
    for number in range(STEPS):
        for index, layer in enumerate(model.layers):
            layer.requires_grad_(index >= 2 - number)
        _step(calls, engine, number)


def moved_rates(calls: Calls) -> None:
    """Parameter groups, and values in them that a script changes."""

    def groups(parameters: list) -> torch.optim.Optimizer:
        wide, narrow = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
        return torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 2e-3}], lr=0.01)

    engine = calls.init(Net(), optimizer=groups)
    for number in range(STEPS):
        _step(calls, engine, number)
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.9
        engine.optimizer.param_groups[1]["betas"] = (0.8, 0.99)


def torch_schedules(calls: Calls) -> None:
    """One scheduler that the engine steps, and one that the script steps with the returned optimizer."""

    def schedule(optimizer: torch.optim.Optimizer) -> object:
        first = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2)
        second = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [2])

    engine = calls.init(Net(), optimizer=_adam, schedule=schedule)
    other = calls.init(Net(2), optimizer=_adam)
    by_hand = torch.optim.lr_scheduler.StepLR(other.optimizer, 1, 0.5)
    for number in range(STEPS):
        _step(calls, engine, number)
        _step(calls, other, number)
        by_hand.step()


def hooks(calls: Calls) -> None:
    model = Net()
    model.layers[0].weight.register_hook(lambda gradient: gradient * 0.3)
    engine = calls.init(model)
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    model.layers[1].register_full_backward_hook(lambda module, given, outputs: (given[0] * 0.5,))
    model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
    model.layers[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9,))
    for number in range(STEPS):
        _step(calls, engine, number)


def kept_features(calls: Calls) -> None:
    """A perceptual loss over the features that a hook stores, and parts of the model that are called separately."""
    model, kept = Net(), []
    engine = calls.init(model)
    model.layers[1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    for number in range(STEPS):
        kept.clear()
        x, y = calls.data(number)
        loss = F.mse_loss(model.head(model.encode(x)), y) + F.mse_loss(engine.module(x), y)
        engine.backward(loss + sum(value.square().mean() for value in kept))
        engine.step()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(2 * WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        sequence = x.unsqueeze(1) * torch.arange(1.0, 4.0).view(1, 3, 1)
        return self.head(self.attention(self.recurrent(sequence)[0])[:, -1])


def modules_that_read_each_others_weights(calls: Calls) -> None:
    """torch's LSTM keeps a list of its weights; its attention reads the weights of a layer that it never calls."""
    engine = calls.init(_Recurrent())
    for number in range(STEPS):
        _step(calls, engine, number)
    engine.eval()
    with torch.no_grad():
        calls.seen["evaluated"] = engine(calls.data(9)[0][:1] * 0 + 1)


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3) for _ in range(3))
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.ones(WIDTH)), "shift": nn.Parameter(torch.zeros(()))})
        self.empty, self.unused = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(3))
        self.head = torch.jit.script(nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.named["shift"]) * self.named["gain"]
        return self.head(x)


def odd_parameters(calls: Calls) -> None:
    """Lists, dicts, a scalar, an empty one, one that is not used, and a scripted module, in a wrapper."""
    engine = calls.init(nn.DataParallel(_Odd()), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    for number in range(STEPS):
        _step(calls, engine, number)


def repeated_layers(calls: Calls) -> None:
    """torch's checkpoint, of both kinds, around calls of the script's own."""

    class Recomputed(Net):
        def encode(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layers[0](x))
            x = checkpoint(lambda value: torch.tanh(self.layers[1](value)), x, use_reentrant=True)
            return checkpoint(lambda value: torch.tanh(self.layers[2](value)), x, use_reentrant=False)

    engine = calls.init(Recomputed())
    for number in range(STEPS):
        _step(calls, engine, number)


def penalty_on_weights(calls: Calls) -> None:
    """A term of the loss that reads every parameter."""
    model = Net()
    engine = calls.init(model)
    for number in range(STEPS):
        x, y = calls.data(number)
        loss = F.mse_loss(engine(x), y)
        with calls.gathered(model):
            loss = loss + 0.01 * sum(parameter.abs().sum() for parameter in engine.parameters())
        engine.backward(loss)
        engine.step()


def averages_of_weights(calls: Calls) -> None:
    """A mean teacher that follows, and torch's averaged model."""
    model = Net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    engine, averaged = calls.init(model), None
    for number in range(STEPS):
        x, y = calls.data(number)
        engine.backward(F.mse_loss(engine(x), y) + F.mse_loss(engine(x), teacher(x)))
        engine.step()
        with calls.gathered(model):
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            averaged = averaged or AveragedModel(model)
            averaged.update_parameters(model)
    for name, module in (("teacher", teacher), ("averaged", averaged.module)):
        calls.seen[name] = nn.utils.parameters_to_vector(module.parameters()).detach()


HABITS = {
    habit.__name__: habit
    for habit in (
        gan,
        gradient_penalty,
        adversarial_inputs,
        gradual_unfreezing,
        moved_rates,
        torch_schedules,
        hooks,
        kept_features,
        modules_that_read_each_others_weights,
        odd_parameters,
        repeated_layers,
        penalty_on_weights,
        averages_of_weights,
    )
}


# Habits that an engine has another word for at some stages


def _penalty_on_released(calls: Calls) -> None:
    engine = calls.init(Net())
    x, y = calls.data(0)
    engine.backward(F.mse_loss(engine(x), y) + 0.01 * sum(p.abs().sum() for p in engine.parameters()))
    engine.step()


def _teacher_of_released(calls: Calls) -> None:
    model = Net()
    teacher, engine = copy.deepcopy(model), calls.init(model)
    _step(calls, engine, 0)
    for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
        old.data.lerp_(new.data, 0.1)
    calls.seen["teacher"] = nn.utils.parameters_to_vector(teacher.parameters()).detach()


def _reset_head(calls: Calls) -> None:
    engine = calls.init(Net(), optimizer=_adam)
    _step(calls, engine, 0)
    torch.manual_seed(3)
    engine.module.head.reset_parameters()
    _step(calls, engine, 1)


def _merged_adapter(calls: Calls) -> None:
    engine = calls.init(Net(), optimizer=_adam)
    for number in range(2):
        _step(calls, engine, number)
        with torch.no_grad():
            engine.module.layers[0].weight += 0.25
            engine(calls.data(9)[0])
            engine.module.layers[0].weight -= 0.25


def _own_average(calls: Calls) -> None:
    """The class of many repositories: shadow weights that take the place of the model's for an evaluation."""
    model = Net()
    engine = calls.init(model)
    shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()} if calls.stage != 3 else {}
    for number in range(2):
        _step(calls, engine, number)
        for name, parameter in model.named_parameters():
            shadow[name] = 0.5 * parameter.data + 0.5 * shadow.get(name, parameter.data)
        kept = {name: parameter.data for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.data = shadow[name]
        calls.seen[f"evaluated {number}"] = engine(torch.ones(2, WIDTH)).detach()
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]


# name -> (habit, the name in the error at stage 3)
NOT_AT_STAGE_3 = {
    "penalty": (_penalty_on_released, "the loss has it as NaN"),
    "teacher": (_teacher_of_released, "another tensor"),
    "reset head": (_reset_head, "modifier_rank=0"),
    "merged adapter": (_merged_adapter, "modifier_rank=0"),
    "own average": (_own_average, "modifier_rank=0"),
}


def run_plain(habit: Callable) -> dict[str, Tensor]:
    """Weights and the script's results."""
    calls = Calls(process=None, stage=None)
    habit(calls)
    return {**calls.seen, **calls.weights()}


def run_engine(process: Process, *, habit: Callable, stage: int) -> dict[str, Tensor] | str:
    """Weights and results under an engine, or the text of the error that ends the script."""
    calls = Calls(process=process, stage=stage)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about hooks and reads of released parameters
            habit(calls)
        return {**calls.seen, **calls.weights()}
    except RuntimeError as error:
        return str(error)
    finally:
        for engine in calls.engines:
            engine.destroy()
