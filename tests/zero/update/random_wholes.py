"""Random optimizers of a user's own, and runs of them by torch's plain loop and by engines at any stage and tier.

A drawn optimizer combines a way to read (across groups, by position, by identity), a way to write (in place, by rebinding), a state (by
element, of odd shape, nested, shared), a change over time (per-tensor scaling after some steps, groups that change), class attributes,
hooks, an inner optimizer, and a closure. The loss is quadratic, so a gradient at other weights is another one.
"""

import os
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.checkpoint import load, save
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy

STEPS = 5
SHAPES = ((), (5,), (7, 9), (2, 3, 4), (40, 33))
PLACES = tuple((stage, tier) for stage in range(4) for tier in ("none", "cpu", "nvme"))
READS = ("own group", "first rate", "number of groups", "norm of all", "position", "identity")
WRITES = ("in place", "by data", "rebind", "set", "swap twice")
STATES = ("none", "momentum", "rows", "history", "deque", "nested", "number", "shared", "double", "flat")
CHANGES = ("none", "per tensor", "per tensor later", "rate", "moved", "new group", "large")
EXTRAS = (
    "none",
    "counter",
    "class attribute",
    "pre hook",
    "post hook",
    "inner",
    "list of parameters",
    "late attribute",
)
CLOSURES = (*4 * ("none",), "required", "sharpness")
TORCHS = ("lbfgs", "adafactor", "muon", "derived adam", "foreach adam", "amsgrad", "averaged sgd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A random optimizer; torch: one of TORCHS instead of a drawn one, or ""."""

    reads: str
    writes: str
    state: str
    change: str
    extra: str
    closure: str
    groups: int
    torch: str

    @staticmethod
    def draw(seed: int) -> "Drawn":
        rng = random.Random(seed)
        return Drawn(
            reads=rng.choice(READS),
            writes=rng.choice(WRITES),
            state=rng.choice(STATES),
            change=rng.choice(CHANGES),
            extra=rng.choice(EXTRAS),
            closure=rng.choice(CLOSURES),
            groups=rng.choice((1, 2, 3)),
            torch=rng.choice(TORCHS) if rng.random() < 0.1 else "",
        )


class Model(nn.Module):
    """Parameters of several shapes, a scalar and one that a bucket pads among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.randn(shape))]) for shape in SHAPES)

    def forward(self, targets: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.parts, targets, strict=True)
        return sum(((part[0] - target) ** 2).sum() / 2 for part, target in pairs)


def targets(step: int, *, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + 10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Own(torch.optim.Optimizer):
    scale = 1.0

    def __init__(self, groups: list[dict], *, drawn: Drawn) -> None:
        super().__init__(groups, {"lr": 0.05, "calls": 0})
        self.drawn = drawn
        if drawn.extra == "counter":
            self.own_calls = 0
        if drawn.reads == "identity":
            self.excluded = {id(self.param_groups[0]["params"][0])}
        if drawn.extra == "inner":
            self.inner = torch.optim.SGD(self.param_groups, momentum=0.5)
        if drawn.extra == "list of parameters":
            self.ordered = self._all()[::-1]
        self.needs_closure = drawn.closure != "none"

    @property
    def calls(self) -> int:
        return self.param_groups[0]["calls"]

    def _all(self) -> list:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        drawn, loss = self.drawn, None
        if drawn.closure == "sharpness":
            self._climb(closure)
        elif drawn.closure == "required":
            self.zero_grad()
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["calls"] += 1
        if drawn.extra == "counter":
            self.own_calls += 1
        if drawn.extra == "late attribute" and self.calls == 2:
            self.bonus = torch.tensor(0.5)
        self._change_groups()
        together = sum(p.grad.double().square().sum() for p in self._all() if p.grad is not None).sqrt()
        position = 0
        for number, group in enumerate(self.param_groups):
            for p in self._listed(group):
                position += 1
                if p.grad is None or (drawn.reads == "identity" and id(p) in self.excluded):
                    continue
                rate = group["lr"]
                if drawn.reads == "first rate":
                    rate = self.param_groups[0]["lr"] / (1 + number)
                elif drawn.reads == "number of groups":
                    rate = rate / len(self.param_groups)
                elif drawn.reads == "norm of all":
                    rate = rate / (1 + float(together))
                elif drawn.reads == "position":
                    rate = rate / position
                if drawn.extra == "counter":
                    rate = rate / self.own_calls
                elif drawn.extra == "class attribute":
                    rate, type(self).scale = rate * type(self).scale, 0.5
                elif drawn.extra == "late attribute":
                    rate = rate * float(getattr(self, "bonus", 1.0))
                self._write(p, p - rate * self._scaled(p, self._direction(p)))
        if drawn.extra == "inner":
            self.inner.step()
        return loss

    def _listed(self, group: dict) -> list:
        members = {id(p) for p in group["params"]}
        if self.drawn.extra == "list of parameters":
            return [p for p in self.ordered if id(p) in members]
        return group["params"]

    def _climb(self, closure) -> None:
        for p in self._all():
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad, alpha=0.1)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in self._all():
            p.copy_(self.state[p].pop("before"))

    def _change_groups(self) -> None:
        groups = self.param_groups
        if self.drawn.change == "rate":
            groups[-1]["lr"] = 0.9 * groups[-1]["lr"]
        elif self.drawn.change == "moved" and self.calls == 3 and len(groups) > 1:
            groups[0]["params"].append(groups[1]["params"].pop())
        elif self.drawn.change == "new group" and self.calls == 3 and len(groups[0]["params"]) > 1:
            self.add_param_group({"params": [groups[0]["params"].pop()], "lr": 0.2, "calls": 3})

    def _direction(self, p: Tensor) -> Tensor:
        state, grad = self.state[p], p.grad
        match self.drawn.state:
            case "momentum":
                return state.setdefault("average", torch.zeros_like(p)).lerp_(grad, 0.3).clone()
            case "double":
                state["sum"] = state.get("sum", 0) + grad.double()
                return state["sum"].to(torch.float32)
            case "rows" if grad.dim() > 1:
                rows = state.setdefault("rows", torch.zeros(grad.shape[0]))
                rows.add_(grad.flatten(1).square().mean(1))
                return grad / (1 + rows.view(-1, *[1] * (grad.dim() - 1)))
            case "history":
                state.setdefault("past", []).append(grad.clone())
                del state["past"][:-2]
                return sum(state["past"])
            case "deque":
                state.setdefault("past", deque()).append(grad.norm())
                return grad / (1 + sum(state["past"]))
            case "nested":
                inner = state.setdefault("of", {"count": 0, "mean": (torch.zeros_like(p), 1.0)})
                inner["count"] += 1
                inner["mean"] = (inner["mean"][0] + grad / inner["count"], 2.0)
                return inner["mean"][0]
            case "number":
                state["norm"] = 0.5 * state.get("norm", 0.0) + float(grad.norm())
                return grad / (1 + state["norm"])
            case "shared":
                common = self.state[self._all()[0]].setdefault("common", torch.zeros(3))
                common.add_(grad.mean())
                return grad + common.sum()
            case "flat":
                flat = self.state["flat"].setdefault("all", torch.zeros(1))
                flat.add_(grad.sum())
                return grad + flat.sum()
        return grad.clone()

    def _scaled(self, p: Tensor, direction: Tensor) -> Tensor:
        late = self.drawn.change == "per tensor later" and self.calls > 3
        large = self.drawn.change == "large" and p.numel() > 1000
        if self.drawn.change == "per tensor" or late or large:
            return direction * (p.norm() / (1e-3 + direction.norm()))
        return direction

    def _write(self, p: nn.Parameter, value: Tensor) -> None:
        match self.drawn.writes:
            case "in place":
                p.copy_(value)
            case "by data":
                p.data.copy_(value)
            case "rebind":
                p.data = value
            case "set":
                p.set_(value)
            case "swap twice":
                p.data = torch.zeros_like(value)
                p.data = value.clone()


class Derived(torch.optim.Adam):
    """Adam with rows centred."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(-1, keepdim=True))
        return super().step(closure)


def make(seed: int, *, model: nn.Module) -> torch.optim.Optimizer:
    drawn, parameters = Drawn.draw(seed), list(model.parameters())
    matrices = [p for p in parameters if p.dim() == 2]
    match drawn.torch:
        case "lbfgs":
            return torch.optim.LBFGS(parameters, lr=0.3, max_iter=3, history_size=4)
        case "adafactor":
            return torch.optim.Adafactor(parameters, lr=0.05)
        case "muon":
            for p in parameters:
                p.requires_grad_(p.dim() == 2)
            return torch.optim.Muon(matrices, lr=0.05)
        case "derived adam":
            return Derived(parameters, lr=0.05)
        case "foreach adam":
            return torch.optim.Adam(parameters, lr=0.05, foreach=True)
        case "amsgrad":
            return torch.optim.AdamW(parameters, lr=torch.tensor(0.05), amsgrad=True, maximize=True)
        case "averaged sgd":
            return torch.optim.ASGD(parameters, lr=0.05, t0=2)
    own = type("Own", (Own,), {})  # with class attributes of its own
    groups = [{"params": parameters[n :: drawn.groups], "lr": 0.05 / (1 + n)} for n in range(drawn.groups)]
    made = own(groups, drawn=drawn)
    if drawn.extra == "pre hook":
        made.register_step_pre_hook(_halve)
    elif drawn.extra == "post hook":
        made.register_step_post_hook(_shrink)
    return made


def _halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.mul_(0.9)


def plainly(seed: int, *, world: int, steps: int = STEPS) -> dict[str, Tensor]:
    """The weights of torch's own loop, whose gradient is the mean over `world` ranks."""
    model = Model()
    optimizer = make(seed, model=model)
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            losses = [model(targets(step, rank=rank)) for rank in range(world)]
            for loss in losses:
                loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / world)
            return torch.stack(losses).detach().double().mean().float()

        closure()
        optimizer.step(*((closure,) if _takes_closure(optimizer) else ()))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.LBFGS) or getattr(optimizer, "needs_closure", False)


