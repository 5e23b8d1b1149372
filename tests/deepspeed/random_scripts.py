"""Random models and loops; `random_runs` runs them with an engine on two ranks and in plain PyTorch.

The seed alone decides a script: the model (layers that are tied, shared, viewed, skipped, frozen, normalised by spectral_norm) and its
construction, the strategy, the division of a batch over ranks, the call of the backward, the optimizer and its later changes
(`random_optimizers`), for every iteration one habit of public scripts with parameters and gradients, and one edit (`random_edits`). Most
scripts follow the advice in the others' errors, so that most can be compared to their end.
"""

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.deepspeed import random_edits, random_optimizers

WIDTH, STEPS, BATCH, CLIP = 8, 6, 8, 0.05
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
# Other uses of kept tensors, hooks and modules.
HABITS = ("alias", "references", "hook", "head")  # the first two write parameters, which is an error at stage 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One drawn script.

    built: as plain PyTorch, under zero.Init, or filled from a file inside a zero.Init that continues. fp16: with a loss scale.
    calls_backward: loss.backward() instead of engine.backward(loss). uneven: rank 0 has most of each batch. gathered: the iteration after
    which a weight is written inside GatheredParameters, and whether modifier_rank is set. habit: one of HABITS, or none. optimizer: its kind
    and its changes. heeds: it follows the advice in errors of other scripts. edit: drawn last, with advice of its own.
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
    heeds: bool
    edit: random_edits.Drawn

    @property
    def decays(self) -> bool:
        """Every parameter has a gradient in every step."""
        return not self.skips

    @staticmethod
    def draw(seed: int, *, is_bare: bool = False) -> "Script":
        """is_bare: it heeds nothing and has no edit."""
        rng = random.Random(seed)
        skips = rng.random() < 0.3
        acts = [rng.choice(ACTIONS) if rng.random() < 0.4 else "nothing" for _ in range(STEPS)]
        # Later draws keep the scripts of older seeds equal.
        drawn = {
            "depth": rng.randint(2, 4),
            "tie": rng.choice(TIES if rng.random() < 0.15 else TIES[:3]),
            "spectral": rng.random() < 0.2,
            "frozen": rng.random() < 0.2,
            "stage": rng.randrange(4),
            "offload": rng.choice(("none", "cpu")),
        }
        script = Script(
            seed=seed,
            **drawn,
            skips=skips,
            momentum=0.0
            if skips or "drop" in acts
            else 0.9,  # momentum moves a parameter without a gradient (documented)
            actions=tuple(acts),
            built=rng.choice(("plain", "Init", "pretrained")) if drawn["stage"] == 3 else "plain",
            fp16=rng.random() < 0.2,
            calls_backward=rng.random() < 0.3,
            uneven=rng.random() < 0.3,
            gathered=(rng.randrange(STEPS) if rng.random() < 0.15 else STEPS, rng.random() < 0.5),
            habit=rng.choice(HABITS if drawn["stage"] < 3 else HABITS[2:]) if rng.random() < 0.2 else "none",
            optimizer=random_optimizers.Drawn.draw(rng),
            heeds=rng.random() < 0.85,
            edit=random_edits.NONE,
        )
        if is_bare:
            return replace(script, heeds=False)
        script = script.heeded() if script.heeds else script
        edit = random_edits.Drawn.draw(rng, steps=STEPS, stage=script.stage, fp16=script.fp16)
        is_compared = any(action != "drop" for action in acts[edit.number + 1 :])  # by a step after it
        if edit.kind == "load" and acts[edit.number - 1] == "drop":  # no step, so no checkpoint
            is_compared = False
        return replace(script, edit=edit if is_compared else random_edits.NONE)

    def heeded(self) -> "Script":
        """The script without habits that are refused in every context."""
        allowed = {"assign": "load", "unfreeze": "freeze" if self.frozen else "unfreeze"}
        if self.fp16:
            allowed["double"] = "nothing"
        return replace(
            self,
            tie="parameter" if self.tie in TIES[3:] else self.tie,
            actions=tuple(allowed.get(action, action) for action in self.actions),
            gathered=(self.gathered[0], True),
            habit="none" if self.habit == "head" else self.habit,
            optimizer=self.optimizer.heeded(momentum=self.momentum),
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
        self.renorms = script.edit.how if script.edit.kind == "max_norm" else None
        if self.renorms is not None:
            in_place = random_edits.NORM if self.renorms == "in the lookup" else None
            self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=in_place)

    def forward(self, x: Tensor, number: int) -> Tensor:
        if self.renorms is not None:
            tokens, table = x.argmax(1), self.embedding.weight
            if self.renorms == "of a copy":
                rows = F.embedding(tokens, table * (random_edits.NORM / table.norm(dim=1, keepdim=True)).clamp(max=1))
            else:
                rows = self.embedding(tokens)
            x = x + rows
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
    """The calls of a script. model: returns the output; module: the model that the author built; part: of the global batch.

    gathered: parameters -> a context for the script's write between steps; around: for its other writes. gradient_of, set_gradient: read and
    set a parameter's gradient.
    """

    model: nn.Module
    module: nn.Module
    backward: Callable
    step: Callable
    zero_grad: Callable
    part: slice
    optimizer: torch.optim.Optimizer
    edits: random_edits.Edits
    gradient_of: Callable
    set_gradient: Callable
    clip: Callable
    gathered: Callable = contextlib.nullcontext
    around: Callable = contextlib.nullcontext
    dtype: torch.dtype = torch.float32
    loss_factor: float = 1.0


