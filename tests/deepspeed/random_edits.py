"""Edits of random scripts that go around the engine, or into the middle of a step: see `random_scripts`.

KINDS: tensors that show a parameter's memory, written or read later; bools and integers computed from weights; edits on one rank; an embedding
with max_norm; loads and copies. A script that heeds does them as the errors of the others advise.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

KINDS = ("alias written", "alias read", "decision", "one rank", "max_norm", "load")
ALIASES = ("data", "numpy", "entry", "data of an entry", "numpy of an entry")
SINCE = ("before initialize", "after initialize", "each time")
DECISIONS = ("signs", "argmax", "topk", "finite", "mask", "prune")
ON_ONE = ("times", "data", "numpy", "memory")
RENORMS = ("in the lookup", "of a copy", "after the step")
LOADS = ("checkpoint", "state dict", "copy")
MOMENTS = ("forward", "backward", "step")
HOW = {
    "alias written": ALIASES,
    "alias read": ALIASES,
    "decision": DECISIONS,
    "one rank": ON_ONE,
    "max_norm": RENORMS,
    "load": LOADS,
}
_WHEN = {"alias written": SINCE, "alias read": SINCE, "one rank": ("0", "1"), "load": MOMENTS}
NORM = 1.0
WARNING = (
    "still holds memory that parameters had"  # logged by rank 0 at `initialize`: reads of that memory return old values
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One edit of a script.

    kind: of KINDS, or none. how: of the kind's tuple above. when: of SINCE, of MOMENTS, or the rank that edits. number: the iteration. heeds:
    it gathers before its reads and writes, and holds no tensor from before `initialize`.
    """

    kind: str
    how: str
    when: str
    number: int
    heeds: bool

    @staticmethod
    def draw(rng: random.Random, *, steps: int, stage: int, fp16: bool) -> "Drawn":
        kind = rng.choice(KINDS) if rng.random() < 0.5 else "none"
        how, when = rng.choice(HOW.get(kind, ("",))), rng.choice(_WHEN.get(kind, ("",)))
        number, heeds = rng.randrange(1, steps - 1), rng.random() < 0.65
        if kind == "decision" and fp16:
            how = "finite"  # the other conditions depend on 16-bit rounding
        if kind == "one rank" and stage == 3:
            heeds = True  # else that rank ends alone, and the other one waits for it
        if heeds and when == "before initialize":
            when = "after initialize"
        if heeds and kind.startswith("alias") and stage == 3:
            when = "each time"  # inside GatheredParameters
        if heeds and how == "in the lookup":
            how = "of a copy"
        if heeds and kind == "load":
            when = "forward"
        return Drawn(kind=kind, how=how, when=when, number=number, heeds=heeds)

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.how, self.when)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings that may announce a difference."""
        return (WARNING,) if self.kind == "alias read" and self.when == "before initialize" else ()


NONE = Drawn(kind="none", how="", when="", number=0, heeds=True)


def hold(drawn: Drawn, *, module: nn.Module, since: str) -> list:
    """[the tensor or array that the script holds from now on], or []."""
    is_alias = drawn.kind in ("alias written", "alias read")
    return [_alias(drawn.how, module=module)] if is_alias and drawn.when == since else []


def _alias(how: str, *, module: nn.Module) -> Tensor | np.ndarray:
    weight = module.layers[0].weight
    match how:
        case "data":
            return weight.data
        case "numpy":
            return weight.detach().numpy()
    entry = module.state_dict()["layers.0.weight"]
    return entry if how == "entry" else entry.data if how == "data of an entry" else entry.numpy()


class Edits:
    """Makes the edit of one script. is_reached: it was made.

    held: of `hold`. everywhere: parameters -> a context in which rank 0's writes become everybody's. save, load: a checkpoint.
    """

    def __init__(
        self,
        drawn: Drawn,
        *,
        module: nn.Module,
        rank: int,
        held: list,
        everywhere: Callable,
        save: Callable[[], object],
        load: Callable[[], object],
    ) -> None:
        self._drawn, self._module, self._rank, self._held = drawn, module, rank, held
        self._everywhere, self._save, self._load = everywhere, save, load
        self._copy: nn.Module | None = None
        self.is_reached = False

    def before(self, moment: str, *, number: int) -> None:
        """Before the forward, the backward or the step of iteration `number`."""
        drawn = self._drawn
        if drawn.kind != "load" or (drawn.when, drawn.number) != (moment, number):
            return
        self.is_reached = True
        match drawn.how:
            case "checkpoint":
                self._load()
            case "state dict":
                with self._around(self._parameters):
                    state = {name: 0.5 * value for name, value in self._module.state_dict().items()}
                    self._module.load_state_dict(state)
            case "copy":
                with self._around(self._parameters):
                    self._copy = copy.deepcopy(self._module)

    @torch.no_grad()
    def after_step(self, number: int) -> None:
        """After the step of iteration `number`."""
        drawn, weight = self._drawn, self._module.layers[0].weight
        match drawn.kind:
            case "alias written" if number >= drawn.number:
                self.is_reached = True
                with self._around([weight]):
                    _scale(self._alias_now())
            case "alias read" if number >= drawn.number:
                self.is_reached = True
                with self._around([weight, self._module.head.bias]):
                    self._module.head.bias.add_(0.1 * float(self._alias_now().mean()))
            case "decision" if number == drawn.number:
                self.is_reached = True
                self._decide(weight)
            case "one rank" if number == drawn.number:
                self.is_reached = True
                with self._around([weight]):
                    if self._rank == int(drawn.when):
                        _edit(weight, how=drawn.how)
            case "max_norm":
                self.is_reached = True
                if drawn.how == "after the step":
                    table = self._module.embedding.weight
                    with self._around([table]):
                        table.copy_(torch.renorm(table, 2, 0, NORM))
            case "load":
                self._save_or_go_back(number)

    def _save_or_go_back(self, number: int) -> None:
        if self._drawn.how == "checkpoint" and number == self._drawn.number - 1:
            self._save()
        if self._copy is not None and number == self._drawn.number + 1:
            with self._everywhere(self._parameters):
                self._module.load_state_dict(self._copy.state_dict())

    def _decide(self, weight: nn.Parameter) -> None:
        """Reads a weight and writes depending on its value; both times, or only the second time, inside GatheredParameters."""
        layers = [layer for layer in self._module.layers if layer is not self._module.layers[0]]
        if self._drawn.how == "prune" and layers:
            with self._around([layers[0].weight]):
                prune.l1_unstructured(layers[0], "weight", amount=0.25)
            return
        with self._around([weight]):
            factor = _factor(weight, how=self._drawn.how)
        with self._everywhere([weight]):
            weight.mul_(factor)

    def _alias_now(self) -> Tensor | np.ndarray:
        return self._held[0] if self._held else _alias(self._drawn.how, module=self._module)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self._module.parameters())

    def _around(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager:
        return self._everywhere(parameters) if self._drawn.heeds else contextlib.nullcontext()


def _factor(weight: Tensor, *, how: str) -> Tensor | float:
    """The factor that a decision about `weight` [rows, columns] multiplies it by."""
    ones = torch.ones(weight.shape, dtype=weight.dtype)
    match how:
        case "signs":
            return 1 - 0.5 * int((weight > 0).sum()) / weight.numel()
        case "argmax":
            ones[int(weight.abs().sum(1).argmax())] = 0.5
        case "topk":
            ones.view(-1)[weight.abs().view(-1).topk(weight.numel() // 4, largest=False).indices] = 0
        case "finite":
            return 0.5 if bool(torch.isfinite(weight).all()) else 1.0
        case _:
            ones *= weight.abs() > 0.3 * weight.abs().mean()
    return ones


def _scale(alias: Tensor | np.ndarray) -> None:
    alias *= 0.9


def _edit(weight: nn.Parameter, *, how: str) -> None:
    match how:
        case "times":
            weight.mul_(0.5)
        case "data":
            weight.data.mul_(0.5)
        case "numpy":
            weight.detach().numpy()[:] *= 0.5
        case "memory":
            weight.data = 0.5 * weight.data
