"""Models and loops drawn at random, run by an engine on two ranks and by plain PyTorch: equal, or an error, never a silent difference.

A script is drawn from its seed alone: the model (layers that are tied, shared, viewed, skipped, frozen, normalised by spectral_norm) and how
it is built, the strategy, how the ranks divide a batch, how the backward is called, the optimizer and what is done with it later
(`random_optimizers`), and for every iteration one thing that public scripts do to parameters and gradients.
"""

import contextlib
import copy
import functools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import random_optimizers, scripts
from ztk.core.runtime import Process
from ztk.deepspeed.tools.log import logger
from ztk.zero.parameters.partitioned import PartitionedParameter, partitioned_of

WIDTH, STEPS, BATCH = 8, 6, 8
TIES = ("none", "parameter", "module", "data", "attribute", "buffer")
ACTIONS = (
    *(
        "nothing",
        "clamp",
        "clamp data",
        "swap",
        "halve",
        "vector",
        "load",
        "assign",
        "freeze",
        "unfreeze",
        "fill",
        "clip",
    ),
    *("scale gradient", "set gradient", "drop", "read data", "double", "normalise"),
)
# What else a script does with tensors that it keeps, hooks and modules.
HABITS = ("alias", "references", "hook", "head")  # the first two write parameters, which is an error at stage 3
_FILL = PartitionedParameter.fill


def _fill_while_full(self: PartitionedParameter, read: Callable) -> None:
    """What is loaded goes where the shard is, and the old values in full are sharded over it later."""
    self.shard = lambda source: None
    try:
        _FILL(self, read)
    finally:
        del self.shard