def loop(script: Script, *, calls: Calls) -> None:
    """Runs the script."""
    kept: list[Tensor] = []
    if script.habit == "hook":
        bias = calls.module.layers[0].bias
        hooked = bias if bias.requires_grad else calls.module.layers[0].weight
        hooked.register_post_accumulate_grad_hook(_halve_gradient)
    after_step = random_optimizers.begin_late(script.optimizer, optimizer=calls.optimizer)
    for number, action in enumerate(script.actions):
        x, y = batch(number, part=calls.part)
        calls.zero_grad()
        calls.edits.before("forward", number=number)
        squares = F.mse_loss(calls.model(x.to(calls.dtype), number).float(), y, reduction="sum")
        calls.edits.before("backward", number=number)
        calls.backward(squares * (calls.loss_factor / BATCH))
        parameters = [parameter for parameter in calls.module.parameters() if parameter.requires_grad]
        if action == "drop":
            calls.zero_grad()
            continue
        _edit_gradients(action, parameters=parameters, calls=calls)
        calls.edits.before("step", number=number)
        calls.step()
        calls.edits.after_step(number)
        after_step()
        random_optimizers.change_late(script.optimizer, optimizer=calls.optimizer, number=number, decays=script.decays)
        _edit_parameters(action, module=calls.module, around=calls.around)
        kept = _follow_habit(script.habit, number=number, module=calls.module, kept=kept)
        if number == script.gathered[0]:
            with torch.no_grad(), calls.gathered([calls.module.layers[0].weight]):
                calls.module.layers[0].weight.mul_(0.7)


def _halve_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.5


def _follow_habit(habit: str, *, number: int, module: nn.Module, kept: list[Tensor]) -> list[Tensor]:
    """Runs a habit after a step. kept: the script's tensors from before; returns its tensors now."""
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


def _edit_gradients(action: str, *, parameters: list[nn.Parameter], calls: Calls) -> None:
    if action == "clip":
        calls.clip(parameters)
    elif action == "scale gradient":
        for parameter in parameters:
            if calls.gradient_of(parameter) is not None:
                calls.set_gradient(parameter, calls.gradient_of(parameter) * 0.25)
    elif action == "set gradient":
        calls.set_gradient(parameters[0], torch.ones(parameters[0].shape, dtype=calls.dtype))


def _edit_parameters(action: str, *, module: nn.Module, around: Callable) -> None:
    parameters = list(module.parameters())
    with around(parameters) if action not in ("nothing", "freeze", "unfreeze") else contextlib.nullcontext():
        _edit_gathered(action, module=module, parameters=parameters)


def _edit_gathered(action: str, *, module: nn.Module, parameters: list[nn.Parameter]) -> None:
    weight = module.layers[0].weight
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
