"""Torch optimizers of full parameters have the bits of torch's plain loop at every stage and tier, or are refused.

`tests/slow/test_own_optimizers.py` runs 300 random ones.
"""

import tempfile
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.ranks import RankFailed
from tests.zero.update import random_wholes
from tests.zero.update.random_wholes import SHAPES, Drawn, Model, masters, targets, train
from ztk.checkpoint import CheckpointError, Saver, load, save
from ztk.checkpoint.export import export_torch_distributed
from ztk.checkpoint.verify import verify_all
from ztk.core.policies.offload import PAGE_BYTES
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.core.runtime import Process, Tier
from ztk.core.runtime.mesh import Topology
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.offload import OffloadPolicy

SEEDS = range(10)
SOME = ((0, "none"), (2, "nvme"), (3, "cpu"))


def test_random_optimizers_equal_torchs_loop(ranks):
    found = ranks(2).run(random_wholes.outcomes, seeds=SEEDS, places=SOME)[0]
    assert not found["silent"] and not found["refused"], found
    assert len(found["equal"]) == len(SEEDS) * len(SOME)


def test_the_sample_has_every_kind():
    drawn = [Drawn.draw(seed) for seed in SEEDS]
    assert {one.writes for one in drawn} >= {"rebind", "in place"} and any(one.closure != "none" for one in drawn)
    assert len({one.reads for one in drawn}) > 3 and len({one.state for one in drawn}) > 4


def test_a_resumed_run_has_the_bits_of_one_in_one_go(ranks, tmp_path):
    """Saved by two ranks at stage 2 with states on a disk, loaded by one at stage 3 with states in main memory. Every state is exported."""
    options = {"seeds": SEEDS, "save_at": (2, "nvme"), "load_at": (3, "cpu"), "folder": str(tmp_path)}
    ranks(2).run(random_wholes.resumed, saves=True, **options)
    for seed in SEEDS:
        export_torch_distributed(tmp_path / f"{seed}", to=tmp_path / f"torch-{seed}")
    assert not ranks(1).run(random_wholes.resumed, saves=False, **options)[0]


def saved_twice(process: Process, *, folder: str) -> dict[str, torch.Tensor]:
    """Two saves of a run with states on a disk: at once, and while the training goes on. Returns the states at the second."""
    engine = build(
        process,
        lambda model: Momentum(model.parameters(), lr=0.1),
        stage=1,
        offload=OffloadPolicy(optimizer=Tier.nvme, nvme_path=tempfile.mkdtemp()),
    )
    train(engine, rank=0, stop=1)
    save(engine, folder=f"{folder}/first")
    train(engine, rank=0, start=1, stop=2)
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    with engine.zero.whole_states() as step:
        found = {names[key]: value["velocity"].clone() for key, value in step.state.items()}
    with Saver(engine, folder=f"{folder}/second", asynchronous=True) as saver:
        saver.save()
        train(engine, rank=0, start=2, stop=4)
    engine.close()
    return found


def test_saved_states_are_verified_and_exported(ranks, tmp_path):
    states = ranks(2).run(saved_twice, folder=str(tmp_path))[0]
    assert all(report.faults == () for name in ("first", "second") for report in verify_all(tmp_path / name))
    export_torch_distributed(tmp_path / "second", to=tmp_path / "torch")
    read = {f"optim.state.{name}.velocity": torch.zeros_like(value) for name, value in states.items()}
    dcp.load(read, checkpoint_id=tmp_path / "torch", no_dist=True)
    assert all(torch.equal(read[f"optim.state.{name}.velocity"], value) for name, value in states.items())


class Derived(torch.optim.AdamW):
    """Steps as its class does."""


def other_declaration(process: Process, *, folder: str) -> str:
    """The error of loading a checkpoint of a class that was declared elementwise, as earlier versions took it, where it is not."""
    for elementwise in (True, False):
        engine = build(process, lambda model: Derived(model.parameters()), elementwise=elementwise)
        if elementwise:
            train(engine, rank=0, stop=1)
            save(engine, folder=folder)
        else:
            with pytest.raises(CheckpointError) as raised:
                load(engine, path=folder)
        engine.close()
    return str(raised.value)


def test_a_checkpoint_of_the_other_declaration_names_it(ranks, tmp_path):
    error = ranks(1).run(other_declaration, folder=str(tmp_path))[0]
    assert "Derived declared elementwise: set optimizer.elementwise=true here, too" in error