# Faults that were there: what is patched away, in one place or several, brings one back.
PLANTS = {
    "pretrained": ("ztk.zero.parameters.partitioned.PartitionedParameter.fill", _fill_while_full),
    "loss scale": (
        "ztk.zero.reduction.GradientReduction.require_scaled_loss",
        lambda self: None,
    ),
    "gathered": ("ztk.deepspeed.zero.gathered._is_changed", lambda parameter, *, versions: False),
    "writes": ("ztk.zero.writes.ParameterWrites.take_over", lambda self: None),
    "replaced": ("ztk.zero.writes.ParameterWrites._check_replaced", lambda self: None),
    "frozen": ("ztk.zero.writes.ParameterWrites.frozen_names", lambda self: frozenset()),
    "aliases": ("ztk.zero.build.check_aliases", lambda model: None),
    "gradients": (
        "ztk.deepspeed.engine.engine.take_changes ztk.deepspeed.optimizers.sharded.take_changes",
        lambda engine: None,
    ),
    "zero_grad": ("ztk.deepspeed.optimizers.sharded.ShardedOptimizer.zero_grad", lambda self, set_to_none=True: None),
    "placeholders": ("torch._C._set_throw_on_mutable_data_ptr", lambda tensor: None),
    "kept": ("ztk.zero.parameters.watched._alive", lambda parameter: []),
    "hooks": (
        "ztk.zero.parameters.watched._Watched.register_post_accumulate_grad_hook",
        Tensor.register_post_accumulate_grad_hook,
    ),
    "modules": ("ztk.zero.writes.ParameterWrites._check_modules", lambda self: None),
    "elementwise": ("ztk.optim.probe._compare", lambda part, **_: None),
    "attributes": ("ztk.optim.torch_step.attributes_of", lambda parameter: {}),
    "identity": ("ztk.optim.reads.Reads.fault", lambda self: None),
    "options": ("ztk.deepspeed.optimizers.groups.FixedOptions.check", lambda self: None),
    "groups": ("ztk.optim.script_optimizer.FixedGroups.check", lambda self: None),
    "steps": ("ztk.optim.script_optimizer.ScriptOptimizer.check", lambda self: None),
    "step hooks": ("ztk.deepspeed.optimizers.sharded.take_changes", lambda engine: None),
    "states": ("ztk.optim.script_optimizer.StateElsewhere._note", lambda self, what: None),
}
# The seed of a script that differs in silence where the fault is there.
CAUGHT = {
    "pretrained": 22,
    "loss scale": 127,
    "gathered": 21,
    "writes": 0,
    "replaced": 16,
    "frozen": 153,
    "aliases": 100,
    "gradients": 30,
    "zero_grad": 421,
    "placeholders": 275,
    "kept": 0,
    "hooks": 78,
    "modules": 509,
    "elementwise": 53,
    "attributes": 33,
    "identity": 37,
    "options": 66,
    "groups": 64,
    "steps": 107,
    "step hooks": 327,
    "states": 27,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One drawn script.

    built: as plain PyTorch, under zero.Init, or filled from a file inside a zero.Init that goes on. fp16: with a loss scale. calls_backward:
    loss.backward(), not engine.backward(loss). uneven: rank 0 has most of each batch. gathered: the iteration after which a weight is
    written inside GatheredParameters, and whether modifier_rank says so. habit: one of HABITS, or none. optimizer: which one, and its changes.
    """

    seed: int
    depth: int
    tie: str
    spectral: bool
    skips: bool
    frozen: bool
    stage: int
    offload: str
    momentum: float
    actions: tuple[str, ...]
    built: str
    fp16: bool
    calls_backward: bool
    uneven: bool
    gathered: tuple[int, bool]
    habit: str
    optimizer: random_optimizers.Drawn

    @property
    def decays(self) -> bool:
        """Every parameter has a gradient in every step."""
        return not self.skips

    @staticmethod
    def draw(seed: int) -> "Script":
        rng = random.Random(seed)
        skips = rng.random() < 0.3
        acts = [rng.choice(ACTIONS) if rng.random() < 0.4 else "nothing" for _ in range(STEPS)]
        # What is drawn after it leaves the scripts of older seeds alike.
        drawn = {
            "depth": rng.randint(2, 4),
            "tie": rng.choice(TIES if rng.random() < 0.15 else TIES[:3]),
            "spectral": rng.random() < 0.2,
            "frozen": rng.random() < 0.2,
            "stage": rng.randrange(4),
            "offload": rng.choice(("none", "cpu")),
        }
        return Script(
            seed=seed,
            **drawn,
            skips=skips,
            momentum=0.0
            if skips or "drop" in acts
            else 0.9,  # what has no gradient moves by momentum: the page says so
            actions=tuple(acts),
            built=rng.choice(("plain", "Init", "pretrained")) if drawn["stage"] == 3 else "plain",
            fp16=rng.random() < 0.2,
            calls_backward=rng.random() < 0.3,
            uneven=rng.random() < 0.3,
            gathered=(rng.randrange(STEPS) if rng.random() < 0.15 else STEPS, rng.random() < 0.5),
            habit=rng.choice(HABITS if drawn["stage"] < 3 else HABITS[2:]) if rng.random() < 0.2 else "none",
            optimizer=random_optimizers.Drawn.draw(rng),
        )


class Model(nn.Module):
    """The model of a script."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        torch.manual_seed(script.seed)
        self.skips = script.skips
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(script.depth))
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        first, last = self.layers[0], self.layers[-1]
        match script.tie:
            case "parameter":
                last.weight = first.weight
            case "module":
                self.layers[-1] = first
            case "data":
                last.weight.data = first.weight.data
            case "attribute":
                self.row = first.weight.data[0]
            case "buffer":
                self.register_buffer("row", first.weight.detach()[0])
        if script.frozen:
            first.bias.requires_grad_(False)
        if script.spectral:
            nn.utils.parametrizations.spectral_norm(self.head)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if not (self.skips and index == 1 and number % 2):
                x = torch.tanh(layer(x * self.scale.to(x.dtype)))
        if hasattr(self, "row"):
            x = x + self.row.to(x.dtype)
        return self.head(x) + self.layers[0].weight[0].sum()  # a view, outside of its module's forward