def engine_of(process: Process, *, seed: int, stage: int, tier: str, dtype: torch.dtype = torch.float32):
    model = Model()
    optimizer = make(seed, model=model)
    folder = tempfile.mkdtemp(dir=os.environ.get("ZTK_TEST_NVME"))
    return parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(name="torch", lr=1.0, decay_all=True, clip_grad_norm=0.0),
        torch_optimizer=optimizer,
        precision=PrecisionPolicy(dtype=dtype),
        zero=ZeroPolicy(stage=stage, bucket_size=1000),
        offload=OffloadPolicy(
            optimizer=Tier(tier),
            parameters=Tier(tier) if stage == 3 else Tier.none,
            nvme_path=folder if tier == "nvme" else None,
            buffer_bytes=1 << 16,
        ),
    )


def train(engine, *, rank: int, start: int = 0, stop: int = STEPS) -> None:
    for step in range(start, stop):
        engine.train_batch([(targets(step, rank=rank),)])


def masters(engine) -> dict[str, Tensor]:
    """The full fp32 weights."""
    found = {}
    for bucket in engine.zero.buckets:
        for place in bucket.layout.placements:
            kind = "master" if bucket.traits.trainable else "parameter"
            found[place.name] = engine.zero.named_state.read(bucket, name=place.name, kind=kind).clone()
    return found