def unscaled(process: Process) -> tuple[int, int, list[bool]]:
    """fp16 with a scale that overflows first: a skipped step changes neither weights nor states."""
    engine = build(
        process,
        lambda model: Momentum(model.parameters(), lr=0.01),
        stage=2,
        precision=PrecisionPolicy(dtype=torch.float16, loss_scale=LossScalePolicy(initial=2.0**24)),
    )
    first = masters(engine)
    train(engine, rank=0, stop=1)
    with engine.zero.whole_states() as step:
        count = len(step.state)
    kept = [torch.equal(first[name], value) for name, value in masters(engine).items()]
    for _ in range(20):
        train(engine, rank=0, stop=1)
    skipped = engine.read_metrics().skipped_total
    moved = [not torch.equal(first[name], value) for name, value in masters(engine).items()]
    return count, skipped, kept + moved


def test_a_skipped_step_changes_nothing(ranks):
    count, skipped, found = ranks(2).run(unscaled)[0]
    assert count == 0 and 0 < skipped < 20 and all(found)


class Sparse(nn.Module):
    """Uses a part of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().sum()


def leaving(process: Process) -> list[int]:
    model = Sparse()
    optimizer = Momentum(model.parameters(), lr=0.1)
    policy = OptimizerPolicy(name="torch", decay_all=True, skip_unused=True)
    engine = parallelize(model, process=process, optimizer=policy, torch_optimizer=optimizer, zero=ZeroPolicy(stage=2))
    model.used.bias.requires_grad_(False)
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    with engine.zero.whole_states() as step:
        return sorted(len(key.shape) for key in step.state)


def test_parameters_without_a_gradient_have_none_in_the_step(ranks):
    assert ranks(2).run(leaving)[0] == [2]  # the one weight that is used and not frozen


def build(process: Process, make, *, stage: int = 0, clip: float = 0.0, dtype: torch.dtype = torch.float32, **options):
    precision = options.pop("precision", None) or PrecisionPolicy(dtype=dtype)
    model = Model()
    return parallelize(
        model,
        process=process,
        optimizer=OptimizerPolicy(name="torch", lr=1.0, decay_all=True, clip_grad_norm=clip),
        torch_optimizer=make(model),
        precision=precision,
        zero=ZeroPolicy(stage=stage, bucket_size=1000),
        **options,
    )


class Trust(torch.optim.SGD):
    """LARS's ratio of norms."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (1e-6 + p.grad.norm())))


def trust(model: nn.Module) -> Trust:
    return Trust(model.parameters(), lr=0.01)