def batch(number: int, *, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
    return x[part], x.sum(1, keepdim=True)[part]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """What a script calls. model: for its output; module: what its author has built; part: of the global batch."""

    model: nn.Module
    module: nn.Module
    backward: Callable
    step: Callable
    zero_grad: Callable
    part: slice
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype = torch.float32
    loss_factor: float = 1.0
    gathered: Callable = contextlib.nullcontext


def loop(script: Script, *, calls: Calls) -> None:
    """Runs the script."""
    kept: list[Tensor] = []
    if script.habit == "hook":
        calls.module.layers[0].bias.register_post_accumulate_grad_hook(_halve_gradient)
    after_step = random_optimizers.begin_late(script.optimizer, optimizer=calls.optimizer)
    for number, action in enumerate(script.actions):
        x, y = batch(number, part=calls.part)
        calls.zero_grad()
        squares = F.mse_loss(calls.model(x.to(calls.dtype), number).float(), y, reduction="sum")
        calls.backward(squares * (calls.loss_factor / BATCH))
        parameters = [parameter for parameter in calls.module.parameters() if parameter.requires_grad]
        if action == "drop":
            calls.zero_grad()
            continue
        _edit_gradients(action, parameters=parameters)
        calls.step()
        after_step()
        random_optimizers.change_late(script.optimizer, optimizer=calls.optimizer, number=number, decays=script.decays)
        _edit_parameters(action, module=calls.module)
        kept = _follow_habit(script.habit, number=number, module=calls.module, kept=kept)
        if number == script.gathered[0]:
            with torch.no_grad(), calls.gathered([calls.module.layers[0].weight]):
                calls.module.layers[0].weight.mul_(0.7)


def _halve_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.5


def _follow_habit(habit: str, *, number: int, module: nn.Module, kept: list[Tensor]) -> list[Tensor]:
    """After a step. kept: what the script has from before; returns what it has now."""
    if habit == "alias":  # a tensor that `.data` gave once
        kept = kept or [module.layers[0].weight.data.view(-1)]
        kept[0].mul_(0.9)
    elif habit == "references" and number == 1:  # other weights for some steps, then the tensors that were there
        kept = [parameter.data for parameter in module.parameters()]
        for parameter, value in zip(module.parameters(), kept, strict=True):
            parameter.data = 0.5 * value
    elif habit == "references" and number == 3:
        for parameter, value in zip(module.parameters(), kept, strict=True):
            parameter.data = value
    elif habit == "head" and number == 2:
        torch.manual_seed(0)
        module.head = nn.Linear(WIDTH, 1)
    return kept


def _edit_gradients(action: str, *, parameters: list[nn.Parameter]) -> None:
    if action == "clip":
        nn.utils.clip_grad_norm_(parameters, 0.05)
    elif action == "scale gradient":
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.25)
    elif action == "set gradient":
        parameters[0].grad = torch.ones_like(parameters[0])


def _edit_parameters(action: str, *, module: nn.Module) -> None:
    weight, parameters = module.layers[0].weight, list(module.parameters())
    match action:
        case "clamp":
            with torch.no_grad():
                for parameter in parameters:
                    parameter.clamp_(-0.1, 0.1)
        case "clamp data":
            for parameter in parameters:
                parameter.data.clamp_(-0.1, 0.1)
        case "swap":
            kept = [parameter.data.clone() for parameter in parameters]
            for parameter in parameters:
                parameter.data = torch.zeros_like(parameter)
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.data = 0.9 * value
        case "halve":
            weight.data = weight.data * 0.5
        case "vector":
            nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(parameters), parameters)
        case "load" | "assign":
            state = {name: 0.5 * value for name, value in copy.deepcopy(module.state_dict()).items()}
            module.load_state_dict(state, assign=action == "assign")
        case "freeze":
            module.layers[0].requires_grad_(False)
        case "unfreeze":
            module.requires_grad_(True)
        case "fill":
            nn.init.zeros_(weight)
        case "read data":
            [float(parameter.data.norm()) for parameter in parameters]
        case "double":
            module.double().float()
        case "normalise":
            weight.data.div_(weight.data.norm())