def outcomes(process: Process, *, seeds: Sequence[int], places: Sequence[tuple[int, str]]) -> dict[str, list[str]]:
    """For every optimizer and place: "equal", "refused" or "silent", with the optimizer as the key's value in a failure."""
    found: dict[str, list[str]] = {"equal": [], "refused": [], "silent": []}
    for seed in seeds:
        expected = plainly(seed, world=process.world_size)
        for stage, tier in places:
            label = f"seed {seed}, stage {stage}, {tier}: {Drawn.draw(seed)}"
            try:
                engine = engine_of(process, seed=seed, stage=stage, tier=tier)
            except ValueError as error:
                found["refused"].append(f"{label}: {error}")
                continue
            try:
                train(engine, rank=process.rank)
                own = masters(engine)
                same = all(torch.equal(own[name], value) for name, value in expected.items())
                found["equal" if same else "silent"].append(label)
            except (ValueError, RuntimeError) as error:
                found["refused"].append(f"{label}: {type(error).__name__}: {error}")
            finally:
                engine.close()
    return found


def resumed(
    process: Process,
    *,
    seeds: Sequence[int],
    save_at: tuple[int, str],
    load_at: tuple[int, str],
    folder: str,
    saves: bool,
) -> list[str]:
    """Saves every optimizer after two steps, or loads it and trains on. Returns the optimizers whose weights then differ from a run in one
    go. All ranks have rank 0's data, so that the number of ranks does not matter."""
    wrong = []
    for seed in seeds:
        stage, tier = save_at if saves else load_at
        engine = engine_of(process, seed=seed, stage=stage, tier=tier)
        try:
            if saves:
                train(engine, rank=0, stop=2)
                save(engine, folder=f"{folder}/{seed}")
                continue
            load(engine, path=f"{folder}/{seed}")
            train(engine, rank=0, start=2)
            own = masters(engine)
        finally:
            engine.close()
        expected = plainly(seed, world=1)
        if not all(torch.equal(own[name], value) for name, value in expected.items()):
            wrong.append(f"seed {seed}: {Drawn.draw(seed)}")
    return wrong