def clipped(process: Process, *, stage: int) -> list[bool]:
    engine = build(process, trust, stage=stage, clip=0.5)
    train(engine, rank=0, stop=1)
    own = masters(engine)
    model = Model()
    model(targets(0, rank=0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    trust(model).step()
    return [torch.allclose(own[name], value, rtol=1e-6) for name, value in model.named_parameters()]


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_clipped_before_the_step(ranks, stage):
    assert all(ranks(2).run(clipped, stage=stage)[0])


def in_bf16(process: Process, *, stages: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in stages:
        dtypes = []

        class Seen(Trust):
            def step(self, closure=None, dtypes=dtypes):
                dtypes.extend({p.dtype for p in self.param_groups[0]["params"]})
                return super().step(closure)

        engine = build(process, lambda model: Seen(model.parameters(), lr=0.01), stage=stage, dtype=torch.bfloat16)
        train(engine, rank=process.rank)
        assert set(dtypes) == {torch.float32}
        found.append(masters(engine) | {f"16 {n}": p.float().clone() for n, p in engine.zero.full_parameters()})
        engine.close()
    return found


def test_the_step_has_fp32_master_weights(ranks):
    first, *others = ranks(2).run(in_bf16, stages=(0, 1, 3))[0]
    assert all(torch.equal(other[name], value) for other in others for name, value in first.items())
    for name, value in first.items():
        if not name.startswith("16 "):
            assert torch.equal(value.to(torch.bfloat16).float(), first[f"16 {name}"])
            assert not torch.equal(value, first[f"16 {name}"]) or value.numel() < 10


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class Aliasing(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["anchor"] = p.data
        return super().step(closure)


class Growing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = torch.cat([p.data.view(-1), p.data.view(-1)])


class Climbing(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


def run_once(process: Process, *, cls: type, topology: Topology | None = None, **options) -> None:
    if topology is not None:
        process = process.arrange(topology)
    engine = build(process, lambda model: cls(model.parameters(), lr=0.1), **options)
    torch.manual_seed(process.rank)
    try:
        engine.backward(engine(targets(0, rank=0)))
        engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cls": Noisy}, "its step gave other weights on rank 1 than on rank 0"),
        ({"cls": Aliasing}, "its state anchor shares memory with a parameter"),
        ({"cls": Growing}, "its step gave parts.* the shape"),
        ({"cls": Climbing}, r"needs a closure .* engine.train_batch\(micro_batches\), or engine.step\(closure\)"),
        ({"cls": Climbing, "dtype": torch.float16}, "cannot skip a step with a dynamic loss scale: use precision=bf16"),
        ({"cls": Trust, "topology": Topology(tensor=2)}, "steps full parameters, and topology.tensor=2 divides"),
        ({"cls": Trust, "elementwise": True}, "optimizer=Trust: it is not elementwise"),
    ],
    ids=lambda value: value["cls"].__name__ if isinstance(value, dict) else "",
)
def test_what_cannot_be_right_is_refused_by_name(ranks, options, words):
    with pytest.raises(RankFailed, match=words):
        ranks(2).run(run_once, **options)


def with_closure(process: Process, *, stage: int) -> tuple[dict[str, torch.Tensor], int]:
    """Two steps of LBFGS by `engine.step(closure)`, with two micro-batches each."""
    calls = []
    engine = build(process, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2), stage=stage)
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            calls.append(step)
            loss = engine(targets(step, rank=0))
            engine.backward(loss)
            return loss

        closure()
        engine.step(closure)
    return masters(engine), len(calls)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_script_passes_a_closure_to_the_step(ranks, stage):
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(targets(step, rank=0))
            loss.backward()
            return loss

        optimizer.step(closure)
    own, calls = ranks(2).run(with_closure, stage=stage)[0]
    assert calls > 4 and all(torch.equal(own[name], value) for name, value in model.named_parameters())


def test_a_closure_of_an_elementwise_optimizer_is_refused(ranks):
    with pytest.raises(RankFailed, match=r"engine.step\(closure\): only a torch optimizer of full parameters"):
        ranks(1).run(closure_of_sgd)


def closure_of_sgd(process: Process) -> None:
    engine = build(process, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    engine.backward(engine(targets(0, rank=0)))
    engine.step(lambda: None)


class Free(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): gradients at an interpolation, evaluation at the average."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "beta": 0.5, "count": 0, "trains": False})

    @torch.no_grad()
    def _move(self, trains):
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        beta = group["beta"]
                        p.lerp_(self.state[p]["z"], 1 - beta if trains else 1 - 1 / beta)
                group["trains"] = trains

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["trains"], "call train()"
            group["count"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                x = p.lerp(z, 1 - 1 / group["beta"]).lerp(z, 1 / group["count"])
                p.copy_(x.lerp(z, 1 - group["beta"]))


def evaluated(process: Process, *, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, losses = build(process, lambda model: Free(model.parameters()), stage=stage), []
    for step in range(3):
        train(engine, rank=0, start=step, stop=step + 1)
        losses.append(float(engine.eval_batch([(targets(9, rank=0),)])))
    return losses, masters(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_with_a_mode_for_evaluation_gets_it(ranks, stage):
    model, losses = Model(), []
    optimizer = Free(model.parameters())
    for step in range(3):
        optimizer.train()
        optimizer.zero_grad()
        model(targets(step, rank=0)).backward()
        optimizer.step()
        optimizer.eval()
        losses.append(float(model(targets(9, rank=0)).detach()))
        optimizer.train()
    found, own = ranks(2).run(evaluated, stage=stage)[0]
    assert found == losses
    assert all(torch.equal(own[name], value) for name, value in model.named_parameters())


class Keeping(Trust):
    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["of"] = object()
        return super().step(closure)


def warned(process: Process) -> list[str]:
    engine = build(process, lambda model: Keeping(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(engine, rank=0, stop=2)
    return [str(one.message) for one in found]


def test_a_state_that_no_checkpoint_holds_is_a_warning_after_the_first_step(ranks):
    found = [words for words in ranks(1).run(warned)[0] if "saving a checkpoint will fail" in words]
    assert len(found) == 1 and "its state of is a object" in found[0]


def books(process: Process, *, tier: str) -> dict[str, int]:
    engine = build(
        process,
        lambda model: Momentum(model.parameters(), lr=0.1),
        offload=OffloadPolicy(optimizer=Tier(tier), nvme_path=tempfile.mkdtemp() if tier == "nvme" else None),
    )
    train(engine, rank=0, stop=2)
    found = {tier.label: engine.memory.by_category(tier).get("optimizer states", 0) for tier in Tier}
    engine.close()
    return found


class Momentum(Trust):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            self.state[p].setdefault("velocity", torch.zeros_like(p)).add_(p.grad)
        return super().step(closure)


def test_states_are_counted_where_offload_puts_them(ranks):
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    large = 40 * 33  # its state is written to a disk, those below 4,096 bytes stay
    on_disk = -(-4 * large // PAGE_BYTES) * PAGE_BYTES
    books_of = {tier: ranks(1).run(books, tier=tier)[0] for tier in ("none", "cpu", "nvme")}
    assert books_of["none"]["device"] == books_of["cpu"]["host"] == 4 * elements
    assert books_of["nvme"] == {"device": 0, "host": 4 * (elements - large), "nvme": on_disk}