def run_plain(script: Script) -> dict[str, Tensor]:
    model = _loaded(Model(script), script=script)
    sgd = _optimizer(script, model=model)
    calls = Calls(
        model=model,
        module=model,
        backward=lambda loss: loss.backward(),
        step=lambda: sgd.step(),  # which a script may replace
        zero_grad=model.zero_grad,
        part=slice(None),
        optimizer=sgd,
        gathered=lambda parameters: contextlib.nullcontext(),
    )
    loop(script, calls=calls)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def run_engine(process: Process, *, seed: int, plant: str = "") -> tuple[str, str]:
    """("equal", ""), ("error", its text), ("warning", its text) or ("differs", where)."""
    script, messages = Script.draw(seed), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    engine = None
    with _planted(plant), _listening(handler):
        try:
            engine = _made(script)
            cut = BATCH - 1 if script.uneven else BATCH // 2
            calls = Calls(
                model=engine,
                module=engine.module,
                backward=(lambda loss: loss.backward()) if script.calls_backward else engine.backward,
                step=engine.step,
                zero_grad=engine.zero_grad,
                part=slice(cut) if process.rank == 0 else slice(cut, BATCH),
                optimizer=engine.optimizer.optimizer if script.optimizer.of_client else engine.optimizer,
                dtype=torch.float16 if script.fp16 else torch.float32,
                loss_factor=process.world_size,  # the engine divides by it
                gathered=functools.partial(
                    deepspeed.zero.GatheredParameters, modifier_rank=0 if script.gathered[1] else None
                ),
            )
            loop(script, calls=calls)
            weights = scripts.weights(engine)
        except (RuntimeError, ValueError, FloatingPointError) as error:
            return "error", f"{type(error).__name__}: {error}"
        finally:
            if engine is not None:
                engine.destroy()
    # fp32: two orders of summation over STEPS steps, values below 2; fp16: one rounding of such values per step.
    where = _difference(weights, run_plain(script), tolerance=STEPS * 2**-10 if script.fp16 else 2e-5)
    said = [message for message in messages if any(words in message for words in random_optimizers.WARNINGS)]
    if where and any(everyone := process.comm.gather_objects(said)):
        return "warning", next(filter(None, everyone))[0]
    return ("differs", where) if where else ("equal", "")


def _made(script: Script):
    zero = {} if script.offload == "none" else {"offload_optimizer": {"device": "cpu"}}
    config = scripts.config(stage=script.stage, zero=zero, gradient_clipping=0.0)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05, "momentum": script.momentum}}
    if script.fp16:
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=script.built != "plain"):
        if script.built == "pretrained":  # as transformers does it where an Init goes on around from_pretrained
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Model(script)
            model.state_dict()
            model = _loaded(model, script=script)
        else:
            model = Model(script)
    client = None if script.optimizer.kind == "config" else _optimizer(script, model=model)
    return deepspeed.initialize(model=model, optimizer=client, config=config)[0]


def _optimizer(script: Script, *, model: Model) -> torch.optim.SGD:
    return random_optimizers.optimizer_of(
        script.optimizer, module=model, momentum=script.momentum, decays=script.decays
    )


def _loaded(model: Model, *, script: Script) -> Model:
    """With values of a file, where the script has one."""
    generator = torch.Generator().manual_seed(script.seed)
    for parameter in model.parameters() if script.built == "pretrained" else ():
        values = torch.randn(parameter.numel(), generator=generator) / WIDTH**0.5
        if (partitioned := partitioned_of(parameter)) is None:
            parameter.data.copy_(values.view(parameter.shape))
        else:
            partitioned.fill(lambda start, stop, values=values: values[start:stop])
    return model


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float) -> str:
    """The parameter that is furthest off, if it is further than `tolerance`."""
    worst = {
        name: float((found[name] - value).abs().max()) if name in found else float("inf")
        for name, value in expected.items()
    }
    name = max(worst, key=lambda key: float("inf") if worst[key] != worst[key] else worst[key])
    return "" if worst[name] <= tolerance else f"{name} by {worst[name]:.2g}"


@contextlib.contextmanager
def _planted(plant: str) -> Iterator[None]:
    if not plant:
        yield
        return
    places, fault = PLANTS[plant]
    with contextlib.ExitStack() as stack:
        for place in places.split():
            stack.enter_context(mock.patch(place, fault, create=True))
        yield


@contextlib.contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
